"""Say which ranks wait for which collective, and where the missing ranks are.

A collective ends only after every rank of its process set has called it. So if a rank waits for
call n of a collective, and another rank has made fewer calls of it, the other rank is missing. The
counts alone decide: clocks of ranks are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hvdkit.faults import stacks
from hvdkit.faults.mismatch import different_lines, is_unnamed
from hvdkit.faults.missing_ranks import SHOWN, Hang, below_line, first_line, traceback_of
from hvdkit.faults.names import (
    CONTINUED,
    ELSEWHERE,
    ENDED,
    LEAVING,
    STOPPED,
    is_internal,
    name_ranks,
)
from hvdkit.faults.records import Call, Record, with_all_groups
from hvdkit.faults.waits import Wait, find_waits, seconds_waited, stalled

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
        call: the collective; None if no collective has stalled.
        waited: the seconds since the first rank has called the collective.
        limit: the seconds that a rank may wait for the collective before the job ends; 0 for no
            limit.
        certain: a sentence if no rank can continue, because each waits for another one or for a
            rank that has ended; "" otherwise.
        stopped: whether the process of a missing rank is stopped.
        stalled: the keys of all collectives that have stalled.
        left: the seconds until one of these has waited for its limit; infinite without a limit.
    """

    text: str
    waiting: Sequence[int] = ()
    missing: Sequence[int] = ()
    call: Call | None = None
    waited: float = 0.0
    limit: float = 0.0
    certain: str = ""
    stopped: bool = False
    stalled: Sequence[tuple[int, str, int]] = ()
    left: float = float("inf")

    @property
    def expired(self) -> bool:
        """Whether the collective has waited for longer than its limit."""
        return 0 < self.limit <= self.waited

    @property
    def is_final(self) -> bool:
        """Whether the job must end."""
        return bool(self.certain) or self.expired

    @property
    def whole_text(self) -> str:
        """The paragraph, with a line about why the job must end."""
        expired = f"The limit of {self.limit:,.0f} s has passed ({_LIMIT})." if self.expired else ""
        return "\n".join(filter(None, [self.text, self.certain or expired]))

    @property
    def outlook(self) -> str:
        """A sentence on how a job continues whose verdict is not final."""
        if self.limit:
            # A rank that has begun to receive data from the stopped process has a limit of its own.
            earlier = f", or earlier ({_RECEIVE_LIMIT})" if self.stopped else ""
            limit = f"{self.limit:,.0f} s without progress ({_LIMIT})"
            return f"The job waits. It ends after {limit}{earlier}."
        return "The job waits." if self.call else "The job ends when all ranks have ended."


def judge(
    records: Mapping[int, Record],
    states: Mapping[int, str],
    size: int,
    seconds: float = 0.0,
    silent: Sequence[str] = (),
    hosts: Sequence[str] = (),
    raised: Mapping[int, str] = MappingProxyType({}),
) -> Verdict:
    """Return the verdict on a job without progress.

    Args:
        records: the records, by rank. A rank may have none.
        states: rank -> `STOPPED`, `ENDED`, `LEAVING`, `CONTINUED` or `ELSEWHERE`. Other ranks have
            no entry.
        seconds: the time after which a collective has stalled, see `waits.stalled`.
        silent: for each host that did not answer the launcher for some time, a sentence. The
            verdict contains them, unless a rank with a record is missing.
        hosts: the host of each rank, for ranks without a record; empty if the hosts are not known.
        raised: rank -> the exception, for each running rank whose script an exception has ended.
    """
    # A rank that has ended does not wait any more. Its record is an older one, unless it failed.
    records = {
        rank: replace(r, open=[]) if states.get(rank) == ENDED and not r.error else r
        for rank, r in with_all_groups(records).items()
    }
    elsewhere = {rank for rank, state in states.items() if state == ELSEWHERE}
    waits = find_waits(records, size, elsewhere)
    late: Sequence[Wait] = stalled(waits, records, seconds)
    if not late:
        return Verdict(_without_wait(records, states, size, silent, raised))
    hang = Hang(records, states, [wait for wait in waits if wait.missing], hosts, raised)
    # A call that all ranks have made ends, and its ranks continue. In a deadlock, there is none.
    are_counted = all(wait.missing and wait.call.number for wait in waits)
    certain = ""
    if are_counted and _all_wait(records, states, size):
        late, certain = waits, _DEADLOCK
    left = {w.call.key: _limit(w, records) - seconds_waited(w, records) for w in late}
    wait = _cause([w for w in late if left[w.call.key] <= 0] or late, hang)
    if certain and any(states.get(rank) == ENDED for rank in wait.missing):
        certain = _ENDED
    lines = [first_line(wait, records)]
    first = stacks.own_frame(stacks.waiting_thread(records[wait.waiting[0]].stacks))
    if first is not None:
        lines[0] += f" Rank {wait.waiting[0]} is at {first}."
    if not wait.missing:
        lines.append(_all_entered(wait, records, states))
    lines += hang.lines(wait, late)
    if _differ_in_line(wait, records):
        lines.append(_SAME_NAME)
    if any(is_unnamed(call.name) for record in records.values() for call in record.open):
        lines += filter(None, [different_lines(records)])
    if not any(rank in records for rank in wait.missing):
        lines += silent
    limit = _limit(wait, records)
    return Verdict(
        "\n".join(lines),
        wait.waiting,
        wait.missing,
        wait.call,
        seconds_waited(wait, records),
        limit if limit < float("inf") else 0.0,
        certain,
        any(states.get(rank) == STOPPED for rank in wait.missing),
        [each.call.key for each in late],
        min(left.values()),
    )


def _limit(wait: Wait, records: Mapping[int, Record]) -> float:
    """Return the seconds that a collective may wait before the job ends; infinite for no limit."""
    # The ranks may have different limits. `join` has none, because other ranks train meanwhile.
    limits = [records[rank].limit for rank in wait.waiting if wait.call.operation != "join"]
    return max(limits) if limits and 0.0 not in limits else float("inf")


def _cause(late: Sequence[Wait], hang: Hang) -> Wait:
    """Return the collective for which the others wait, directly or through further ranks."""
    # The ranks that wait in complete calls could not make later ones, although these calls may have
    # ended on other ranks.
    complete = [wait for wait in late if not wait.missing]
    held = {rank for w in complete for rank in w.waiting if hang.awaits(rank, w.call)}
    lacking = [wait for wait in late if not held.issuperset(wait.missing)]
    # A rank in `join` waits for all others, as long as any of them trains or hangs.
    causes = [w for w in lacking if w.call.operation != "join"] or lacking or complete
    # A rank that waits for no other one is the cause, if there is such a rank.
    causes = [w for w in causes if any(not hang.blocker(r) for r in w.missing)] or causes

    places = {
        rank: {call.key: n for n, call in enumerate(record.open)}
        for rank, record in hang.records.items()
    }

    def place(wait: Wait) -> int:
        """Return the place of the call among those of the first waiting rank."""
        return places[wait.waiting[0]].get(wait.call.key, len(places))

    # If most ranks wait, the few others are at fault.
    first = min(causes, key=lambda w: (len(w.missing) - len(w.waiting), place(w), w.waiting[0]))
    # Of the collectives that lack the same ranks, name one of the user or a bucket. A collective of
    # hvdkit itself, such as a comparison of states, says less.
    alike = [wait for wait in causes if wait.missing == first.missing]
    return min(alike, key=lambda w: (is_internal(w.call), place(w), w.waiting[0]))


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
        hosts: as for `judge`.
        raised: as for `judge`.

    Returns:
        The verdict; None if there is no such collective.
    """
    late = {rank: replace(record, open=overdue_calls(record)) for rank, record in records.items()}
    verdict = judge(late, states, size, hosts=hosts, raised=raised)
    return verdict if verdict.missing else None


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
    """Return what the ranks do if no collective has stalled."""

    def of(state: str) -> list[int]:
        return sorted(rank for rank, each in states.items() if each == state)

    def text(ranks: Sequence[int], one: str, several: str) -> str:
        return f"{name_ranks(ranks)} {several if len(ranks) > 1 else one}."

    ended, here = of(ENDED), " on this host" if of(ELSEWHERE) else ""
    waits = "has waited long" if any(record.open for record in records.values()) else "waits"
    lines = [f"No {'other ' if ended else ''}rank{here} {waits} for a collective."]
    if ended:
        lines[0] = f"{text(ended, 'has ended', 'have ended')} {lines[0]}"
    lines += silent
    if leaving := of(LEAVING):
        one = "is in hvd.shutdown(), or has reached the end of the script but not ended"
        several = one.replace("is in", "are in").replace("has", "have")
        lines.append(f"{text(leaving, one, several)} {_SHUTDOWN_WAITS}")
    lines += [f"Rank {rank} is stopped." for rank in of(STOPPED)]
    # The record of a rank that has ended is an older one.
    running = sorted(records.keys() - ended, key=lambda rank: (rank not in raised, rank))
    lines += filter(None, [_place(records[rank], raised) for rank in running[:SHOWN]])
    if continued := of(CONTINUED):
        one = "has continued since its last record"
        lines.append(text(continued, one, "have continued since their last records"))
    if absent := [rank for rank in range(size) if rank not in records and rank not in states]:
        lines.append(text(absent, "did not report", "did not report"))
    return "\n".join(lines)


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
    return all(
        rank in records
        and rank not in states
        and records[rank].open
        and stacks.waits(stacks.main_thread(records[rank].stacks))
        and stacks.other_thread(records[rank].stacks) is None
        for rank in range(size)
        if states.get(rank) != ENDED
    )
