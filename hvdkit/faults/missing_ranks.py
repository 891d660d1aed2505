"""Describe the ranks that have not called a collective, and the ranks that these wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hvdkit.faults import stacks
from hvdkit.faults.names import (
    CONTINUED,
    ENDED,
    STOPPED,
    describe_call,
    is_internal,
    name_call,
    name_ranks,
    title,
)
from hvdkit.faults.records import Call, Record
from hvdkit.faults.waits import Wait, seconds_waited

#: The most ranks that are described one by one.
SHOWN = 4


def first_line(wait: Wait, records: Mapping[int, Record]) -> str:
    """Return which ranks wait for a collective, and for how long."""
    record = records[wait.waiting[0]]
    seconds = seconds_waited(wait, records)
    have = "have" if len(wait.waiting) > 1 else "has"
    ranks = name_ranks(wait.waiting)
    return f"{ranks} {have} waited {seconds:.0f} s for {describe_call(wait.call, record)}."


@dataclass(frozen=True)
class Hang:
    """The ranks of a job without progress, and the collectives for which they wait.

    Attributes:
        states: as for `judge`.
        incomplete: the collectives that lack ranks.
        hosts: as for `judge`.
        raised: as for `judge`.
    """

    records: Mapping[int, Record]
    states: Mapping[int, str]
    incomplete: Sequence[Wait]
    hosts: Sequence[str]
    raised: Mapping[int, str]
    _awaited: dict[int, Call | None] = field(default_factory=dict, repr=False)

    @cached_property
    def _lacking(self) -> Mapping[tuple[int, str, int], Wait]:
        return {wait.call.key: wait for wait in self.incomplete}

    def awaited(self, rank: int) -> Call | None:
        """Return the collective for which a rank's main thread waits, or the graph in it.

        Return None if the thread runs, or if it is not known what the rank does.
        """
        if rank not in self._awaited:
            self._awaited[rank] = self._find_awaited(rank)
        return self._awaited[rank]

    def _find_awaited(self, rank: int) -> Call | None:
        record = self.records.get(rank)
        if record is None or rank in self.states or not record.open:
            return None
        frames = stacks.main_thread(record.stacks)
        if frames and not (stacks.waits(frames) or stacks.runs_graph(frames)):
            return None
        # A call that all ranks have made may end in a moment. Of the calls that lack the same ranks
        # as the first one, a bucket or a call of the user says more.
        lacking = [call for call in record.open if call.key in self._lacking]
        if not lacking:
            return record.open[0]
        first = self._lacking[lacking[0].key].missing
        return min((c for c in lacking if self._lacking[c.key].missing == first), key=is_internal)

    def awaits(self, rank: int, call: Call) -> bool:
        """Return whether a rank waits for a collective."""
        awaited = self.awaited(rank)
        return awaited is not None and awaited.key == call.key

    def blocker(self, rank: int) -> Wait | None:
        """Return the collective that lacks ranks and for which a rank waits; None for none."""
        call = self.awaited(rank)
        return None if call is None else self._lacking.get(call.key)

    def lines(self, wait: Wait, late: Sequence[Wait]) -> list[str]:
        """Return lines about the ranks that have not called `wait`, and those that they wait for.

        Other collectives that have stalled follow, such as those of another process set, if they
        lack ranks for another reason.

        Args:
            wait: the collective. The verdict has already named the ranks that wait for it.
            late: the collectives that have stalled.
        """
        named = set(wait.waiting)
        lines = self._chain(wait, named, SHOWN)
        for other in late:
            missing = [rank for rank in other.missing if not self._depends(rank, named)]
            if missing and (left := SHOWN - len(named) + len(wait.waiting)) > 0:
                lines.append(first_line(other, self.records))
                lines += self._chain(replace(other, missing=missing), named, left)
        return lines

    def _chain(self, wait: Wait, named: set[int], left: int) -> list[str]:
        """Return lines about at most `left` ranks, and add all missing ranks to those named."""
        lines: list[str] = []
        pending = [(wait, "it")]
        for each, what in pending:
            absent = [rank for rank in each.missing if rank not in named]
            named.update(absent)
            shown, left = absent[: max(left, 0)], left - len(absent)
            for rank in shown:
                blocker = self.blocker(rank)
                text = self._describe(rank, what) + self._blocked_by(rank, each, blocker, named)
                lines.append(text + traceback_of(rank, self.raised))
                if blocker is not None:
                    owner = self.records[blocker.waiting[0]]
                    pending.append((blocker, title(blocker.call, owner)))
            if shown and (more := len(absent) - len(shown)):
                lines.append(
                    f"{more} more {'rank has' if more == 1 else 'ranks have'} not called it."
                )
        return lines

    def _blocked_by(
        self, rank: int, wait: Wait, blocker: Wait | None, named: Collection[int]
    ) -> str:
        """Return a sentence about the ranks that `rank` waits for and that have no own line.

        Return "" if two groups of ranks wait for each other in one process set.
        """
        if blocker is None:
            return ""
        # In another process set, the reader cannot tell which ranks are missing.
        is_same = blocker.call.group == wait.call.group
        ranks = [each for each in blocker.missing if each in named]
        if not ranks or (is_same and set(blocker.missing) == set(wait.waiting)):
            return ""
        have = "have" if len(ranks) > 1 else "has"
        name = name_call(blocker.call, self.records[rank])
        return f" {name_ranks(ranks)} {have} not called {name}."

    def _depends(self, rank: int, named: Collection[int]) -> bool:
        """Return whether a rank is named, or waits for such a rank through any others."""
        pending = [rank]
        for each in pending:
            if each in named:
                return True
            blocker = self.blocker(each)
            pending += [r for r in (blocker.missing if blocker else ()) if r not in pending]
        return False

    def _describe(self, rank: int, what: str) -> str:
        """Return what a rank does that has not called `what`."""
        record, state = self.records.get(rank), self.states.get(rank)
        known = self.hosts[rank] if rank < len(self.hosts) else ""
        host = record.host if record else known
        where = f"Rank {rank}" + (f" on {host}" if host else "") + f" has not called {what}"
        if state == STOPPED:
            return f"{where}: the process is stopped (SIGSTOP or a debugger)."
        if state == ENDED:
            return f"{where}: the process has ended."
        if state == CONTINUED:
            return f"{where}, or has called it without a new record."
        if record is None:
            return f"{where}, and did not report its state."
        frames = stacks.main_thread(record.stacks)
        call, frame = self.awaited(rank), stacks.own_frame(frames)
        name = "" if call is None else describe_call(call, record)
        in_graph = call is not None and stacks.runs_graph(frames)
        if call is not None and not in_graph:
            doing = f"the rank waits for {name}" + (f", at {frame}" if frame else "")
        elif frame:
            doing = f"the rank is at {frame}"
        else:
            doing = _without_stack(record.stacks)
        if in_graph:
            doing += f", in a graph of TensorFlow that waits for {name}"
        text = f"{where}: {doing}."
        if in_graph:
            text += _other_thread(record)
        elif frames and not stacks.waits(frames):
            text += below_line(frames, record)
        if record.done:
            last = record.done[-1]
            since = record.time - (last.ended or record.time)
            ended = "failed" if record.failed_call == last else "ended"
            text += (
                f" Its last collective, {describe_call(last, record)}, {ended} {since:.0f} s ago."
            )
        return text


def _without_stack(text: str) -> str:
    if stacks.lacks_threads(text):
        return "the stack of its main thread is not known, because the rank has many threads"
    return "the stack of the rank is not known"


def traceback_of(rank: int, raised: Mapping[int, str]) -> str:
    """Return a sentence about the traceback of a rank; "" if there is none.

    Args:
        raised: as for `judge`.
    """
    return f" The rank has written a traceback: {raised[rank]}" if rank in raised else ""


def below_line(frames: Sequence[stacks.Frame], record: Record) -> str:
    """Return sentences about what runs below the user's line, if a library runs there."""
    if not frames[0].is_library:
        return ""
    if stacks.is_ending(frames):
        return f" The script has ended: Python waits for other threads.{_other_thread(record)}"
    # TensorFlow reads data in other threads.
    if text := _other_thread(record):
        return text
    frame = stacks.package_frame(frames)
    return "" if frame is None else f" This line has called {frame}."


def _other_thread(record: Record) -> str:
    """Return a sentence about a thread, not the main thread, that runs code of the user."""
    frame = stacks.other_thread(record.stacks)
    return "" if frame is None else f" Another thread is at {frame}."
