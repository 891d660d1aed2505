"""Show when each rank called the last collectives, as a table with the times of one clock.

The ranks of one machine read the same monotonic clock. Only the offsets of their records to the
time of day differ: the clock may have been set between two records. The clocks of different
machines are compared by the collectives that have ended on both machines: a collective ends on all
ranks at almost the same time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

from hvdkit.faults.names import describe_call, name_ranks
from hvdkit.faults.records import Call, Record, with_all_groups
from hvdkit.faults.waits import has_called

# With more ranks, the table has no column for each of them.
_MOST_COLUMNS = 16
# A smaller difference is left as it is: the ends of a collective differ by up to this much.
_SECONDS = 0.01


def timeline(records: Mapping[int, Record], count: int = 20) -> list[str]:
    """Return a table of the last collectives: when each rank called them.

    With many ranks, the table has the first and the last rank that called a collective.
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
        texts = (
            [_cell(row.get(rank), first) for rank in ranks]
            if columns
            else _first_and_last(row, first)
        )
        cells = "".join(f" {text:>9}" for text in texts)
        mark = "  (not complete)" if missing or waits else ""
        if missing and not columns:
            mark = f"  (not complete: {name_ranks(missing).lower()})"
        lines.append(f"{clock}     {cells}  {describe_call(call, records[owner])}{mark}")
    return lines


def _first_and_last(row: Mapping[int, Call], first: float) -> list[str]:
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


def aligned(records: Mapping[int, Record]) -> dict[int, Record]:
    """Return the records with times of the clock of the lowest rank.

    Records without a common collective keep their times of day.
    """
    machines: dict[str, list[int]] = {}
    found: dict[int, Record] = {}
    for rank, record in sorted(records.items()):
        ranks = machines.setdefault(_machine(record), [])
        found[rank] = record.shifted(found[ranks[0]].offset - record.offset) if ranks else record
        ranks.append(rank)
    first, *others = list(machines.values()) or [[]]
    ends = _ends(found, first)
    for ranks in others:
        own = _ends(found, ranks)
        common = own.keys() & ends.keys()
        ahead = median(own[key] - ends[key] for key in common) if common else 0.0
        if abs(ahead) > _SECONDS:
            found |= {rank: found[rank].shifted(-ahead) for rank in ranks}
    return found


def _machine(record: Record) -> str:
    """Return a text that is equal for ranks that read the same monotonic clock."""
    return record.machine or f"host {record.host}"


def _ends(records: Mapping[int, Record], ranks: Sequence[int]) -> dict[tuple[int, str, int], float]:
    """Return when counted collectives have ended on the first of the ranks that took part."""
    found: dict[tuple[int, str, int], float] = {}
    for rank in ranks:
        for call in records[rank].done:
            if call.ended is not None and call.number:
                found.setdefault(call.key, call.ended)
    return found
