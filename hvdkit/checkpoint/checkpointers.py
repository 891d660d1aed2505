"""The checkpointers of one process: when a stop has saved all of them, and which belong together.

A script may have several checkpointers, such as one for each network. A job that stops must save
all of them at the same step, each in its own `maybe_save`. The order of the calls shows which
checkpointers one loop uses: between two calls of one of them, the loop calls all of them.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdkit.checkpoint.signals import StopRequest
from hvdkit.checkpoint.store import Store
from hvdkit.core.script_end import note_end_with
from hvdkit.errors import RESUMABLE

_log = logging.getLogger("hvdkit.checkpoint")

#: Seconds for which a stop waits for checkpointers that may stay behind.
STOP_SECONDS = 20.0


class Stopped(SystemExit):
    """The job was asked to stop, has saved its state and can be resumed: exit status 75."""

    def __init__(self, step: int) -> None:
        super().__init__(RESUMABLE)
        self.step = step


class _Waiting(Protocol):
    def wait(self) -> None: ...


@dataclass(frozen=True)
class _Call:
    """A call of `maybe_save` or `save`.

    Attributes:
        step: the step that the call was given.
        at: its place in the order of all calls of the process.
    """

    step: int | None
    at: int


@dataclass(eq=False)
class Member:
    """A checkpointer, as the others see it.

    Attributes:
        checkpointers: those of the process.
        store: its storage.
        ranks: its ranks.
        manager: the checkpointer.
        number: its place in the order of creation.
        last: its last call.
        before: its last call with an earlier step than that of `last`.
        saved: the step that it has saved or restored last; None for none.
        has: the steps that it has saved or restored.
        restored: the step that it has restored, until the first call after that; None for none.
        first: the place of its first call in the order of all calls.
        can_stop: whether the script calls `maybe_save`, and not only `save`.
        restores: whether it resumes at a step of its folder.
        subjects: the ids of the models and optimizers that it saves.
        updates: returns the number of steps that its optimizers have made.
        updates_before: this number at its creation or last restore.
        same_steps: those that the script calls, or has restored, with the same steps.
    """

    checkpointers: Checkpointers
    store: Store
    ranks: frozenset[int]
    manager: weakref.ref[_Waiting]
    number: int
    restores: bool
    subjects: frozenset[int]
    updates: Callable[[], int]
    updates_before: int = 0
    last: _Call = field(default=_Call(None, 0))
    before: _Call = field(default=_Call(None, 0))
    saved: int | None = None
    has: frozenset[int] = frozenset()
    restored: int | None = None
    first: int = 0
    can_stop: bool = False
    same_steps: weakref.WeakSet[Member] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.updates_before = self.updates()

    def call(self, step: int, can_stop: bool = False) -> None:
        """Record a call. A second call in a row with the same step, as of `save`, is the same.

        Args:
            step: its step.
            can_stop: whether it is a call of `maybe_save`.
        """
        self.can_stop |= can_stop
        self.restored = None
        is_repeated = step == self.last.step and self.last.at == self.checkpointers.calls
        if is_repeated and self.is_called:
            return
        if step != self.last.step:
            self.before = self.last
        self.last = _Call(step, self.checkpointers.count())
        self.first = self.first or self.last.at
        self._note_same_step()

    def record_restore(self, step: int | None, from_folder: bool = True) -> None:
        """Record a restore.

        Args:
            step: the step; None if another training begins.
            from_folder: whether the state comes from the folder, and not from a commit.
        """
        self.last, self.before = _Call(step, 0), _Call(None, 0)
        self.saved, self.restored = step, step if from_folder else None
        self.has = frozenset(() if self.restored is None else (self.restored,))
        self.updates_before = self.updates()
        if step is not None:
            self._note_same_step()

    def record_save(self, step: int) -> None:
        """Record that a step was saved."""
        self.saved = step
        # A job may continue from a lower step than it has saved.
        self.has = frozenset(each for each in self.has if each < step) | {step}

    def _note_same_step(self) -> None:
        for other in self.checkpointers.others(self):
            if other.last.step == self.last.step and other.ranks == self.ranks:
                self.same_steps.add(other)
                other.same_steps.add(self)

    @property
    def is_in_use(self) -> bool:
        """Whether the loop still calls it: its last call is not further back than the one before.

        A loop may call a checkpointer in some iterations only. After a restore, the first call may
        come at any time.
        """
        return (
            not self.is_called
            or self.checkpointers.calls - self.last.at <= self.last.at - self.before.at
        )

    @property
    def is_called(self) -> bool:
        """Whether the script has called `maybe_save` or `save`, since the last restore."""
        return self.last.at > 0

    @property
    def is_used(self) -> bool:
        """Whether the script has called it, or has restored a step of its folder."""
        return self.is_called or self.restored is not None

    @property
    def is_trained(self) -> bool:
        """Whether its optimizers have made steps since its creation or last restore."""
        return self.updates() != self.updates_before

    def may_leave(self, other: Member) -> bool:
        """Return whether a stop may leave another one at an earlier step.

        A new start then restores both from the newest step that both have.
        """
        return other in self.same_steps and self.restores and other.restores

    def beside(self) -> list[Member]:
        """Return the checkpointers that are called with the same steps."""
        return [each for each in self._related() if each in self.same_steps and each.is_in_use]

    def unsaved(self) -> list[Member]:
        """Return the checkpointers that have no step, although their optimizers made steps."""
        return [each for each in self._related() if each.is_trained and each.saved is None]

    def _related(self) -> list[Member]:
        return [
            other
            for other in self.checkpointers.others(self)
            if other.restores
            and other.ranks == self.ranks
            # An archive of the same model need not have the steps of its checkpoints.
            and not other.subjects & self.subjects
        ]

    def steps_to_keep(self) -> frozenset[int]:
        """Return the newest steps that all checkpointers have which belong together.

        The newest one may not be on the disk yet. So keep the one before, too.
        """
        others = self.beside()
        common = self.has.intersection(*(other.has for other in others)) if others else ()
        return frozenset(sorted(common)[-2:])

    def folders_of(self, others: Iterable[Member]) -> tuple[str, ...]:
        """Return the folders of others relative to the own one.

        So the paths stay valid if all folders are moved.
        """
        return tuple(relative(other.store, self.store) for other in others)


def relative(store: Store, to: Store) -> str:
    """Return the path of a folder relative to another one."""
    return os.path.relpath(store.location, to.location)


class Checkpointers:
    """The checkpointers of one process that are open.

    Attributes:
        request: the request to stop.
        stops_since: when the ranks have agreed to stop (`time.monotonic`); None if they have not.
        calls: the number of calls of all.
    """

    # The rank of a process changes if Horovod is initialised again.
    _of_ranks: dict[int, Checkpointers] = {}  # noqa: RUF012

    def __init__(self, rank: int) -> None:
        self.request = StopRequest()
        self.stops_since: float | None = None
        self._rank = rank
        self._open: weakref.WeakSet[Member] = weakref.WeakSet()
        self.calls = 0
        # Those that the stop has saved since its beginning, or since the loop began again.
        self._saved: set[Member] = set()
        self._made = 0
        # What was logged: a text and the checkpointers.
        self._reported: set[tuple[str | Member, ...]] = set()
        # Those that were closed since one was opened, and the last step of those that were closed.
        self._closed: list[Member] = []
        self._last_step: int | None = None

    @classmethod
    def of(cls, rank: int) -> Checkpointers:
        """Return those of this process, which is this rank."""
        return cls._of_ranks.setdefault(rank, cls(rank))

    def count(self) -> int:
        """Count a call, and return its place in the order of all calls."""
        self.calls += 1
        return self.calls

    def add(
        self,
        manager: _Waiting,
        store: Store,
        ranks: Collection[int],
        restores: bool,
        subjects: frozenset[int] = frozenset(),
        updates: Callable[[], int] = int,
    ) -> Member:
        """Add a new checkpointer; see `Member`. Only a weak reference to it is kept."""
        self._made += 1
        member = Member(
            *(self, store, frozenset(ranks), weakref.ref(manager), self._made, restores),
            subjects=subjects,
            updates=updates,
        )
        self._open.add(member)
        self.request.stopped_at = None
        return member

    def others(self, member: Member) -> list[Member]:
        """Return the other open checkpointers, in the order of their creation."""
        return sorted(self._open - {member}, key=lambda each: each.number)

    # A stop

    def agree_to_stop(self) -> None:
        """Record that the ranks of a checkpointer have agreed to stop."""
        if self.stops_since is None:
            self.stops_since = time.monotonic()

    def has_saved_loop(self, member: Member, step: int) -> bool:
        """Return whether the loop begins again, and all that it has called are saved.

        If only some are saved, the stop begins again, too.

        Args:
            member: the checkpointer that is called now. Call this before `Member.call`.
            step: the step of the call.
        """
        others = [each for each in self._saved if each.saved != step]
        # An inner loop, such as that of a GAN's critic, may call one several times, with the same
        # step, or before the outer loop calls the others. The stop waits for them.
        if member in others or any(each in member.same_steps for each in others):
            missing = self._missing()
            behind = [each for each in missing if member.may_leave(each)]
            if behind == missing and self._is_overdue:
                missing = []
            if self._may_stop(member, missing):
                self._report(member, "the next start resumes from the newest step of all", behind)
                return True
            self._report(member, "the stop waits for their next save", missing)
            self.begin_stop_again()
        elif others and not member.is_called:
            # The first call of a checkpointer that the loop calls in some iterations only.
            self.begin_stop_again()
        return False

    def _missing(self) -> list[Member]:
        """Return those that the stop has not saved, and that the loop calls."""
        since = min(each.last.at for each in self._saved)
        subjects = frozenset().union(*(each.subjects for each in self._saved))
        return [
            each
            for each in sorted(self._open - self._saved, key=lambda each: each.number)
            if each.last.at >= since
            or (
                # The script may call it at the end of an epoch only.
                (each.can_stop and each.is_in_use if each.is_called else each.is_trained)
                # An archive has nothing that is not saved.
                and not (each.subjects and each.subjects <= subjects)
            )
        ]

    @property
    def _is_overdue(self) -> bool:
        since = self.stops_since
        return since is not None and time.monotonic() - since >= STOP_SECONDS

    def _report(self, member: Member, what: str, others: Sequence[Member]) -> None:
        if others and self._rank == min(member.ranks) and (what, *others) not in self._reported:
            self._reported.add((what, *others))
            folders = " and ".join(each.store.location for each in others)
            _log.warning("asked to stop, and %s was not saved: %s", folders, what)

    def begin_stop_again(self) -> None:
        """Save all again, because the loop begins again and the saved steps do not suffice."""
        self._saved.clear()

    def has_saved_all(self, member: Member) -> bool:
        """Return whether the stop has saved all, and the ranks of `member` may stop."""
        return self._may_stop(member, self._open)

    def _may_stop(self, member: Member, needed: Iterable[Member]) -> bool:
        # Only if all ranks whose state was saved take part in this call.
        together = all(each.ranks <= member.ranks for each in self._saved)
        return together and all(each in self._saved for each in needed)

    def has_passed(self, member: Member) -> bool:
        """Return whether the loop has called another one with this step without a save.

        Then the stop begins with the next step.
        """
        if self._saved:
            return False
        called = [
            other
            for other in self.others(member)
            if other.last.at > member.before.at
            and (
                other.last.step == member.last.step
                # With different step numbers, an iteration begins with the one called first.
                or (
                    member.before.at > 0
                    and other.first < member.first
                    and other not in member.same_steps
                )
            )
        ]
        if any(other.saved != other.last.step for other in called):
            return True
        self._saved.update(called)
        return False

    def record_save(self, member: Member) -> None:
        """Record that the stop has saved `member`."""
        self._saved.add(member)

    def stop(self, member: Member, speaks: bool) -> Stopped:
        """Wait for all writes, and return the exception that ends this process.

        A collective of the ranks of all checkpointers that are saved.

        Args:
            member: the checkpointer that stops the job.
            speaks: whether this rank logs messages.
        """
        for other in sorted(self._saved - {member}, key=lambda each: each.number):
            if (manager := other.manager()) is not None:
                manager.wait()
        step = self._last_step if member.saved is None else member.saved
        return self._end(step, speaks)

    def _end(self, step: int | None, speaks: bool) -> Stopped:
        if speaks:
            asked = self.request.asked
            _log.warning(
                "asked to stop%s: step %d is saved, and the job can be resumed; exit status %d",
                *(f" ({asked})" if asked else "", step, RESUMABLE),
            )
        self.request.answer()
        self.stops_since = None
        self._saved.clear()
        note_end_with(RESUMABLE)
        return Stopped(step or 0)

    # The end

    def can_resume(self) -> bool:
        """Return whether this process can be resumed without further saves.

        Each checkpointer that was called has then saved a step, or has restored one.
        """
        used = [each for each in (*self._open, *self._closed) if each.is_used]
        return bool(used) and all(each.saved is not None for each in used)

    def folders(self, member: Member) -> list[Store]:
        """Return the storages with the same ranks from which a new start of the script resumes."""
        return [
            each.store
            for each in (*self._open, *self._closed)
            if each.restores and each.ranks == member.ranks and each.is_used
        ]

    def is_last(self, member: Member) -> bool:
        """Return whether no other checkpointer is open on these ranks."""
        return not self.others(member)

    def close(self, member: Member, speaks: bool) -> None:
        """Remove a checkpointer.

        Args:
            member: the checkpointer.
            speaks: whether this rank logs messages.
        """
        if member.saved is not None:
            self._last_step = member.saved
        self._open.discard(member)
        self._saved.discard(member)
        self._closed = [*self._closed, member] if self._open else []
        if not self._open:
            self.stops_since = None

        def end_process(number: int) -> None:
            self.request.record(number)
            raise self._end(self._last_step, speaks)

        self.request.end_process = end_process
