"""Find calls without a name that ranks may have matched wrongly.

PyTorch's ranks match collectives without a name in order. If one rank makes an additional call,
each of its later calls belongs to another line of the script than the calls of the other ranks. The
values of different calls are then combined, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hvdkit.faults.rank_names import name_ranks
from hvdkit.faults.records import Call, Record

_UNNAMED = re.compile(r"\bnoname\.\d+$")


def is_unnamed(name: str) -> bool:
    """Return whether a collective's name is a number in the order of calls."""
    return _UNNAMED.search(name) is not None


def different_lines(records: Mapping[int, Record]) -> str | None:
    """Return a text about the first call without a name that ranks made in different lines.

    Args:
        records: the records, by rank.

    Returns:
        Three sentences; None if all ranks made such calls in the same lines. Broadcasts do
        not count: rank 0 often calls them in a branch of its own.
    """
    calls: dict[tuple[int, str], dict[int, Call]] = {}
    for rank, record in sorted(records.items()):
        for call in _numbered_calls(record):
            calls.setdefault((call.group, call.name), {})[rank] = call
    by_time = sorted(calls.values(), key=lambda ranks: min(c.enqueued for c in ranks.values()))
    for of_ranks in by_time:
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
