"""Summaries of measured times, and the console for their tables."""

import statistics
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hvdkit.console.tables import Console

# The characters of a line of the widest tables.
_WIDTH = 144

# The share of the turns that `spread` leaves out at each end.
_OUTLIERS = 0.1


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, interpolated between the values. `percent` is from 1 to 99."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def spread(turns: Sequence[float]) -> tuple[float, float]:
    """Return the range of the turns, without the lowest and the highest tenth of them."""
    ordered = sorted(turns)
    left_out = int(len(ordered) * _OUTLIERS)
    kept = ordered[left_out : len(ordered) - left_out]
    return kept[0], kept[-1]


def ratios(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of `first[i] / second[i]`, where i is a turn that both have."""
    return quartiles([a / b for a, b in zip(first, second, strict=False)])


def new_table(title: str, headings: Sequence[str], names: int = 1) -> Table:
    """Return a table without rows.

    Args:
        title: above the table.
        headings: those of the columns.
        names: the number of columns with names, which come first. The others have numbers.
    """
    table = Table(title=title, box=SIMPLE_HEAD)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < names else "right", no_wrap=True)
    return table


def wide_console() -> Console:
    """Return a console that is wide enough for the tables."""
    return Console(width=max(Console().width, _WIDTH))
