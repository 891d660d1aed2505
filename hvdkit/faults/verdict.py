"""Say which ranks wait for which collective, and where the missing ranks are.

A collective ends only after every rank of its process set has called it. So if a rank waits for
call n of a collective, and another rank has made fewer calls of it, the other rank is missing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdkit.faults import stacks
from hvdkit.faults.alignment import aligned
from hvdkit.faults.rank_names import name_ranks
from hvdkit.faults.records import Call, Record, with_all_groups
from hvdkit.faults.unnamed_calls import different_lines, is_unnamed

_DEADLOCK = "Every rank waits in a collective that another rank has not called: a deadlock."
_LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_RECEIVE_LIMIT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
#: The most ranks that are described one by one.
_SHOWN = 4
#: The states of a rank's process, as texts for the user.
STOPPED = "stopped"
ENDED = "ended"


# The names of hvdkit's own collectives -> what they do.
_OWN = {
    re.compile(pattern): text
    for pattern, text in {
        r"hvdkit\.rounds\.": "the comparison of the ranks' states",
        r"hvdkit\.replicas": "the comparison of parameters and optimizer state",
        r"hvdkit\.agreement": "a consistency check",
        r"hvdkit\.[0-9a-f]{16}\.\d+\.used": "the number of ranks that use each gradient",
        r"hvdkit\.[0-9a-f]{16}\.\d+\.largest": "the magnitude of the sums",
        r"hvdkit\.checkpoint\.": "a call of the checkpointer",
        r"hvdkit\.keras\.(metrics|logs|loss)": "the reduction of metrics",
        r"hvdkit\.keras\.epoch": "the end of an epoch of fit",
        r"hvdkit\.keras\.": "the coordination of fit",
        r"hvdkit\.broadcast": "a broadcast of parameters or objects",
        r"hvdkit\.allgather_object": "allgather_object",
        r"hvdkit\.process_set\.add": "add_process_set",
        r"hvdkit\.process_set\.remove": "remove_process_set",
        r"hvdkit\.shard\.": "the comparison of the data's sizes",
        r"sync_batch_norm": "a layer SyncBatchNorm",
        r"^join": "join()",
    }.items()
}


# The name of a call without a name, outside of a graph of TensorFlow: the patch
# `tensorflow-eager-names`.
_BY_LINE = re.compile(r"(\w+)\.line \d+ of ")
_SAME_NAME = (
    "Outside of a tf.function, ranks match calls without a name by their line of code. If these "
    "calls belong together, give all of them the same name."
)


@dataclass(frozen=True)
class Verdict:
    """The cause of a job without progress.

    Attributes:
        text: a paragraph for the user.
        waiting: the ranks that wait for the collective.
        missing: the ranks that have not called the collective.
        call: the collective; None if no rank waits.
        waited: the seconds since the first rank has called the collective.
        limit: the seconds that a rank may wait for the collective before the job ends; 0 for no
            limit.
        deadlock: whether no rank can continue, because each waits for another one.
        expired: whether the collective has waited for longer than its limit.
        stopped: whether the process of a missing rank is stopped.
        last_ranks: whether some ranks have ended, and no other rank waits for a collective.
    """

    text: str
    waiting: Sequence[int] = ()
    missing: Sequence[int] = ()
    call: Call | None = None
    waited: float = 0.0
    limit: float = 0.0
    deadlock: bool = False
    expired: bool = False
    stopped: bool = False
    last_ranks: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the job must end."""
        return self.deadlock or self.expired

    @property
    def whole_text(self) -> str:
        """The paragraph, with a line about why the job must end."""
        if self.deadlock:
            return f"{self.text}\n{_DEADLOCK}"
        if self.expired:
            return f"{self.text}\nThe limit of {self.limit:,.0f} s is over ({_LIMIT})."
        return self.text

    @property
    def outlook(self) -> str:
        """A sentence on how a job continues whose verdict is not final."""
        if self.limit:
            # A rank that has begun to receive data from the stopped process has a limit of its own.
            earlier = f", or earlier ({_RECEIVE_LIMIT})" if self.stopped else ""
            return f"The job waits. It ends after {self.limit:,.0f} s ({_LIMIT}){earlier}."
        if self.last_ranks:
            return "The job ends when all ranks have ended."
        return "The job waits." if self.waiting else "The job has continued."


@dataclass(frozen=True)
class _Wait:
    """A collective that some ranks have called and that has not ended."""

    call: Call
    waiting: Sequence[int]
    missing: Sequence[int]


def judge(
    records: Mapping[int, Record],
    states: Mapping[int, str],
    size: int,
    silent: Sequence[str] = (),
    late: Collection[tuple[int, str, int]] = (),
) -> Verdict:
    """Return the verdict on a job without progress.

    Args:
        records: the records, by rank. A rank may have none.
        states: rank -> `STOPPED` or `ENDED`. Other ranks have no entry.
        size: the number of ranks of the job.
        silent: for each host that did not answer the launcher for some time, a sentence. The
            verdict contains them, unless a rank with a record is missing.
        late: the keys of the calls that have waited for too long. If all ranks have called
            them, the verdict is on these calls: other waits are younger, and may end in a moment.
            Empty: the verdict is on any call.
    """
    # A rank that has ended does not wait any more. Its record is an older one, unless it failed.
    records = {
        rank: replace(r, open=[]) if states.get(rank) == ENDED and not r.error else r
        for rank, r in with_all_groups(aligned(records)).items()
    }
    waits = _waits(records, states, size)
    of_late = [wait for wait in waits if wait.call.key in late]
    if of_late and not any(wait.missing for wait in of_late):
        waits = of_late
    if not waits:
        text = _without_wait(records, states, size, silent)
        return Verdict(text, last_ranks=ENDED in states.values())
    # The cause is the oldest call that a rank has not made. Later calls wait because of it.
    incomplete = [wait for wait in waits if wait.missing]
    deadlock = bool(incomplete) and _all_wait(records, states, size)
    causes = (_in_cycles(incomplete) if deadlock else incomplete) or waits
    oldest = min(causes, key=lambda wait: wait.call.enqueued)
    if deadlock and len(oldest.missing) > len(oldest.waiting):
        # Most ranks wait elsewhere: probably a few ranks have made an additional call.
        by_most = [wait for wait in causes if len(wait.waiting) > len(wait.missing)]
        oldest = min(by_most, key=lambda wait: wait.call.enqueued, default=oldest)
    # Of the collectives that lack the same ranks, name one of the user or a bucket. A collective of
    # hvdkit itself, such as a comparison of states, says less.
    alike = [w for w in causes if w.missing == oldest.missing]
    wait = min(alike, key=lambda w: (_is_internal(w.call), w.call.enqueued))
    lines = [_first_line(wait, records)]
    first = stacks.own_frame(stacks.main_thread(records[wait.waiting[0]].stacks))
    if first is not None:
        lines[0] += f" Rank {wait.waiting[0]} is at {first}."
    if not wait.missing:
        lines.append(_all_entered(states))
    chain = _Chain(wait, incomplete, records, states)
    chain.describe(wait, "it")
    chain.describe_further_waits(late)
    lines += chain.lines
    if _differ_in_line(wait, records):
        lines.append(_SAME_NAME)
    if any(is_unnamed(call.name) for record in records.values() for call in record.open):
        lines += filter(None, [different_lines(records)])
    if not any(rank in records for rank in wait.missing):
        lines += silent
    # The ranks may have different limits. `join` has none, because other ranks train meanwhile.
    limits = [records[rank].limit for rank in wait.waiting if wait.call.operation != "join"]
    return Verdict(
        "\n".join(lines),
        wait.waiting,
        wait.missing,
        wait.call,
        _seconds_waited(wait, records),
        0.0 if 0.0 in limits else max(limits, default=0.0),
        deadlock,
        stopped=any(states.get(rank) == STOPPED for rank in wait.missing),
    )


def overdue(records: Mapping[int, Record], states: Mapping[int, str], size: int) -> str:
    """Return the verdict on a collective that waited until its limit while others ended.

    Such a collective, for example one of a thread, leads to no verdict before its limit is over,
    because the ranks make progress.

    Args:
        records: the records of the ranks after the engine has ended the job.
        states: as for `judge`.
        size: the number of ranks of the job.

    Returns:
        The verdict; "" if there is no such collective.
    """
    late = {}
    for rank, record in records.items():
        waited = [
            call
            for call in record.open
            if call.operation != "join" and record.time - call.enqueued >= record.limit > 0
        ]
        late[rank] = replace(record, open=waited if record.error else [])
    verdict = judge(late, states, size)
    return replace(verdict, expired=True).whole_text if verdict.missing else ""


def _waits(records: Mapping[int, Record], states: Mapping[int, str], size: int) -> list[_Wait]:
    found: dict[tuple[int, str, int], Call] = {}
    for record in records.values():
        for call in record.open:
            if call.key not in found or call.enqueued < found[call.key].enqueued:
                found[call.key] = call
    waits = []
    for call in found.values():
        owner = next(r for r in records.values() if _waits_for(r, call))
        # The record of an earlier engine may lack the process sets.
        owner = next((r for r in records.values() if call.group in r.groups), owner)
        members = [rank for rank in owner.members(call.group) if rank < size]
        entered = [
            r
            for r in members
            if r in records and (_has_called(records[r], call) or _has_joined(records[r], call))
        ]
        waiting = [r for r in entered if _waits_for(records[r], call)]
        missing = [
            r
            for r in members
            if r not in entered and (r in records or r in states or len(records) < len(members))
        ]
        # There may be no waiting member if the records are from several starts of a job, with
        # different process sets.
        if waiting:
            waits.append(_Wait(call, waiting, missing))
    return waits


def _in_cycles(incomplete: Sequence[_Wait]) -> Sequence[_Wait]:
    """Return the collectives without those that wait only because others do.

    If no rank waits for the ranks that have called a collective, this collective is not part of the
    deadlock.
    """
    while True:
        blocking = {rank for wait in incomplete for rank in wait.missing}
        left = [wait for wait in incomplete if blocking.intersection(wait.waiting)]
        if len(left) == len(incomplete):
            return left
        incomplete = left


def _has_joined(record: Record, call: Call) -> bool:
    """Return whether the rank waits in `join`, where it counts as having called everything."""
    return any(own.operation == "join" and own.group == call.group for own in record.open)


def _waits_for(record: Record, call: Call) -> bool:
    return any(own.collective == call.collective for own in record.open)


def _is_internal(call: Call) -> bool:
    return any(pattern.search(call.name) for pattern in _OWN)


def _has_called(record: Record, call: Call) -> bool:
    for own in record.open:
        same_call = own.number == call.number or 0 in (own.number, call.number)
        if own.collective == call.collective and same_call:
            return True
    return call.number > 0 and record.calls.get(call.collective, 0) >= call.number


def _first_line(wait: _Wait, records: Mapping[int, Record]) -> str:
    record = records[wait.waiting[0]]
    seconds = _seconds_waited(wait, records)
    have = "have" if len(wait.waiting) > 1 else "has"
    ranks = name_ranks(wait.waiting)
    return f"{ranks} {have} waited {seconds:.0f} s for {describe_call(wait.call, record)}."


def _seconds_waited(wait: _Wait, records: Mapping[int, Record]) -> float:
    # The clocks of hosts differ, so each time is that of one record.
    return max(
        (
            records[rank].time - call.enqueued
            for rank in wait.waiting
            for call in records[rank].open
            if call.collective == wait.call.collective
        ),
        default=0.0,
    )


def describe_call(call: Call, record: Record) -> str:
    """Return a text for a call of a collective: its name, and the number of the call."""
    return name_call(call, record) + (f", call {call.number:,}" if call.number > 1 else "")


def name_call(call: Call, record: Record) -> str:
    """Return a text for a collective, such as a bucket with its parameters."""
    is_known = record.label(call.name) is not None or _is_internal(call)
    size = f", {call.bytes:,} bytes of {call.dtype}" if call.bytes and not is_known else ""
    return title(call, record) + size


def title(call: Call, record: Record) -> str:
    """Return a text for a collective, without the size of the rank's tensor."""
    text = record.label(call.name)
    if text is None:
        own = next((t for pattern, t in _OWN.items() if pattern.search(call.name)), None)
        name = call.name.removeprefix(f"{call.operation}.")
        text = f"{own} ({call.name})" if own else f"the {call.operation} {name!r}"
    return text + _of_process_set(call, record)


def _of_process_set(call: Call, record: Record) -> str:
    """Return a text for the process set of a call; "" for that of all ranks."""
    if call.group == 0:
        return ""
    ranks = record.groups.get(call.group)
    return f" of process set {call.group}" + (f" ({name_ranks(ranks).lower()})" if ranks else "")


def _describe(
    rank: int, record: Record | None, state: str | None, what: str, waits_for: Call | None
) -> str:
    """Return what a rank does that has not called `what`.

    Args:
        rank: the rank.
        record: its record, if there is one.
        state: the state of its process, if it does not run.
        what: a text for the collective.
        waits_for: the collective for which the rank waits, if it waits.
    """
    where = f"Rank {rank}" + (f" on {record.host}" if record else "") + f" has not called {what}"
    if state == STOPPED:
        return f"{where}: the process is stopped (SIGSTOP or a debugger)."
    if state == ENDED:
        return f"{where}: the process has ended."
    if record is None:
        return f"{where}, and did not report its state."
    frames = stacks.main_thread(record.stacks)
    if waits_for is not None:
        doing = f"the rank waits for {describe_call(waits_for, record)}"
    else:
        doing = "" if frames else "the stack of the rank is not known"
    if frame := stacks.own_frame(frames):
        doing += f"{', ' if doing else 'the rank is '}at {frame}"
    in_graph = bool(record.open) and stacks.runs_graph(frames)
    if in_graph:
        # The threads of a graph call collectives, so the stack does not show the wait.
        call = describe_call(record.open[0], record)
        doing += f", in a graph of TensorFlow that waits for {call}"
    text = f"{where}: {doing}."
    if in_graph:
        text += _other_thread(record)
    elif frames and not stacks.waits(frames):
        text += _below(frames, record)
    if record.done:
        last = record.done[-1]
        since = record.time - (last.ended or record.time)
        ended = "failed" if record.failed_call == last else "ended"
        text += f" Its last collective, {describe_call(last, record)}, {ended} {since:.0f} s ago."
    return text


class _Chain:
    """Lines about the ranks that have not called a collective, and about those that they wait for.

    Args:
        wait: the collective. The verdict has already named the ranks that wait for it.
        incomplete: all collectives that lack ranks.
        records: the records, by rank.
        states: as for `judge`.
    """

    def __init__(
        self,
        wait: _Wait,
        incomplete: Sequence[_Wait],
        records: Mapping[int, Record],
        states: Mapping[int, str],
    ) -> None:
        self.lines: list[str] = []
        self._wait = wait
        self._incomplete = sorted(incomplete, key=lambda each: each.call.enqueued)
        self._records = records
        self._states = states
        self._named = set(wait.waiting)
        self._left = _SHOWN

    def describe(self, wait: _Wait, what: str) -> None:
        """Add lines about the ranks that have not called `wait`, and about those they wait for.

        Args:
            wait: the collective.
            what: a text for it.
        """
        absent = [rank for rank in wait.missing if rank not in self._named]
        self._named.update(absent)
        shown = absent[: max(self._left, 0)]
        self._left -= len(absent)
        blockers: list[_Wait] = []
        for rank in shown:
            record = self._records.get(rank)
            blocker = self._blocker(rank)
            waits_for = self._awaited(rank)
            text = _describe(rank, record, self._states.get(rank), what, waits_for)
            self.lines.append(text + self._blocked_by(rank, wait, blocker))
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
            half = _seconds_waited(self._wait, self._records) / 2
            if other.call.key not in late and _seconds_waited(other, self._records) < half:
                continue
            missing = [rank for rank in other.missing if not self._depends_on_named(rank)]
            if missing and self._left > 0:
                self.lines.append(_first_line(other, self._records))
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
        return min(alike, key=_is_internal)

    def _blocker(self, rank: int) -> _Wait | None:
        """Return the collective with missing ranks for which a rank waits, if there is one."""
        call = self._awaited(rank)
        if call is None and rank in self._records and rank not in self._states:
            # The threads of a graph of TensorFlow wait.
            record = self._records[rank]
            if record.open and stacks.runs_graph(stacks.main_thread(record.stacks)):
                call = record.open[0]
        if call is None:
            return None
        return next((each for each in self._incomplete if each.call.key == call.key), None)

    def _blocked_by(self, rank: int, wait: _Wait, blocker: _Wait | None) -> str:
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


def _not_shown(count: int) -> list[str]:
    if count <= 0:
        return []
    return [f"{count} more {'rank has' if count == 1 else 'ranks have'} not called it."]


def _below(frames: Sequence[stacks.Frame], record: Record) -> str:
    """Return a sentence about what runs below the user's line, if a library runs there."""
    if not frames[0].is_library:
        return ""
    # TensorFlow reads data in other threads.
    if text := _other_thread(record):
        return text
    frame = stacks.package_frame(frames)
    return "" if frame is None else f" This line has called {frame}."


def _other_thread(record: Record) -> str:
    """Return a sentence about a thread, not the main thread, that runs code of the user."""
    frame = stacks.other_thread(record.stacks)
    return "" if frame is None else f" Another thread is at {frame}."


def _differ_in_line(wait: _Wait, records: Mapping[int, Record]) -> bool:
    """Return whether a missing rank waits for the same operation, called in another line."""
    called = _BY_LINE.match(wait.call.name)
    others = (call.name for r in wait.missing if r in records for call in records[r].open)
    found = (_BY_LINE.match(name) for name in others)
    return called is not None and any(other and other[1] == called[1] for other in found)


def _all_entered(states: Mapping[int, str]) -> str:
    stopped = [rank for rank, state in states.items() if state == STOPPED]
    if stopped:
        verb = "is" if len(stopped) == 1 else "are"
        return f"All ranks have called it. {name_ranks(stopped)} {verb} stopped (SIGSTOP)."
    return "All ranks have called it: the network or a rank does not transfer its data."


def _without_wait(
    records: Mapping[int, Record], states: Mapping[int, str], size: int, silent: Sequence[str]
) -> str:
    ended = sorted(rank for rank, state in states.items() if state == ENDED)
    text = "No rank waits for a collective."
    if ended:
        have = "have" if len(ended) > 1 else "has"
        text = f"{name_ranks(ended)} {have} ended. No other rank waits for a collective."
    lines = [text, *silent]
    lines += [
        f"Rank {rank} is {state}." for rank, state in sorted(states.items()) if state == STOPPED
    ]
    # The record of a rank that has ended is an older one.
    for rank, record in sorted((r, each) for r, each in records.items() if r not in ended)[:_SHOWN]:
        frames = stacks.main_thread(record.stacks)
        frame = stacks.own_frame(frames)
        if frame is None:
            continue
        lines.append(f"Rank {rank} on {record.host} is at {frame}.")
        # At the end of the script, Python waits for the other threads.
        lines[-1] += _below(frames, record)
    absent = [rank for rank in range(size) if rank not in records and rank not in states]
    if absent:
        lines.append(f"{name_ranks(absent)} did not report.")
    return "\n".join(lines)


def _all_wait(records: Mapping[int, Record], states: Mapping[int, str], size: int) -> bool:
    """Return whether each rank's main thread waits for a collective, and no other thread runs
    code of the user, which might call one.
    """
    for rank in range(size):
        record = records.get(rank)
        if rank in states or record is None or not record.open:
            return False
        if not stacks.waits(stacks.main_thread(record.stacks)):
            return False
        if stacks.has_other_thread(record.stacks):
            return False
    return True


def timeline(records: Mapping[int, Record], count: int = 20) -> list[str]:
    """Return a table of the last collectives: when each rank called them.

    Args:
        records: the records, by rank.
        count: the number of collectives.
    """
    calls: dict[tuple[int, str, int], dict[int, Call]] = {}
    records = with_all_groups(aligned(records))
    for rank, record in records.items():
        for call in [*record.done, *record.open]:
            calls.setdefault(call.key, {})[rank] = call
    last = sorted(calls.values(), key=lambda ranks: min(c.enqueued for c in ranks.values()))
    ranks = sorted(records)
    lines = [
        "time             " + "".join(f"{f'rank {rank}':>10}" for rank in ranks) + "  collective"
    ]
    for row in last[-count:]:
        first = min(call.enqueued for call in row.values())
        cells = "".join(f"{_cell(row.get(rank), first):>10}" for rank in ranks)
        owner = next(iter(row))
        clock = time.strftime("%H:%M:%S", time.localtime(first)) + f".{int(first % 1 * 1000):03}"
        members = set(records[owner].members(row[owner].group))
        ended = all(call.ended is not None for call in row.values())
        mark = "" if ended and members.intersection(ranks) == row.keys() else "  (not complete)"
        text = describe_call(row[owner], records[owner])
        lines.append(f"{clock}     {cells}  {text}{mark}")
    return lines


def _cell(call: Call | None, first: float) -> str:
    if call is None:
        return "-"
    waits = "" if call.ended is not None else " …"
    return f"+{(call.enqueued - first) * 1000:.0f} ms{waits}"
