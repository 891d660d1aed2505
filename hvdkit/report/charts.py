"""The charts of a report: lines over the steps, stacked sections, bars of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.report import numbers
from hvdkit.report.series import Point, reduced
from hvdkit.report.theme import Theme
from hvdkit.system.plain_files import printable

_LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
#: Above this ratio between the largest and the smallest value, an axis is logarithmic.
_LOG_RATIO = 50
#: A longer name, in characters, is shortened in a legend.
_LONGEST_NAME = 50
#: The most bars in a chart.
MOST_BARS = 64


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: for the legend; empty for a chart with one line.
        points: the values.
    """

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class LineChart:
    """Values over the steps, with the range over the ranks.

    Attributes:
        key: see `Chart`.
        title: see `Chart`.
        lines: the lines, at most as many as a theme has colours.
        unit: the unit of the values, as in `hvdkit.monitor.metrics`.
        void: points of steps that were made again after a restart.
        restarts: steps at which the run has resumed.
        checkpoints: steps of checkpoints.
        logarithmic: whether the vertical axis may be logarithmic.
        since: for each line, the time at which its run began, in seconds since 1970; empty if the
            horizontal axis is the step.
    """

    key: str
    title: str
    lines: Sequence[Line]
    unit: str = ""
    void: Sequence[Point] = ()
    restarts: Sequence[int] = ()
    checkpoints: Sequence[int] = ()
    logarithmic: bool = False
    since: Sequence[float] = ()
    height: float = 2.9

    def draw(self, axes: Any, theme: Theme) -> None:
        """See `Chart`."""
        largest = max((abs(v) for line in self.lines for v in _values(line.points)), default=0.0)
        factor, unit = numbers.scale(self.unit, largest)
        log = self.logarithmic and _spread([v for ln in self.lines for v in _values(ln.points)])
        if log:
            axes.set_yscale("log")
        seconds, x_unit = _time_scale(self._longest)
        for number, line in enumerate(self.lines):
            since = self.since[number] if self.since else None
            self._draw_line(axes, theme, number, line, factor, since, seconds)
        if self.void:
            xs, ys, _, _ = _columns(reduced(self.void), factor, None, 1.0)
            axes.plot(xs, ys, color=theme.muted, linestyle=(0, (1, 1.5)), label="steps made again")
        for step in self.restarts:
            label = "restart" if step == self.restarts[0] else None
            axes.axvline(step, color=theme.alarm, linestyle=(0, (4, 2)), linewidth=1, label=label)
        if self.checkpoints:
            axes.plot(
                self.checkpoints,
                [0.0] * len(self.checkpoints),
                color=theme.text,
                marker="^",
                linestyle="none",
                markersize=5,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
                label="checkpoint",
                zorder=5,
            )
        axes.set_ylabel(f"{unit} (logarithmic)".strip() if log else unit)
        axes.set_xlabel(f"time since the start, {x_unit}" if self.since else "step")
        axes.xaxis.set_major_formatter("{x:,.10g}")
        if not log:
            axes.margins(y=0.08)
            axes.yaxis.set_major_formatter("{x:,.6g}")
            if self.unit:  # an amount, whose axis begins at 0 to show differences in proportion
                top = axes.get_ylim()[1]
                axes.set_ylim(0, top * 1.05 if top > 0 else 1)
        if len(self.lines) > 1 or self.void or self.restarts or self.checkpoints or self._bad:
            _legend(axes, theme)

    @property
    def _bad(self) -> bool:
        return any(point.nonfinite for line in self.lines for point in line.points)

    @property
    def _longest(self) -> float:
        spans = [
            line.points[-1].time - since
            for line, since in zip(self.lines, self.since, strict=False)
            if line.points
        ]
        return max(spans, default=0.0)

    def _draw_line(
        self,
        axes: Any,
        theme: Theme,
        number: int,
        line: Line,
        factor: float,
        since: float | None,
        seconds: float,
    ) -> None:
        color = theme.series[number % len(theme.series)]
        points = reduced(line.points)
        xs, ys, lows, highs = _columns(points, factor, since, seconds)
        if any(low < high for low, high in zip(lows, highs, strict=True)):
            axes.fill_between(xs, lows, highs, color=color, alpha=0.22, linewidth=0)
        axes.plot(
            xs,
            ys,
            color=color,
            linestyle=_LINE_STYLES[number % len(_LINE_STYLES)],
            marker="o" if len(points) < 3 else None,
            label=line.name or None,
        )
        bad = [x for x, point in zip(xs, points, strict=True) if point.nonfinite]
        if bad:
            axes.plot(
                bad,
                [0.97] * len(bad),
                color=theme.alarm,
                marker="x",
                linestyle="none",
                markersize=6,
                transform=axes.get_xaxis_transform(),
                label="NaN or infinite" if number == 0 else None,
                zorder=6,
            )


@dataclass(frozen=True)
class StackChart:
    """Parts of a whole over the steps.

    Attributes:
        key: see `Chart`.
        title: see `Chart`.
        steps: the steps.
        parts: name -> the values at these steps, in seconds.
    """

    key: str
    title: str
    steps: Sequence[int]
    parts: Mapping[str, Sequence[float]]
    height: float = 2.9

    def draw(self, axes: Any, theme: Theme) -> None:
        """See `Chart`."""
        totals = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        factor, unit = numbers.scale("s", max(totals, default=0.0))
        axes.stackplot(
            self.steps,
            *[[value * factor for value in values] for values in self.parts.values()],
            colors=theme.series[: len(self.parts)],
            labels=list(self.parts),
            edgecolor=theme.background,
            linewidth=0.6,
        )
        axes.set_ylim(bottom=0)
        axes.set(xlabel="step", ylabel=unit)
        axes.margins(x=0)
        _legend(axes, theme)


@dataclass(frozen=True)
class BarChart:
    """The time of a step of each rank, by section.

    Attributes:
        key: see `Chart`.
        title: see `Chart`.
        names: the names of the bars.
        parts: name of a section -> its seconds in each bar.
    """

    key: str
    title: str
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]

    @property
    def height(self) -> float:
        """See `Chart`."""
        return 1.25 + 0.22 * max(len(self.names), 2)

    def draw(self, axes: Any, theme: Theme) -> None:
        """See `Chart`."""
        totals = [sum(column) for column in zip(*self.parts.values(), strict=True)]
        factor, unit = numbers.scale("s", max(totals, default=0.0))
        lefts = [0.0] * len(self.names)
        places = range(len(self.names))
        for number, (name, values) in enumerate(self.parts.items()):
            widths = [value * factor for value in values]
            axes.barh(
                places,
                widths,
                0.75,
                left=lefts,
                color=theme.series[number % len(theme.series)],
                edgecolor=theme.background,
                linewidth=0.6,
                label=name,
            )
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
        axes.set_yticks(places, self.names)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.grid(visible=False, axis="y")
        _legend(axes, theme)


def _legend(axes: Any, theme: Theme) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    shown = [_short_name(label) for label in labels]
    widths = sorted((0.065 * len(label) + 0.55 for label in shown), reverse=True)
    columns = max((n for n in (1, 2, 3) if sum(widths[:n]) < axes.figure.get_figwidth()), default=1)
    axes.figure.legend(
        handles,
        shown,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        labelcolor=theme.text,
    )


def _short_name(name: str) -> str:
    """Return a name that fits into a legend."""
    # matplotlib leaves out a name that begins with "_".
    shown = printable(name, one_line=True)
    if len(shown) > _LONGEST_NAME:
        half = _LONGEST_NAME // 2
        shown = f"{shown[:half]}…{shown[-half:]}"
    return f"\u200b{shown}" if shown.startswith("_") else shown


def _columns(
    points: Sequence[Point], factor: float, since: float | None, seconds: float
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return the places, means, minima and maxima. A value that is not finite is NaN."""
    xs = [p.step if since is None else (p.time - since) / seconds for p in points]
    return (
        [float(x) for x in xs],
        [_scaled(point.mean, factor) for point in points],
        [_scaled(point.low, factor) for point in points],
        [_scaled(point.high, factor) for point in points],
    )


def _scaled(value: float | None, factor: float) -> float:
    return math.nan if value is None else value * factor


def _values(points: Sequence[Point]) -> list[float]:
    return [value for point in points for value in (point.low, point.high) if value is not None]


def _spread(values: Sequence[float]) -> bool:
    """Return whether values are positive, and so different that a linear axis hides the small."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_RATIO


def _time_scale(seconds: float) -> tuple[float, str]:
    """Return the seconds in a unit of time, and its name."""
    for size, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 3 * size:
            return size, name
    return 1.0, "s"
