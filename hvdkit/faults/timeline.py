"""Show when each rank called the last collectives, as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hvdkit.faults.alignment import aligned
from hvdkit.faults.call_names import describe_call
from hvdkit.faults.rank_names import name_ranks
from hvdkit.faults.records import Call, Record, with_all_groups
from hvdkit.faults.waits import has_called

# With more ranks, the table has no column for each of them.
_MOST_COLUMNS = 16


def timeline(records: Mapping[int, Record], count: int = 20) -> list[str]:
    """Return a table of the last collectives: when each rank called them.

    With many ranks, the table has the first and the last rank that called a collective.

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
    titles = [f"rank {rank}" for rank in ranks]
    columns = len(ranks) <= _MOST_COLUMNS
    if not columns:
        titles = ["first", "last", ""]
    lines = ["time             " + "".join(f"{title:>10}" for title in titles) + "  collective"]
    for row in last[-count:]:
        first = min(call.enqueued for call in row.values())
        owner = next(iter(row))
        call = row[owner]
        clock = time.strftime("%H:%M:%S", time.localtime(first)) + f".{int(first % 1 * 1000):03}"
        absent = [r for r in ranks if r not in row and r in records[owner].members(call.group)]
        # Others have called it in `join`, or long ago: only the last calls are kept.
        missing = [r for r in absent if not (call.number and has_called(records[r], call))]
        waits = any(each.ended is None for each in row.values())
        texts = [_cell(row.get(rank), first) for rank in ranks] if columns else _ends(row, first)
        cells = "".join(f" {text:>9}" for text in texts)
        mark = "  (not complete)" if missing or waits else ""
        if missing and not columns:
            mark = f"  (not complete: {name_ranks(missing).lower()})"
        lines.append(f"{clock}     {cells}  {describe_call(call, records[owner])}{mark}")
    return lines


def _ends(row: Mapping[int, Call], first: float) -> list[str]:
    """Return the first and the last rank that called a collective, and the delay of the last."""
    ranks = sorted(row, key=lambda rank: (row[rank].enqueued, rank))
    return [f"rank {ranks[0]}", f"rank {ranks[-1]}", _cell(row[ranks[-1]], first)]


def _cell(call: Call | None, first: float) -> str:
    if call is None:
        return "-"
    waits = "" if call.ended is not None else " …"
    delay = call.enqueued - first
    text = f"+{delay * 1000:.0f} ms" if delay < 100 else f"+{delay:.0f} s"
    return f"{text}{waits}"
