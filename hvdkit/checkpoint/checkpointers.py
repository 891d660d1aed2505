"""The open checkpointers of one process: one saves all that is trained, and others are archives.

If two networks that are trained together were saved by two checkpointers, a stop or a crash between
their saves would leave them at different steps. So of two checkpointers that are open at the same
time, one saves all that the other saves. The other one is an archive, for instance of the best
steps. A job is stopped by a checkpointer that is no archive.
"""

from __future__ import annotations

import logging
import weakref
from typing import NoReturn, Protocol

from hvdkit.checkpoint.signals import StopRequest
from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.runtime.script_end import note_end_with

_log = logging.getLogger("hvdkit.checkpoint")


class Stopped(SystemExit):
    """The job was asked to stop, has saved its state and can be resumed: exit status 75."""

    def __init__(self, step: int) -> None:
        super().__init__(RESUMABLE)
        self.step = step


class Member(Protocol):
    """A checkpointer, as the others of its process see it.

    Attributes:
        location: its path or URL.
        subjects: the ids of the models and optimizers that it saves, and keeps alive.
        restores: whether the script has called its `restore`.
    """

    location: str
    subjects: frozenset[int]
    restores: bool


class Checkpointers:
    """The open checkpointers of one process.

    Attributes:
        request: the request to stop.
    """

    # The rank of a process changes if Horovod is initialised again.
    _of_ranks: dict[int, Checkpointers] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.request = StopRequest()
        self._open: weakref.WeakSet[Member] = weakref.WeakSet()

    @classmethod
    def of(cls, rank: int) -> Checkpointers:
        """Return those of this process, which is this rank."""
        return cls._of_ranks.setdefault(rank, cls())

    def add(self, member: Member) -> None:
        """Add a new checkpointer. Only a weak reference to it is kept.

        Raises:
            UsageError: it and an open one each save something that the other does not.
        """
        for other in self._open:
            if not (member.subjects <= other.subjects or other.subjects <= member.subjects):
                raise UsageError(
                    f"a checkpointer for {member.location} is made while that for "
                    f"{other.location} is open, and each saves a model or an optimizer that the "
                    f"other does not. If the job were killed between their saves, it would resume "
                    f"from different steps. Expected one checkpointer for all that is trained "
                    f"together, such as model={{'generator': g, 'critic': c}} and the same for "
                    f"optimizer (for the callback of Keras: the other model is an attribute of the "
                    f"model); or close() of the first one, if its training has ended"
                )
        self._open.add(member)
        self.request.stopped_at = None

    def remove(self, member: Member) -> None:
        """Remove a checkpointer that is closed."""
        self._open.discard(member)

    def is_archive(self, member: Member) -> bool:
        """Return whether another open checkpointer saves more, or the same and is restored."""
        return any(_rank(other) > _rank(member) for other in self._open - {member})

    def is_last(self, member: Member) -> bool:
        """Return whether no other checkpointer is open."""
        return not self._open - {member}


def _rank(member: Member) -> tuple[int, bool]:
    return len(member.subjects), member.restores


def stopped(request: StopRequest, step: int | None, speaks: bool) -> Stopped:
    """Return the exception that ends this process.

    Args:
        request: is answered with it.
        step: the last step that was saved.
        speaks: whether this rank logs messages.
    """
    if speaks:
        _log.warning(
            "asked to stop%s: step %s is saved, and the job can be resumed; exit status %d",
            *(f" ({request.asked})" if request.asked else "", step, RESUMABLE),
        )
    request.answer()
    note_end_with(RESUMABLE)
    return Stopped(step or 0)


def end_process(request: StopRequest, step: int, speaks: bool, number: int | None) -> NoReturn:
    """End this process for a signal after the last checkpointer was closed; see `StopRequest`."""
    if number is not None:
        request.record(number)
    raise stopped(request, step, speaks)
