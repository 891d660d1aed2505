"""Convert the times of several records to one clock.

The ranks of one machine read the same monotonic clock. Only the offsets of their records to the
time of day differ: the clock may have been set between two records. The clocks of different
machines are compared by the collectives that have ended on both machines: a collective ends on all
ranks at almost the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from hvdkit.faults.records import Record

# A smaller difference is left as it is: the ends of a collective differ by up to this much.
_SECONDS = 0.01


def aligned(records: Mapping[int, Record]) -> dict[int, Record]:
    """Return the records with times of the clock of the lowest rank.

    Records without a common collective keep their times of day.

    Args:
        records: the records, by rank.
    """
    machines: dict[str, list[int]] = {}
    found: dict[int, Record] = {}
    for rank, record in sorted(records.items()):
        ranks = machines.setdefault(_machine(record), [])
        offset = found[ranks[0]].offset if ranks else record.offset
        if offset is not None and record.offset not in (None, offset):
            record = record.shifted(offset - record.offset)
        found[rank] = record
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
    if record.offset is None:
        return f"host {record.host}"
    return record.machine or f"host {record.host}"


def _ends(records: Mapping[int, Record], ranks: Sequence[int]) -> dict[tuple[int, str, int], float]:
    """Return when counted collectives have ended on the first of the ranks that took part."""
    found: dict[tuple[int, str, int], float] = {}
    for rank in ranks:
        for call in records[rank].done:
            if call.ended is not None and call.number:
                found.setdefault(call.key, call.ended)
    return found
