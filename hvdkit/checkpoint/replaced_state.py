"""Tell the checkpointers of this process that a commit of an elastic job has replaced the state.

`hvdkit.elastic` stores and restores commits, and does not know checkpointers. So a
checkpointer adds itself here:

- with `follow`, if the script gives it the steps;
- with `keep_position`, if it counts the steps itself, as the Keras callback does. Each commit then
  contains its position, and a restored commit returns it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol


class Follower(Protocol):
    """An object that depends on the step of the training, such as a checkpointer."""

    def state_replaced(self) -> None:
        """Accept that the next step may be lower than the steps before. Not a collective."""


class Positioned(Protocol):
    """An object that counts the steps of the training itself."""

    def position(self) -> Any:
        """Return the position now: a picklable object. A commit contains that of the first rank."""


_followers: weakref.WeakSet[Follower] = weakref.WeakSet()


def follow(follower: Follower) -> None:
    """Call `state_replaced` of this object whenever a commit replaces the state.

    Args:
        follower: the object. Only a weak reference is kept.
    """
    _followers.add(follower)


def state_replaced() -> None:
    """Tell all followers that a commit has replaced the state."""
    for follower in list(_followers):
        follower.state_replaced()


_positioned: weakref.WeakValueDictionary[str, Positioned] = weakref.WeakValueDictionary()
#: The positions in the restored commit that were not taken yet.
_restored: dict[str, Any] = {}
#: The last positions of objects that have ended.
_ended: dict[str, Any] = {}


def keep_position(name: str, owner: Positioned) -> None:
    """Store the position of this object in each commit.

    Args:
        name: a name of the object that is the same at each start of the job.
        owner: the object. Only a weak reference is kept.
    """
    _positioned[name] = owner


def end_position(name: str) -> None:
    """Keep the last position of an object, and forget the object."""
    if (owner := _positioned.pop(name, None)) is not None:
        _ended[name] = owner.position()


def positions() -> dict[str, Any]:
    """Return the positions to store in a commit, by name."""
    running = {name: owner.position() for name, owner in _positioned.items()}
    return _restored | _ended | running


def restore_positions(restored: Mapping[str, Any]) -> None:
    """Set the positions that a restored commit contains."""
    _restored.clear()
    _restored.update(restored)


def take_position(name: str) -> Any:
    """Return the position in the restored commit, once; None if there is none."""
    return _restored.pop(name, None)
