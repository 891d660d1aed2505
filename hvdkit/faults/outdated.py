"""Leave out records that do not say any more what a rank does.

Ranks write records when a collective waits for too long. If this stall ends by itself, the records
stay. Later records of other ranks show that a rank has continued: a collective ends only after all
ranks of its process set have called it, except for ranks that wait in `join`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hvdkit.faults.alignment import aligned
from hvdkit.faults.records import Call, Record, with_all_groups


def without_outdated(records: Mapping[int, Record]) -> dict[int, Record]:
    """Return the records of the ranks that had not continued after their record.

    Args:
        records: the records, by rank. They may be of different moments.
    """
    last: dict[tuple[int, str], Call] = {}
    all_records = with_all_groups(aligned(records))
    for record in all_records.values():
        for call in _completed(record):
            if call.collective not in last or last[call.collective].number < call.number:
                last[call.collective] = call
    return {
        rank: records[rank]
        for rank, record in all_records.items()
        if not any(
            _was_made_before(record, call) and not _is_in_join(record, call, all_records.values())
            for call in last.values()
        )
    }


def _completed(record: Record) -> Iterator[Call]:
    """Yield the counted calls that ended on a rank without an error."""
    failure = record.failed_call.ended if record.failed_call else None
    if record.error and failure is None:
        return
    for call in record.done:
        if call.number and call.ended is not None and (failure is None or call.ended < failure):
            yield call


def _was_made_before(record: Record, call: Call) -> bool:
    """Return whether a rank that took part in a completed call made its record before the call."""
    assert call.ended is not None
    is_member = record.rank in record.members(call.group)
    # The records may also be of several starts of a job, which count from 1.
    is_earlier = record.time < call.ended
    return is_member and is_earlier and record.calls.get(call.collective, 0) < call.number


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
