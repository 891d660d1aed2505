"""Say which ranks have called a collective in another way than the others.

The engine's error has the two sizes or types, but does not name the ranks. The records of all
ranks show which rank has which.

PyTorch's ranks match collectives without a name in order. If one rank makes an additional call,
each of its later calls belongs to another line of the script than the calls of the other ranks. The
values of different calls are then combined, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hvdkit.faults.names import describe_call, name_ranks, title
from hvdkit.faults.records import Call, Record

_MISMATCHED = "Mismatched"
_WITH_JOIN = "not supported with Join"


def mismatch(records: Mapping[int, Record]) -> str | None:
    """Return which ranks differ in the collective that failed.

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


_UNNAMED = re.compile(r"\bnoname\.\d+$")


def is_unnamed(name: str) -> bool:
    """Return whether a collective's name is a number in the order of calls."""
    return _UNNAMED.search(name) is not None


def different_lines(records: Mapping[int, Record]) -> str | None:
    """Return a text about the first call without a name that ranks made in different lines.

    Returns:
        Three sentences; None if all ranks made such calls in the same lines. Broadcasts do
        not count: rank 0 often calls them in a branch of its own.
    """
    calls: dict[tuple[int, str], dict[int, Call]] = {}
    for rank, record in sorted(records.items()):
        for call in _numbered_calls(record):
            calls.setdefault((call.group, call.name), {})[rank] = call
    for of_ranks in calls.values():
        places: dict[str, list[int]] = {}
        for rank, call in of_ranks.items():
            places.setdefault(call.line, []).append(rank)
        if len(places) > 1:
            return _text(next(iter(of_ranks.values())), places)
    return None


def _numbered_calls(record: Record) -> Iterator[Call]:
    """Yield the calls without a name since the last `join`, which starts the numbers again."""
    joined = max((c.enqueued for c in record.done if c.operation == "join"), default=0.0)
    for call in (*record.done, *record.open):
        counts = call.operation != "broadcast" and call.enqueued > joined
        if is_unnamed(call.name) and call.line and counts:
            yield call


def _text(call: Call, places: Mapping[str, list[int]]) -> str:
    name = call.name.removeprefix(f"{call.operation}.")
    where = ", and ".join(
        f"{name_ranks(ranks).lower()} called it at {place}" for place, ranks in places.items()
    )
    return (
        f"Ranks match calls without a name in order. In the {call.operation} {name!r}, {where}. If "
        "these calls do not belong together, values of different calls may have been combined: "
        "remove the additional call, or give the calls names."
    )
