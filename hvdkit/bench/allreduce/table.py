"""The table of an allreduce benchmark, in the layout of nccl-tests."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hvdkit.bench.allreduce.cases import DTYPES, WIRES, bus_factor
from hvdkit.bench.figures import new_table, percentile, ratios
from hvdkit.bench.results import Results
from hvdkit.bench.sizes import show_size
from hvdkit.console.tables import Console

_LAYOUT = "{:>12} {:>12} {:>9} {:>8} {:>5} {:<16} {:>9} {:>9} {:>9} {:>8} {:>8} {:>7}"
_NAMES = (
    *("size", "count", "type", "redop", "wire", "variant"),
    *("min", "time", "p99", "algbw", "busbw", "#wrong"),
)
_UNITS = ("(B)", "(elements)", *[""] * 4, *["(us)"] * 3, *["(GB/s)"] * 2, "")


def turn_medians(row: Mapping[str, Any]) -> list[float]:
    """Return the median time of each turn, in seconds."""
    return [statistics.median(calls) for calls in row["turns"]]


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what identifies a row."""
    names = tuple(str(row[name]) for name in ("variant", "dtype", "op", "wire"))
    return (*names, show_size(row["bytes"]))


def columns(row: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the columns of a row, for the table and for `--csv`. Times are in microseconds."""
    calls = [seconds for turn in row["turns"] for seconds in turn]
    median = statistics.median(calls)
    bandwidth = row["bytes"] / median / 1e9
    return {
        "size": row["bytes"],
        "count": row["bytes"] // DTYPES[row["dtype"]],
        "type": row["dtype"],
        "redop": row["op"],
        "wire": row["wire"],
        "variant": row["variant"],
        "min_us": min(calls) * 1e6,
        "time_us": median * 1e6,
        "p99_us": percentile(calls, 99) * 1e6,
        "algbw_gbs": bandwidth,
        "busbw_gbs": bandwidth * bus_factor(ranks),
        "wrong": row["wrong"],
        "calls": len(calls),
    }


def header() -> str:
    """Return the lines above the table."""
    return "\n".join("#" + _LAYOUT.format(*names)[1:] for names in (_NAMES, _UNITS))


def line(row: Mapping[str, Any], ranks: int) -> str:
    """Return the line of a row."""
    values = columns(row, ranks)
    times = [_microseconds(values[name]) for name in ("min_us", "time_us", "p99_us")]
    rates = [f"{values[name]:.3f}" for name in ("algbw_gbs", "busbw_gbs")]
    names = [values[name] for name in ("size", "count", "type", "redop", "wire", "variant")]
    return _LAYOUT.format(*names, *times, *rates, values["wrong"])


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1e6 else f"{value:.0f}"


def show_summary(results: Results, console: Console) -> None:
    """Print each variant's mean bus bandwidth, and the ratios of the first variant's times."""
    ranks = results.conditions["ranks"]
    by_variant: dict[str, list[Mapping[str, Any]]] = {}
    for row in results.rows:
        by_variant.setdefault(row["variant"], []).append(row)
    for name, rows in by_variant.items():
        mean = statistics.mean(columns(row, ranks)["busbw_gbs"] for row in rows)
        print(f"# Avg bus bandwidth of {name}: {mean:.3f} GB/s")
    first, *others = by_variant
    if others:
        console.print(_ratios(by_variant, first, others))


def _ratios(
    by_variant: Mapping[str, Sequence[Mapping[str, Any]]], first: str, others: Sequence[str]
) -> Table:
    title = f"Time of {first} / time of another variant in the same turn"
    table = new_table(title, ["type redop wire size", *others])
    for row in by_variant[first]:
        cells = []
        for name in others:
            same = [other for other in by_variant[name] if key(other)[1:] == key(row)[1:]]
            if not same:
                cells.append("")
                continue
            low, middle, high = ratios(turn_medians(row), turn_medians(same[0]))
            cells.append(f"{middle:.2f} ({low:.2f} - {high:.2f})")
        table.add_row(" ".join(key(row)[1:]), *cells)
    return table


def advice(results: Results) -> list[str]:
    """Return sentences that say how to read the table."""
    ranks = results.conditions["ranks"]
    factor = bus_factor(ranks)
    lines = [
        "size is that of the buffer before it is encoded; time is the median of all "
        "calls, and the slowest rank of each call counts.",
        f"algbw = size / time; busbw = algbw x {factor:.3g}, which is 2(n-1)/n for {ranks} ranks: "
        "the rate of the network if the ranks form one ring. Compare it with the link.",
    ]
    if any(row["wire"] != WIRES[0] for row in results.rows):
        lines.append(
            "With a wire format, fewer bytes are sent than algbw and busbw count, so busbw may "
            "exceed the link."
        )
    return lines
