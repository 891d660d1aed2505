"""Describe the ranks that have not called a collective, and the ranks that these wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hvdkit.faults import stacks
from hvdkit.faults.call_names import describe_call, is_internal, name_call, title
from hvdkit.faults.process_states import CONTINUED, ENDED, STOPPED
from hvdkit.faults.rank_names import name_ranks
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


class Chain:
    """Lines about the ranks that have not called a collective, and about those that they wait for.

    Args:
        wait: the collective. The verdict has already named the ranks that wait for it.
        incomplete: all collectives that lack ranks.
        records: the records, by rank.
        states: as for `judge`.
        hosts: as for `judge`.
        raised: as for `judge`.
    """

    def __init__(
        self,
        wait: Wait,
        incomplete: Sequence[Wait],
        records: Mapping[int, Record],
        states: Mapping[int, str],
        hosts: Sequence[str] = (),
        raised: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.lines: list[str] = []
        self._wait = wait
        self._incomplete = sorted(incomplete, key=lambda each: each.call.enqueued)
        self._records = records
        self._states = states
        self._hosts = hosts
        self._raised = raised
        self._named = set(wait.waiting)
        self._left = SHOWN

    def describe(self, wait: Wait, what: str) -> None:
        """Add lines about the ranks that have not called `wait`, and about those they wait for.

        Args:
            wait: the collective.
            what: a text for it.
        """
        absent = [rank for rank in wait.missing if rank not in self._named]
        self._named.update(absent)
        shown = absent[: max(self._left, 0)]
        self._left -= len(absent)
        blockers: list[Wait] = []
        for rank in shown:
            record = self._records.get(rank)
            blocker = self._blocker(rank)
            waits_for = self._awaited(rank)
            known = self._hosts[rank] if rank < len(self._hosts) else ""
            text = _describe(rank, known, record, self._states.get(rank), what, waits_for)
            text += self._blocked_by(rank, wait, blocker) + traceback_of(rank, self._raised)
            self.lines.append(text)
            if blocker is not None:
                blockers.append(blocker)
        if shown:
            self.lines += _not_shown(len(absent) - len(shown))
        for blocker in blockers:
            owner = self._records[blocker.waiting[0]]
            self.describe(blocker, title(blocker.call, owner))

    def describe_further_waits(self, late: Collection[tuple[int, str, int]]) -> None:
        """Add lines about collectives, such as those of another process set, that lack ranks for
        another reason than the ranks that are already named.

        Args:
            late: as for `judge`.
        """
        for other in self._incomplete:
            # A younger call may end in a moment.
            half = seconds_waited(self._wait, self._records) / 2
            if other.call.key not in late and seconds_waited(other, self._records) < half:
                continue
            missing = [rank for rank in other.missing if not self._depends_on_named(rank)]
            if missing and self._left > 0:
                self.lines.append(first_line(other, self._records))
                self.describe(replace(other, missing=missing), "it")

    def _awaited(self, rank: int) -> Call | None:
        """Return the collective for which the main thread of a rank waits; None if it runs."""
        record = self._records.get(rank)
        if record is None or rank in self._states or not record.open:
            return None
        frames = stacks.main_thread(record.stacks)
        if frames and not stacks.waits(frames):
            return None
        # A call that all ranks have made may end in a moment. Of the calls that lack the same ranks
        # as the oldest one, a bucket or a call of the user says more.
        lacks = {each.call.key: each.missing for each in self._incomplete}
        incomplete = [call for call in record.open if call.key in lacks] or record.open[:1]
        alike = [c for c in incomplete if lacks.get(c.key) == lacks.get(incomplete[0].key)]
        return min(alike, key=is_internal)

    def _blocker(self, rank: int) -> Wait | None:
        """Return the collective with missing ranks for which a rank waits, if there is one."""
        call = self._awaited(rank)
        if call is None and rank in self._records and rank not in self._states:
            call = _awaited_by_graph(self._records[rank])
        if call is None:
            return None
        return next((each for each in self._incomplete if each.call.key == call.key), None)

    def _blocked_by(self, rank: int, wait: Wait, blocker: Wait | None) -> str:
        """Return a sentence about the ranks that `rank` waits for and that have no own line.

        Return "" if two groups of ranks wait for each other in one process set.
        """
        if blocker is None:
            return ""
        # In another process set, the reader cannot tell which ranks are missing.
        is_same = blocker.call.group == wait.call.group
        if is_same and set(blocker.missing) == set(wait.waiting):
            return ""
        ranks = [each for each in blocker.missing if each in self._named or self._left <= 0]
        if not ranks:
            return ""
        have = "have" if len(ranks) > 1 else "has"
        name = name_call(blocker.call, self._records[rank])
        return f" {name_ranks(ranks)} {have} not called {name}."

    def _depends_on_named(self, rank: int) -> bool:
        """Return whether a rank is named, or waits for such a rank through any others."""
        seen: set[int] = set()
        pending = [rank]
        while pending:
            each = pending.pop()
            if each in self._named:
                return True
            if each not in seen:
                seen.add(each)
                blocker = self._blocker(each)
                pending += blocker.missing if blocker else ()
        return False


def _describe(
    rank: int,
    host: str,
    record: Record | None,
    state: str | None,
    what: str,
    waits_for: Call | None,
) -> str:
    """Return what a rank does that has not called `what`.

    Args:
        rank: the rank.
        host: its host, if it has no record; empty if the host is not known.
        record: its record, if there is one.
        state: as in the states of `judge`; None without one.
        what: a text for the collective.
        waits_for: the collective for which the rank waits, if it waits.
    """
    host = record.host if record else host
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
    if waits_for is not None:
        doing = f"the rank waits for {describe_call(waits_for, record)}"
    else:
        doing = "" if frames else _without_stack(record.stacks)
    if frame := stacks.own_frame(frames):
        doing += f"{', ' if doing else 'the rank is '}at {frame}"
    of_graph = _awaited_by_graph(record)
    if of_graph is not None:
        call = describe_call(of_graph, record)
        doing += f", in a graph of TensorFlow that waits for {call}"
    text = f"{where}: {doing}."
    if of_graph is not None:
        text += _other_thread(record)
    elif frames and not stacks.waits(frames):
        text += below_line(frames, record)
    if record.done:
        last = record.done[-1]
        since = record.time - (last.ended or record.time)
        ended = "failed" if record.failed_call == last else "ended"
        text += f" Its last collective, {describe_call(last, record)}, {ended} {since:.0f} s ago."
    return text


def _without_stack(text: str) -> str:
    if stacks.lacks_threads(text):
        return "the stack of its main thread is not known, because the rank has many threads"
    return "the stack of the rank is not known"


def _awaited_by_graph(record: Record) -> Call | None:
    """Return the collective for which the rank's graph of TensorFlow waits; None if none does."""
    # The threads of a graph call collectives, so the stack of the main thread shows no wait.
    runs = stacks.runs_graph(stacks.main_thread(record.stacks))
    return record.open[0] if record.open and runs else None


def _not_shown(count: int) -> list[str]:
    if count <= 0:
        return []
    return [f"{count} more {'rank has' if count == 1 else 'ranks have'} not called it."]


def traceback_of(rank: int, raised: Mapping[int, str]) -> str:
    """Return a sentence about the traceback of a rank; "" if there is none.

    Args:
        rank: the rank.
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
