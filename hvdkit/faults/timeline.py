"""Show when each rank called the last collectives, as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hvdkit.faults.alignment import aligned
from hvdkit.faults.call_names import describe_call
from hvdkit.faults.records import Call, Record, with_all_groups


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
