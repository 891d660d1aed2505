"""The report of several runs: their metrics on the same axes, and a table of differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from hvdkit.monitor import metrics
from hvdkit.report import numbers
from hvdkit.report.charts import Line, LineChart
from hvdkit.report.document import Cell, Document, Section, Table, Value
from hvdkit.report.numbers import percent, short, with_unit
from hvdkit.report.ranks import SlowRanks
from hvdkit.report.reliability import state
from hvdkit.report.sections import SECTION_NAMES, TITLES, total
from hvdkit.report.series import Point, finite, mean_per_step, series
from hvdkit.report.single import facts
from hvdkit.report.training_run import TrainingRun, is_loss

#: The most charts of the users' metrics.
_MOST_OWN_CHARTS = 16
#: A smaller difference between two runs is not worth a sentence.
_NOTABLE = 0.02

#: Returns a number of a run and a metric; None if it is unknown.
_Number = Callable[[TrainingRun, str], float | None]

_GROUPS = {
    "Throughput": (metrics.SAMPLES, metrics.STEP),
    "Where the time goes": metrics.SECTIONS,
    "Learning rate and gradients": (metrics.LR, metrics.GRAD_NORM, metrics.LOSS_SCALE),
    "Communication": (metrics.PAYLOAD, metrics.OVERFLOWS, metrics.SKIPPED),
    "Memory": (metrics.RSS, metrics.ALLOCATED, metrics.PEAK_ALLOCATED, metrics.GPU),
}


def document(runs: Sequence[TrainingRun]) -> Document:
    """Return the report of at least two runs. Differences are relative to the first run."""
    own = sorted(
        {name for run in runs for name in run.own_names}, key=lambda name: (not is_loss(name), name)
    )
    made = [_differences(runs, own)]
    losses = [name for name in own if is_loss(name)]
    if losses:
        charts = [_chart(runs, name) for name in losses[:4]]
        timed = [run for run in runs if run.began is not None]
        charts.insert(1, _chart(timed, losses[0], over_time=True))
        made.append(Section("Loss", _last_common(runs, losses[0]), charts))
    for title, names in _GROUPS.items():
        found = [name for name in names if any(_is_shown(run, name) for run in runs)]
        charts = [_chart(runs, name) for name in found]
        if charts:
            made.append(Section(title, _sentences(runs, title), charts))
    others = [name for name in own if name not in losses[:4]]
    if others:
        charts = [_chart(runs, name) for name in others[:_MOST_OWN_CHARTS]]
        left = len(others) - len(charts)
        note = [f"{left} further metrics are only in the table."] if left else []
        made.append(Section("Further values of the scripts", note, charts))
    title = " and ".join([", ".join(run.name for run in runs[:-1]), runs[-1].name])
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    summary = [f"{run.name}: {state(run)}" for run in runs]
    return Document(
        f"Comparison of {title}", [*summary, *_settings(runs)], facts(list(runs)), made, notes
    )


def _settings(runs: Sequence[TrainingRun]) -> list[str]:
    """Return a sentence on the settings in which the runs differ."""
    different = []
    starts = [run.last_start for run in runs]
    for name, values in (
        ("the command", [start and start.command for start in starts]),
        ("the hosts", [start and dict(start.hosts) for start in starts]),
        ("the number of ranks", [len(run.parts[-1].ranks) if run.parts else None for run in runs]),
        ("the framework", [run.parts[-1].framework if run.parts else None for run in runs]),
        ("the version of hvdkit", [run.parts[-1].hvdkit if run.parts else None for run in runs]),
        ("the wire format", [tuple(run.wire_formats) or None for run in runs]),
    ):
        known = [value for value in values if value]
        if any(value != known[0] for value in known):
            different.append(name)
    if not different:
        return ["The records show no difference in command, hosts, versions and wire format."]
    return [f"The runs differ in {', '.join(different)}."]


def _chart(runs: Sequence[TrainingRun], name: str, over_time: bool = False) -> LineChart:
    found = [(run, series(run.records, name)) for run in runs if run.has(name)]
    title = TITLES.get(name, name) + (" over time" if over_time else "")
    return LineChart(
        f"{name}-over-time" if over_time else name,
        title,
        [Line(run.name, points) for run, points in found],
        numbers.unit_of(name),
        logarithmic=is_loss(name) or name in (metrics.GRAD_NORM, metrics.LOSS_SCALE),
        since=[run.began or 0.0 for run, _ in found] if over_time else (),
    )


def _is_shown(run: TrainingRun, name: str) -> bool:
    """Return whether a metric is worth a chart: a counter is not if nothing was counted."""
    counter = name in (metrics.OVERFLOWS, metrics.SKIPPED)
    return bool(total(run, name)) if counter else run.has(name)


def _last_common(runs: Sequence[TrainingRun], name: str) -> list[str]:
    """Return a sentence on a loss at the last step that all runs have reported."""
    found = [{p.step: p for p in finite(series(run.records, name))} for run in runs]
    common = set.intersection(*(set(points) for points in found)) if found else set()
    if not common:
        return [f"No step has a report with {name} in all runs, so the losses are not compared."]
    step = max(common)
    first = found[0][step].mean or 0.0
    parts = [f"{short(first)} in {runs[0].name}"]
    for run, points in zip(runs[1:], found[1:], strict=True):
        value = points[step].mean or 0.0
        difference = "equal" if value == first else f"{value - first:+.3g}"
        parts.append(f"{short(value)} in {run.name} ({difference})")
    return [f"At step {step:,}, the last one that all runs have reported, {name} is "
            f"{', '.join(parts)}."]  # fmt: skip


def _sentences(runs: Sequence[TrainingRun], title: str) -> list[str]:
    """Return the conclusions of a group of charts."""
    first, *others = runs
    sentences = []
    if title == "Throughput":
        before = _median(first, metrics.SAMPLES)
        for run in others:
            after = _median(run, metrics.SAMPLES)
            if not before or after is None:
                continue
            change = after / before - 1
            more = "more" if change > 0 else "fewer"
            sentences.append(
                f"{run.name} makes {percent(abs(change))} {more} samples per second than "
                f"{first.name} (medians)."
                if abs(change) >= _NOTABLE
                else f"{run.name} and {first.name} make equally many samples per second "
                f"(within 2 %)."
            )
    if title == "Where the time goes":
        for run in runs:
            step = mean_per_step(run.records, metrics.STEP)
            waited = mean_per_step(run.records, metrics.COMMUNICATION)
            if step and waited is not None:
                sentences.append(
                    f"{run.name} waits {percent(waited / step)} of the time in collectives."
                )
    if title == "Communication":
        before = mean_per_step(first.records, metrics.PAYLOAD)
        for run in others:
            after = mean_per_step(run.records, metrics.PAYLOAD)
            if before and after is not None:
                sentences.append(
                    f"A rank of {run.name} gives {with_unit(after, 'B')} to collectives per step, "
                    f"{short(after / before)} times as much as in {first.name}."
                )
    return sentences


def _differences(runs: Sequence[TrainingRun], own: Sequence[str]) -> Section:
    rows: list[Sequence[Cell]] = []

    def add(title: str, value: _Number, name: str = "", unit: str = "") -> None:
        values = [value(run, name) for run in runs]
        if all(each is None for each in values):
            return
        row: list[Cell] = [title, Value(values[0], unit)]
        for each in values[1:]:
            row += [Value(each, unit), Value(_ratio(values[0], each), "ratio")]
        rows.append(row)

    add("reported steps", lambda run, _: run.steps)
    add("time from begin to end", _seconds, unit="s")
    for name in own:
        add(f"{name}, last", _last, name)
        if is_loss(name):
            add(f"{name}, smallest", _smallest, name)
    add("samples per second, median", _median, metrics.SAMPLES)
    add("time per step, median", _median, metrics.STEP, "s")
    for name, title in SECTION_NAMES.items():
        add(f"{title} per step", _mean, name, "s")
    add("encoded gradients per step", _mean, metrics.PAYLOAD, "B")
    add("overflows", _total, metrics.OVERFLOWS)
    add("skipped steps", _total, metrics.SKIPPED)
    add("time lost to slow ranks", _slow_share, unit="ratio")
    add("largest resident memory", _largest, metrics.RSS, "B")
    add("largest memory on the GPU", _largest, metrics.PEAK_ALLOCATED, "B")
    add("resumed", lambda run, _: len(run.restarts) if run.records else None)
    add("failed starts", lambda run, _: sum(e.failed for e in run.starts) if run.starts else None)
    head = ["", runs[0].name]
    for run in runs[1:]:
        head += [run.name, "difference"]
    caption = f"Differences are relative to {runs[0].name}."
    return Section("Differences", (), (), [Table(head, rows, caption)])


def _ratio(first: float | None, value: float | None) -> float | None:
    if first is None or value is None or not first:
        return None
    return (value - first) / abs(first)


def _points(run: TrainingRun, name: str) -> list[Point]:
    return finite(series(run.records, name))


def _last(run: TrainingRun, name: str) -> float | None:
    points = series(run.records, name)
    return points[-1].mean if points else None


def _smallest(run: TrainingRun, name: str) -> float | None:
    return min((point.mean or 0.0 for point in _points(run, name)), default=None)


def _largest(run: TrainingRun, name: str) -> float | None:
    return max((point.high or 0.0 for point in _points(run, name)), default=None)


def _median(run: TrainingRun, name: str) -> float | None:
    values = [point.mean or 0.0 for point in _points(run, name)]
    return median(values) if values else None


def _mean(run: TrainingRun, name: str) -> float | None:
    return mean_per_step(run.records, name)


def _total(run: TrainingRun, name: str) -> float | None:
    return total(run, name) if run.has(name) else None


def _seconds(run: TrainingRun, _: str) -> float | None:
    return None if run.began is None or run.ended is None else run.ended - run.began


def _slow_share(run: TrainingRun, _: str) -> float | None:
    found = SlowRanks.of(run.records)
    return None if found is None else found.share
