"""Find the collectives that some ranks have called and others have not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.faults.records import Call, Record


@dataclass(frozen=True)
class Wait:
    """A collective that some ranks have called and that has not ended.

    Attributes:
        call: the call of the rank that called it first.
        waiting: the ranks that wait for it.
        missing: the ranks that have not called it.
        unknown: the ranks on other hosts, which may have called it.
    """

    call: Call
    waiting: Sequence[int]
    missing: Sequence[int]
    unknown: Sequence[int] = ()


def find_waits(
    records: Mapping[int, Record], size: int, elsewhere: Collection[int] = ()
) -> list[Wait]:
    """Return the collectives for which ranks wait, also those that all ranks have called.

    Args:
        records: the records, by rank, each with all process sets (`with_all_groups`).
        size: the number of ranks of the job.
        elsewhere: the ranks on other hosts, whose records are not known here. They do not count as
            missing.
    """
    found: dict[tuple[int, str, int], Call] = {}
    for record in records.values():
        for call in record.open:
            if call.key not in found or call.enqueued < found[call.key].enqueued:
                found[call.key] = call
    waits = []
    for call in found.values():
        owner = next(r for r in records.values() if _waits_for(r, call))
        members = [rank for rank in owner.members(call.group) if rank < size]
        entered = [
            r
            for r in members
            if r in records and (has_called(records[r], call) or _has_joined(records[r], call))
        ]
        waiting = [r for r in entered if _waits_for(records[r], call)]
        missing = [r for r in members if r not in entered and r not in elsewhere]
        unknown = [r for r in members if r in elsewhere]
        # There may be no waiting member if the records are from several starts of a job, with
        # different process sets.
        if waiting:
            waits.append(Wait(call, waiting, missing, unknown))
    return waits


def in_cycles(incomplete: Sequence[Wait], ended: Collection[int] = ()) -> Sequence[Wait]:
    """Return the collectives without those that wait only because others do.

    If no rank waits for the ranks that have called a collective, this collective is not part of the
    deadlock, unless it waits for a rank that has ended.

    Args:
        incomplete: the collectives.
        ended: the ranks that have ended.
    """
    while True:
        blocking = {rank for wait in incomplete for rank in wait.missing}
        left = [
            wait
            for wait in incomplete
            if blocking.intersection(wait.waiting) or not set(ended).isdisjoint(wait.missing)
        ]
        if len(left) == len(incomplete):
            return left
        incomplete = left


def seconds_waited(wait: Wait, records: Mapping[int, Record]) -> float:
    """Return the seconds since the first of the waiting ranks has called the collective."""
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


def late_calls(records: Iterable[Record]) -> set[tuple[int, str, int]]:
    """Return the keys of the calls that wait, without those that a rank has made recently.

    The latter have waited less than half as long as the first call.
    """
    waits = [(call, record.time - call.enqueued) for record in records for call in record.open]
    longest = max((wait for _, wait in waits), default=0.0)
    return {call.key for call, wait in waits if wait > longest / 2}


def long_waits(
    records: Mapping[int, Record], size: int, seconds: float, elsewhere: Collection[int] = ()
) -> set[tuple[int, str, int]]:
    """Return the keys of the calls that have waited for at least `seconds`.

    A call that all known ranks have made waits since the last of them has made it. In records that
    were written one after the other, such a call may wait on one rank and have ended on another
    one.

    Args:
        records: as for `find_waits`.
        size: as for `find_waits`.
        seconds: more seconds than between the first and the last record.
        elsewhere: as for `find_waits`.
    """
    found = set()
    for wait in find_waits(records, size, elsewhere):
        # Ranks call at different times, and the clocks of hosts differ.
        waits = [
            record.time - call.enqueued
            for record in records.values()
            for call in (*record.open, *record.done)
            if call.key == wait.call.key
        ]
        if (max(waits) if wait.missing else min(waits)) >= seconds:
            found.add(wait.call.key)
    return found


def _has_joined(record: Record, call: Call) -> bool:
    """Return whether the rank waits in `join`, where it counts as having called everything."""
    return any(own.operation == "join" and own.group == call.group for own in record.open)


def _waits_for(record: Record, call: Call) -> bool:
    # Calls that are not counted have the number 0.
    return any(
        own.collective == call.collective
        and (own.number == call.number or 0 in (own.number, call.number))
        for own in record.open
    )


def has_called(record: Record, call: Call) -> bool:
    """Return whether the rank of a record has made a call, as far as calls are counted."""
    if _waits_for(record, call):
        return True
    return call.number > 0 and record.calls.get(call.collective, 0) >= call.number
