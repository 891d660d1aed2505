"""The values of a metric over the steps, with few enough points for a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hvdkit.monitor import Record

#: The most groups of records in a picture. Each has up to three points.
MOST_GROUPS = 200


@dataclass(frozen=True)
class Point:
    """A metric in one record.

    Attributes:
        step: the step of the record.
        time: its time, in seconds since 1970.
        mean: the mean over the ranks; None if no rank has a finite value.
        low: the smallest value of a rank; in a group of records, that of the group.
        high: the largest value.
        nonfinite: the ranks whose value is NaN or infinite.
    """

    step: int
    time: float
    mean: float | None
    low: float | None
    high: float | None
    nonfinite: Sequence[int] = ()


def series(records: Iterable[Record], name: str) -> list[Point]:
    """Return the points of a metric, one for each record that has it."""
    return [
        Point(record.step, record.time, found.mean, found.min, found.max, found.nonfinite)
        for record in records
        if (found := record.metrics.get(name)) is not None
    ]


def reduced(points: Sequence[Point], groups: int = MOST_GROUPS) -> list[Point]:
    """Return at most three points for each of `groups` groups of neighbouring points.

    A group keeps the points with the smallest and the largest mean, and the first point that is not
    finite, so no extreme is lost. `low` and `high` of these points are those of the whole group.
    The first and the last of all points are always kept.
    """
    if len(points) <= 2 * groups:
        return list(points)
    kept: list[Point] = []
    edges = [len(points) * number // groups for number in range(groups + 1)]
    for begin, end in pairwise(edges):
        group = points[begin:end]
        finite = [place for place, point in enumerate(group) if point.mean is not None]
        chosen = {0} if begin == 0 else {len(group) - 1} if end == len(points) else set()
        if finite:
            chosen.add(min(finite, key=lambda place: group[place].mean or 0.0))
            chosen.add(max(finite, key=lambda place: group[place].mean or 0.0))
        chosen |= set([place for place, point in enumerate(group) if point.nonfinite][:1])
        lows = [point.low for point in group if point.low is not None]
        highs = [point.high for point in group if point.high is not None]
        low, high = min(lows, default=None), max(highs, default=None)
        kept += [replace(group[place], low=low, high=high) for place in sorted(chosen)]
    return kept


def finite(points: Iterable[Point]) -> list[Point]:
    """Return the points with a mean."""
    return [point for point in points if point.mean is not None and math.isfinite(point.mean)]


def mean_per_step(records: Iterable[Record], name: str, of_slowest: bool = False) -> float | None:
    """Return the mean of a metric. Each record is weighted with its number of steps.

    None if no record with steps has the metric.

    Args:
        records: the records.
        name: the metric.
        of_slowest: use the largest value of a rank in each record, not the mean over the ranks.
    """
    total, steps = 0.0, 0
    for record in records:
        found = record.metrics.get(name)
        value = None if found is None else found.max if of_slowest else found.mean
        if value is not None and record.steps:
            total += value * record.steps
            steps += record.steps
    return total / steps if steps else None
