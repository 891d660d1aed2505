"""Find the collectives that some ranks have called and others have not.

Each rank counts its calls of each collective. A rank has not made call n of a collective if it has
made fewer than n calls. No clocks of different ranks are compared.

Ranks write records when a collective waits for too long. If this stall ends by itself, the records
stay. Later records of other ranks show that a rank has continued: a collective ends only after all
ranks of its process set have called it, except for ranks that wait in `join`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.faults.records import Call, Record, known_groups

# The most pairs of a call and a rank that are compared, about 2,400 calls of 4,096 ranks. Of more
# calls, the first ones count. Otherwise, a small record could take all memory.
_MOST_PAIRS = 10_000_000


@dataclass(frozen=True)
class Wait:
    """A collective that some ranks have called and that has not ended.

    Attributes:
        call: the call of the first waiting rank.
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
        elsewhere: the ranks on other hosts, whose records are not known here. They do not count as
            missing.
    """
    found: dict[tuple[int, str, int], tuple[Call, Record]] = {}
    for _, record in sorted(records.items()):
        for call in record.open:
            found.setdefault(call.key, (call, record))
    waits = []
    for call, owner in itertools.islice(found.values(), max(1, _MOST_PAIRS // max(1, size))):
        members = [rank for rank in owner.members(call.group) if rank < size]
        entered = [
            r
            for r in members
            if r in records and (has_called(records[r], call) or _has_joined(records[r], call))
        ]
        waiting = [r for r in entered if _waits_for(records[r], call)]
        # There may be no waiting member if the records are from several starts of a job, with
        # different process sets.
        if waiting:
            missing = [r for r in members if r not in entered and r not in elsewhere]
            waits.append(Wait(call, waiting, missing, [r for r in members if r in elsewhere]))
    return waits


def stalled(waits: Sequence[Wait], records: Mapping[int, Record], seconds: float) -> Sequence[Wait]:
    """Return the collectives that have waited for at least `seconds`, by each rank's own clock.

    A collective that all known ranks have called waits since the last of them has called it. In
    records that were written one after the other, it may wait on one rank and have ended on
    another one.

    Args:
        records: as for `find_waits`.
        seconds: more seconds than between the first and the last record.
    """
    since: dict[tuple[int, str, int], list[float]] = {}
    for record in records.values():
        # All calls of a name that are not counted have the same key.
        for call in (*record.open, *(call for call in record.done if call.number)):
            since.setdefault(call.key, []).append(record.time - call.enqueued)
    return [w for w in waits if (max if w.missing else min)(since[w.call.key]) >= seconds]


def longest_wait(records: Mapping[int, Record]) -> float:
    """Return the most seconds that a rank has waited for a collective; 0 if none waits."""
    waits = (r.time - call.enqueued for r in records.values() for call in r.open)
    return max(waits, default=0.0)


def seconds_waited(wait: Wait, records: Mapping[int, Record]) -> float:
    """Return the seconds since the first of the waiting ranks has called the collective."""
    return max(
        records[rank].time - call.enqueued
        for rank in wait.waiting
        for call in records[rank].open_by_collective.get(wait.call.collective, ())
    )


def _has_joined(record: Record, call: Call) -> bool:
    """Return whether the rank waits in `join`, where it counts as having called everything."""
    return call.group in record.joined


def _waits_for(record: Record, call: Call) -> bool:
    # Calls that are not counted have the number 0.
    return any(
        own.number == call.number or 0 in (own.number, call.number)
        for own in record.open_by_collective.get(call.collective, ())
    )


def has_called(record: Record, call: Call) -> bool:
    """Return whether the rank of a record has made a call, as far as calls are counted."""
    if _waits_for(record, call):
        return True
    return call.number > 0 and record.calls.get(call.collective, 0) >= call.number


def without_outdated(records: Mapping[int, Record]) -> dict[int, Record]:
    """Return the records of the ranks that had not continued after their record.

    Args:
        records: the records, by rank. They may be of different moments.
    """
    last: dict[tuple[int, str], Call] = {}
    for record in records.values():
        for collective, call in record.completed.items():
            if collective not in last or last[collective].number < call.number:
                last[collective] = call
    groups = known_groups(records)
    return {
        rank: record
        for rank, record in records.items()
        if not any(
            record.calls.get(collective, 0) < call.number
            and rank in (groups.get(call.group) or range(record.size))
            # Otherwise the record may be of a later start of Horovod, which counts from 1 again.
            and record.time < (call.ended or 0.0)
            and not _is_in_join(record, call, records.values())
            for collective, call in last.items()
        )
    }


def _is_in_join(record: Record, call: Call, all_records: Iterable[Record]) -> bool:
    """Return whether the rank may still wait in `join` of the call's process set."""
    return any(
        own.operation == "join"
        and own.group == call.group
        # A rank that has called the same `join`, and waits no more, shows that this `join` ended.
        and not any(
            other.calls.get(own.collective, 0) >= own.number
            and all(each.key != own.key for each in other.open)
            for other in all_records
        )
        for own in record.open
    )
