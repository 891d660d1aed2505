"""Write numbers, durations and times for people."""

from __future__ import annotations

import math
import time

from hvdkit.monitor.metrics import METRICS

#: Stands for an unknown value.
UNKNOWN = "-"
#: Unit -> (smallest size, factor, text), the largest first.
_SCALES = {
    "B": ((1e9, 1e-9, "GB"), (1e6, 1e-6, "MB"), (1e3, 1e-3, "kB"), (0.0, 1.0, "B")),
    "s": ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs")),
    "ratio": ((0.0, 100.0, "%"),),
    "1/s": ((0.0, 1.0, "samples/s"),),
}


def unit_of(name: str) -> str:
    """Return the unit of a metric, as in `hvdkit.monitor.metrics`; empty if it has none."""
    return METRICS[name].unit if name in METRICS else ""


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return a factor and a unit with which values of up to `largest` are easy to read."""
    for least, factor, text in _SCALES.get(unit, ()):
        if abs(largest) >= least:
            return factor, text
    return 1.0, unit


def short(value: float | None) -> str:
    """Return a number with about four digits; a dash for None."""
    if value is None:
        return UNKNOWN
    if math.isnan(value):
        return "NaN"
    if abs(value) >= 1000 and math.isfinite(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def with_unit(value: float | None, unit: str) -> str:
    """Return a value of a metric with its unit."""
    if value is None or not math.isfinite(value):
        return short(value)
    factor, text = scale(unit, value)
    if unit == "ratio":
        return f"{value * factor:.3g} {text}"
    return f"{short(value * factor)} {text}".rstrip()


def percent(share: float) -> str:
    """Return a share in percent."""
    value = 100 * share
    if 0 < abs(value) < 0.1:
        return "less than 0.1 %"
    return f"{value:.1f} %" if abs(value) < 10 else f"{value:.0f} %"


def duration(seconds: float) -> str:
    """Return a duration, such as `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


def moment(seconds: float) -> str:
    """Return a time in UTC, such as `2026-11-25 03:39:00 UTC`."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "?"


def times(number: int) -> str:
    """Return how often something has happened, such as `3 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `2 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
