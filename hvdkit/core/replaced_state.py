"""Tell the checkpointers of this process that a commit of an elastic job has replaced the state.

`hvdkit.core.elastic` restores the commit, and does not know checkpointers. So a checkpointer adds
itself here.
"""

from __future__ import annotations

import weakref
from typing import Protocol


class Follower(Protocol):
    """An object that depends on the step of the training, such as a checkpointer."""

    def state_replaced(self) -> None:
        """Accept that the next step may be lower than the steps before. Not a collective."""


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
