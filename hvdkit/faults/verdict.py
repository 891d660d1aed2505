"""Say which ranks wait for which collective, and where the missing ranks are.

A collective ends only after every rank of its process set has called it. So if a rank waits for
call n of a collective, and another rank has made fewer calls of it, the other rank is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hvdkit.faults import stacks
from hvdkit.faults.alignment import aligned
from hvdkit.faults.call_names import is_internal
from hvdkit.faults.missing_ranks import SHOWN, Chain, below_line, first_line, traceback_of
from hvdkit.faults.process_states import CONTINUED, ELSEWHERE, ENDED, LEAVING, STOPPED
from hvdkit.faults.rank_names import name_ranks
from hvdkit.faults.records import Call, Record, with_all_groups
from hvdkit.faults.unnamed_calls import different_lines, is_unnamed
from hvdkit.faults.waits import Wait, find_waits, in_cycles, seconds_waited

_DEADLOCK = "Every rank waits in a collective that another rank has not called: a deadlock."
_ENDED = "Every rank that still runs waits for a rank that has ended: the job cannot continue."
_LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_RECEIVE_LIMIT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_STALL_TIMEOUT = "HVDKIT_STALL_TIMEOUT"
# The name of a call without a name, outside of a graph of TensorFlow: the patch
# `tensorflow-eager-names`.
_BY_LINE = re.compile(r"(\w+)\.line \d+ of ")
_SAME_NAME = (
    "Outside of a tf.function, ranks match calls without a name by their line of code. If these "
    "calls belong together, give all of them the same name."
)

_SHUTDOWN_WAITS = (
    "hvd.shutdown() waits for all ranks, and over MPI also for mpirun and its daemons: check "
    "whether one of these processes is stopped."
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
        for_ended: whether a missing rank has ended.
        expired: whether the collective has waited for longer than its limit.
        stopped: whether the process of a missing rank is stopped.
        last_ranks: whether some ranks have ended or shut Horovod down, and no rank waits for a
            collective.
    """

    text: str
    waiting: Sequence[int] = ()
    missing: Sequence[int] = ()
    call: Call | None = None
    waited: float = 0.0
    limit: float = 0.0
    deadlock: bool = False
    for_ended: bool = False
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
            return f"{self.text}\n{_ENDED if self.for_ended else _DEADLOCK}"
        if self.expired:
            return f"{self.text}\nThe limit of {self.limit:,.0f} s has passed ({_LIMIT})."
        return self.text

    @property
    def outlook(self) -> str:
        """A sentence on how a job continues whose verdict is not final."""
        if self.limit:
            # A rank that has begun to receive data from the stopped process has a limit of its own.
            earlier = f", or earlier ({_RECEIVE_LIMIT})" if self.stopped else ""
            limit = f"{self.limit:,.0f} s without progress ({_LIMIT})"
            return f"The job waits. It ends after {limit}{earlier}."
        if self.last_ranks:
            return "The job ends when all ranks have ended."
        return "The job waits." if self.waiting else "The job has continued."


def judge(
    records: Mapping[int, Record],
    states: Mapping[int, str],
    size: int,
    silent: Sequence[str] = (),
    late: Collection[tuple[int, str, int]] = (),
    hosts: Sequence[str] = (),
    raised: Mapping[int, str] = MappingProxyType({}),
) -> Verdict:
    """Return the verdict on a job without progress.

    Args:
        records: the records, by rank. A rank may have none.
        states: rank -> `STOPPED`, `ENDED`, `LEAVING`, `CONTINUED` or `ELSEWHERE`. Other ranks have
            no entry.
        size: the number of ranks of the job.
        silent: for each host that did not answer the launcher for some time, a sentence. The
            verdict contains them, unless a rank with a record is missing.
        late: the keys of the calls that have waited for too long. If all ranks have called
            them, the verdict is on these calls: other waits are younger, and may end in a moment.
            The same holds if ranks have called only the first of them, and wait in it. Empty: the
            verdict is on any call.
        hosts: the host of each rank, for ranks without a record; empty if the hosts are not known.
        raised: rank -> the exception, for each running rank that has written a traceback after its
            last collective.
    """
    # A rank that has ended does not wait any more. Its record is an older one, unless it failed.
    records = {
        rank: replace(r, open=[]) if states.get(rank) == ENDED and not r.error else r
        for rank, r in with_all_groups(aligned(records)).items()
    }
    elsewhere = {rank for rank, state in states.items() if state == ELSEWHERE}
    waits = find_waits(records, size, elsewhere)
    of_late = [wait for wait in waits if wait.call.key in late]
    stuck = [wait for wait in of_late if not wait.missing]
    # The ranks that wait in these calls could not make later ones, although the calls may have
    # ended on other ranks.
    held = {rank for wait in stuck for rank in wait.waiting}
    if stuck and all(held.issuperset(wait.missing) for wait in of_late):
        waits = stuck
    if not waits:
        text = _without_wait(records, states, size, silent, raised)
        return Verdict(text, last_ranks=not {ENDED, LEAVING}.isdisjoint(states.values()))
    # The cause is the oldest call that a rank has not made. Later calls wait because of it.
    incomplete = [wait for wait in waits if wait.missing]
    # A call that all ranks have made ends, and its ranks continue. In a deadlock, there is none.
    are_counted = all(wait.missing and wait.call.number for wait in waits)
    may_be_deadlock = are_counted and _all_wait(records, states, size)
    ended = {rank for rank, state in states.items() if state == ENDED}
    cycles = in_cycles(incomplete, ended) if may_be_deadlock else ()
    deadlock = bool(cycles)
    # A rank in `join` waits for all others, as long as any of them trains or hangs.
    of_training = [wait for wait in incomplete if wait.call.operation != "join"]
    causes = cycles or of_training or incomplete or waits
    oldest = min(causes, key=lambda wait: wait.call.enqueued)
    if deadlock and len(oldest.missing) > len(oldest.waiting):
        # Most ranks wait elsewhere: probably a few ranks have made an additional call.
        by_most = [wait for wait in causes if len(wait.waiting) > len(wait.missing)]
        oldest = min(by_most, key=lambda wait: wait.call.enqueued, default=oldest)
    # Of the collectives that lack the same ranks, name one of the user or a bucket. A collective of
    # hvdkit itself, such as a comparison of states, says less.
    alike = [w for w in causes if w.missing == oldest.missing]
    wait = min(alike, key=lambda w: (is_internal(w.call), w.call.enqueued))
    lines = [first_line(wait, records)]
    first = stacks.own_frame(stacks.waiting_thread(records[wait.waiting[0]].stacks))
    if first is not None:
        lines[0] += f" Rank {wait.waiting[0]} is at {first}."
    if not wait.missing:
        lines.append(_all_entered(wait, records, states))
    chain = Chain(wait, incomplete, records, states, hosts, raised)
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
        seconds_waited(wait, records),
        0.0 if 0.0 in limits else max(limits, default=0.0),
        deadlock,
        not ended.isdisjoint(wait.missing),
        stopped=any(states.get(rank) == STOPPED for rank in wait.missing),
    )


def overdue(
    records: Mapping[int, Record],
    states: Mapping[int, str],
    size: int,
    hosts: Sequence[str] = (),
    raised: Mapping[int, str] = MappingProxyType({}),
) -> Verdict | None:
    """Return the verdict on a collective that waited until its limit.

    A collective that waits while others end, for example one of a thread, leads to no verdict
    before its limit is over, because the ranks make progress.

    Args:
        records: the records of the ranks after the engine has ended the job.
        states: as for `judge`.
        size: the number of ranks of the job.
        hosts: as for `judge`.
        raised: as for `judge`.

    Returns:
        The verdict; None if there is no such collective.
    """
    late = {rank: replace(r, open=overdue_calls(r)) for rank, r in aligned(records).items()}
    # The record of a missing rank is an older one.
    now = max((record.time for record in late.values()), default=0.0)
    late = {rank: replace(r, time=r.time if r.error else now) for rank, r in late.items()}
    verdict = judge(late, states, size, hosts=hosts, raised=raised)
    return replace(verdict, expired=True) if verdict.missing else None


def overdue_calls(record: Record) -> list[Call]:
    """Return the calls of a rank that have failed after they had waited until their limit."""
    return [
        call
        for call in record.open
        if record.error
        and call.operation != "join"
        and record.time - call.enqueued >= record.limit > 0
    ]


def _differ_in_line(wait: Wait, records: Mapping[int, Record]) -> bool:
    """Return whether a missing rank waits for the same operation, called in another line."""
    called = _BY_LINE.match(wait.call.name)
    others = (call.name for r in wait.missing if r in records for call in records[r].open)
    found = (_BY_LINE.match(name) for name in others)
    return called is not None and any(other and other[1] == called[1] for other in found)


def _all_entered(wait: Wait, records: Mapping[int, Record], states: Mapping[int, str]) -> str:
    """Return what may delay a collective that all known ranks have called."""
    if wait.unknown:
        return "All ranks on this host have called it."
    stopped = [rank for rank, state in states.items() if state == STOPPED]
    if stopped:
        verb = "is" if len(stopped) == 1 else "are"
        return f"All ranks have called it. {name_ranks(stopped)} {verb} stopped (SIGSTOP)."
    size = f" ({wait.call.bytes:,} bytes)" if wait.call.bytes else ""
    text = (
        f"All ranks have called it: the network or a rank does not transfer its data{size}, or the "
        "transfer takes longer than this."
    )
    if len({record.host for record in records.values()}) > 1:
        text += " Check the network between the hosts (`hvdkit doctor --hosts`)."
    return (
        f"{text} A large tensor or a slow network may need longer limits: {_STALL_TIMEOUT} for "
        f"the verdict, {_LIMIT} for the end of the job."
    )


def _without_wait(
    records: Mapping[int, Record],
    states: Mapping[int, str],
    size: int,
    silent: Sequence[str],
    raised: Mapping[int, str],
) -> str:
    ended = sorted(rank for rank, state in states.items() if state == ENDED)
    here = " on this host" if ELSEWHERE in states.values() else ""
    text = f"No rank{here} waits for a collective."
    if ended:
        have = "have" if len(ended) > 1 else "has"
        text = f"{name_ranks(ended)} {have} ended. No other rank waits for a collective."
    lines = [text, *silent]
    if leaving := sorted(rank for rank, state in states.items() if state == LEAVING):
        are, have = ("are", "have") if len(leaving) > 1 else ("is", "has")
        lines.append(
            f"{name_ranks(leaving)} {are} in hvd.shutdown(), or {have} reached the end of the "
            f"script but not ended. {_SHUTDOWN_WAITS}"
        )
    lines += [
        f"Rank {rank} is {state}." for rank, state in sorted(states.items()) if state == STOPPED
    ]
    # The record of a rank that has ended is an older one.
    running = [record for rank, record in sorted(records.items()) if rank not in ended]
    lines += filter(None, [_place(record, raised) for record in running[:SHOWN]])
    absent = [rank for rank in range(size) if rank not in records and rank not in states]
    if continued := sorted(rank for rank, state in states.items() if state == CONTINUED):
        since = "have continued since their" if len(continued) > 1 else "has continued since its"
        records_of = "last records" if len(continued) > 1 else "last record"
        lines.append(f"{name_ranks(continued)} {since} {records_of}.")
    if absent:
        lines.append(f"{name_ranks(absent)} did not report.")
    return "\n".join(lines)


def unended(records: Mapping[int, Record], raised: Mapping[int, str]) -> Verdict | None:
    """Return the verdict on ranks whose scripts have ended with an exception, and that still run.

    Args:
        records: the records, by rank.
        raised: as for `judge`.

    Returns:
        The verdict; None if there is no such rank.
    """
    found = [
        record
        for rank, record in sorted(records.items())
        if rank in raised
        and (frames := stacks.main_thread(record.stacks))
        and not stacks.runs_script(frames)
    ]
    if not found:
        return None
    lines = [_place(record, raised) for record in found[:SHOWN]]
    if (more := len(found) - SHOWN) > 0:
        lines.append(f"The scripts of {more} more rank{'s' if more > 1 else ''} have ended, too.")
    return Verdict("\n".join(lines), last_ranks=True)


def _place(record: Record, raised: Mapping[int, str]) -> str:
    """Return where a rank is that waits for no collective; "" if it is not known."""
    frames = stacks.main_thread(record.stacks)
    frame = stacks.own_frame(frames)
    if frame is None:
        return ""
    text = f"Rank {record.rank} on {record.host} is at {frame}.{below_line(frames, record)}"
    return text + traceback_of(record.rank, raised)


def _all_wait(records: Mapping[int, Record], states: Mapping[int, str], size: int) -> bool:
    """Return whether each rank's main thread waits for a collective, and no other thread runs
    code of the user, which might call one. Ranks that have ended call none.
    """
    for rank in range(size):
        if states.get(rank) == ENDED:
            continue
        record = records.get(rank)
        if rank in states or record is None or not record.open:
            return False
        if not stacks.waits(stacks.main_thread(record.stacks)):
            return False
        if stacks.has_other_thread(record.stacks):
            return False
    return True
