"""Say which ranks have called a collective with another tensor or operation than the others.

The engine's error has the two sizes or types, but does not name the ranks. The records of all
ranks show which rank has which.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.faults.call_names import describe_call, title
from hvdkit.faults.rank_names import name_ranks
from hvdkit.faults.records import Call, Record
from hvdkit.faults.unnamed_calls import different_lines, is_unnamed

_MISMATCHED = "Mismatched"
_WITH_JOIN = "not supported with Join"


def mismatch(records: Mapping[int, Record]) -> str | None:
    """Return which ranks differ in the collective that failed.

    Args:
        records: the records, by rank.

    Returns:
        A sentence; None if no collective failed because of a mismatch, or if operation, type and
        size are equal.
    """
    failed = [record for record in records.values() if _MISMATCHED in record.error]
    if not failed:
        return _after_join(records)
    failed_call = failed[0].failed_call
    if failed_call is None:
        return None
    kinds: dict[tuple[str, str, int], list[int]] = {}
    calls: dict[int, Call] = {}
    for rank, record in sorted(records.items()):
        alike = [
            call
            for call in (*record.done, *record.open)
            if call.collective == failed_call.collective
        ]
        if alike:
            calls[rank] = max(alike, key=lambda call: call.enqueued)
            kind = calls[rank].operation, calls[rank].dtype, calls[rank].bytes
            kinds.setdefault(kind, []).append(rank)
    if len(kinds) < 2:
        return None
    parts = []
    for (operation, dtype, size), ranks in sorted(kinds.items(), key=lambda item: len(item[1])):
        on = f" on {records[ranks[0]].host}" if len(ranks) == 1 else ""
        parts.append(f"{name_ranks(ranks).lower()}{on}: {operation} of {size:,} bytes of {dtype}")
    rank, call = next(iter(calls.items()))
    text = f"Ranks differ in {title(call, records[rank])}: {'; '.join(parts)}."
    lines = different_lines(records) if is_unnamed(call.name) else None
    return f"{text}\n{lines}" if lines else text


def _after_join(records: Mapping[int, Record]) -> str | None:
    """Return which ranks have joined, if a collective failed that needs all ranks."""
    failed = [record for record in records.values() if _WITH_JOIN in record.error]
    joined = [
        rank
        for rank, record in sorted(records.items())
        if any(call.operation == "join" for call in record.open)
    ]
    call = next((r.failed_call for r in failed if r.failed_call is not None), None)
    if call is None or not joined:
        return None
    has = "has" if len(joined) == 1 else "have"
    return (
        f"{name_ranks(joined)} {has} called hvd.join(). Before all ranks have called it, other "
        f"ranks cannot call {describe_call(call, failed[0])}."
    )
