"""The sections about metrics in the report of one run.

To add a section, write a function that returns a `Section`, or None without data. Add it to
`document` of `single.py`, and its metrics to `comparison.py`. Test it with known records
(`tests/unit/report/runs.py`), missing data, NaN and one rank. To see the pages, run
`HVDKIT_KEEP_PICTURES=DIR pytest --long tests/unit/report/test_browser.py` (needs Chromium).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from hvdkit.monitor import metrics
from hvdkit.report import numbers
from hvdkit.report.charts import Line, LineChart, StackChart
from hvdkit.report.document import Cell, Section, Table, Value
from hvdkit.report.numbers import count, percent, short, with_unit
from hvdkit.report.series import MOST_GROUPS, finite, mean_per_step, reduced, series
from hvdkit.report.training_run import TrainingRun, is_loss

#: The most charts of the user's metrics. All metrics are in the table.
_MOST_OWN_CHARTS = 16
#: The smallest change between the first and the last third of a run that the page mentions.
_NOTABLE_CHANGE = 0.1
#: If all sections together exceed a step by more than this part, the page says so.
_OVERLAP = 0.02

SECTION_NAMES = {
    metrics.DATA: "data",
    metrics.FORWARD: "forward",
    metrics.BACKWARD: "backward",
    metrics.COMMUNICATION: "exposed communication",
    metrics.UPDATE: "update",
    metrics.CHECKPOINT: "checkpoint",
    metrics.OTHER: "other",
}
#: Metric -> the title of its chart.
TITLES = {
    metrics.SAMPLES: "samples per second, of all ranks",
    metrics.STEP: "time per step",
    **{name: f"{title} per step" for name, title in SECTION_NAMES.items()},
    metrics.PAYLOAD: "encoded gradients per step and rank",
    metrics.OVERFLOWS: "overflows per report",
    metrics.SKIPPED: "skipped steps per report",
    metrics.LR: "learning rate",
    metrics.GRAD_NORM: "gradient norm, before clipping",
    metrics.LOSS_SCALE: "loss scale",
    metrics.RSS: "resident memory of a process",
    metrics.ALLOCATED: "memory of tensors on the GPU",
    metrics.PEAK_ALLOCATED: "largest memory of tensors on the GPU",
    metrics.GPU: "utilization of the GPU",
}


def line_chart(run: TrainingRun, name: str, marks: bool = False) -> LineChart:
    """Return a chart of one metric, with the restarts of the run.

    Args:
        run: the run.
        name: the metric.
        marks: also show the checkpoints.
    """
    steps = [entry.step for entry in run.checkpoints if entry.error is None]
    last = run.steps or 0
    return LineChart(
        name,
        TITLES.get(name, name),
        [Line("", series(run.records, name))],
        numbers.unit_of(name),
        void=series(run.history.void, name),
        restarts=run.restarts,
        checkpoints=[step for step in steps if step <= last] if marks else (),
        logarithmic=is_loss(name) or name in (metrics.GRAD_NORM, metrics.LOSS_SCALE),
    )


def losses(run: TrainingRun) -> Section | None:
    """Return the section about the loss; None if there is none."""
    names = [name for name in run.own_names if is_loss(name)][:4]
    if not names:
        return None
    sentences = []
    for name in names[:2]:
        sentences += _course(run, name)
    if len(run.records) > 2 * MOST_GROUPS:
        sentences.append(
            f"For each group of about {len(run.records) / MOST_GROUPS:.0f} reports, the charts of "
            f"this page show the smallest and the largest value, so no extreme is lost."
        )
    if any(len(record.ranks) > 1 for record in run.records):
        sentences.append(
            "Lines are means over the ranks. Shaded areas reach to the smallest and largest value."
        )
    return Section("Loss", sentences, [line_chart(run, name, marks=True) for name in names])


def _course(run: TrainingRun, name: str) -> list[str]:
    """Return sentences on how a loss has changed."""
    points = series(run.records, name)
    good = finite(points)
    sentences = []
    if len(good) > 1:
        first, last = good[0], good[-1]
        best = min(good, key=lambda point: point.mean or 0.0)
        assert first.mean is not None
        assert last.mean is not None
        verb = "fell" if last.mean < first.mean else "rose"
        course = (
            f"is {short(first.mean)} at step {first.step:,} and again at step {last.step:,}"
            if last.mean == first.mean
            else f"{verb} from {short(first.mean)} at step {first.step:,} to {short(last.mean)} at "
            f"step {last.step:,}"
        )
        sentences.append(
            f"{name} {course}. Its smallest value is {short(best.mean)}, at step {best.step:,}."
        )
    bad = [point for point in points if point.nonfinite]
    if bad:
        affected = bad[0].nonfinite
        more = f" and {len(affected) - 8} more" if len(affected) > 8 else ""
        ranks = ", ".join(map(str, affected[:8])) + more
        noun = "rank" if len(affected) == 1 else "ranks"
        sentences.append(
            f"{name} is NaN or infinite in {len(bad):,} of {count(len(points), 'report')}, first "
            f"at step {bad[0].step:,} on {noun} {ranks}."
        )
    return sentences


def optimization(run: TrainingRun) -> Section | None:
    """Return the section about learning rate, gradients and loss scale; None without them."""
    names = (metrics.LR, metrics.GRAD_NORM, metrics.LOSS_SCALE)
    charts = [line_chart(run, name) for name in names if run.has(name)]
    sentences = []
    if lr := finite(series(run.records, metrics.LR)):
        low, high = (pick(lr, key=lambda p: p.mean or 0.0) for pick in (min, max))
        sentences.append(
            f"The learning rate is between {short(low.mean)} and {short(high.mean)}, and "
            f"{short(lr[-1].mean)} at the end."
            if low.mean != high.mean
            else f"The learning rate is {short(low.mean)} in all reports."
        )
    if norms := finite(series(run.records, metrics.GRAD_NORM)):
        largest = max(norms, key=lambda point: point.high or 0.0)
        middle = median(point.mean or 0.0 for point in norms)
        sentences.append(
            f"The gradient norm has the median {short(middle)}, and the largest value "
            f"{short(largest.high)} at step {largest.step:,}."
        )
    if bad := [p for p in series(run.records, metrics.GRAD_NORM) if p.nonfinite]:
        sentences.append(
            f"The gradient norm is NaN or infinite in {count(len(bad), 'report')}, first at step "
            f"{bad[0].step:,}."
        )
    if run.has(metrics.OVERFLOWS):
        number = int(total(run, metrics.OVERFLOWS))
        sentences.append(
            f"{count(number, 'sum')} did not fit into float16, and {_were(number)} repeated in "
            f"float32."
            if number
            else "No sum of gradients overflowed in float16."
        )
    if run.has(metrics.SKIPPED):
        number = int(total(run, metrics.SKIPPED))
        skipped = f"{count(number, 'step')} {_were(number)}" if number else "No step was"
        sentences.append(f"{skipped} skipped.")
    counters = (metrics.OVERFLOWS, metrics.SKIPPED)
    charts += [line_chart(run, name) for name in counters if total(run, name)]
    return Section("Learning rate and gradients", sentences, charts) if charts else None


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def total(run: TrainingRun, name: str) -> float:
    """Return the sum of a counter over all reports: in each, the largest value of a rank."""
    return sum(point.high or 0.0 for point in series(run.records, name))


def throughput(run: TrainingRun) -> Section | None:
    """Return the section about samples per second and the time of a step; None without them."""
    charts = [line_chart(run, name) for name in (metrics.SAMPLES, metrics.STEP) if run.has(name)]
    if not charts:
        return None
    sentences = []
    for name, what in ((metrics.SAMPLES, "throughput"), (metrics.STEP, "time per step")):
        points = finite(series(run.records, name))
        if not points:
            continue
        values = [point.mean or 0.0 for point in points]
        middle, low, high = (
            with_unit(value, numbers.unit_of(name))
            for value in (median(values), min(values), max(values))
        )
        sentences.append(
            f"The {what} has the median {middle}; the reports are between {low} and {high}."
        )
        third = len(values) // 3
        if name == metrics.SAMPLES and third >= 3:
            before, after = median(values[:third]), median(values[-third:])
            change = after / before - 1 if before else 0.0
            if abs(change) >= _NOTABLE_CHANGE:
                verb = "fell" if change < 0 else "rose"
                sentences.append(
                    f"It {verb} by {percent(abs(change))} from the first third of the run to the "
                    f"last third."
                )
    return Section("Throughput", sentences, charts)


def step_sections(run: TrainingRun) -> Section | None:
    """Return the section about where the time of a step goes; None if this was not measured."""
    records = [r for r in run.records if metrics.STEP in r.metrics and r.steps]
    # A section without any time was not measured, such as reading a batch in `fit` on TensorFlow.
    names = [n for n in metrics.SECTIONS if total(run, n) > 0]
    step = mean_per_step(records, metrics.STEP)
    if not names or not step:
        return None
    means = {name: mean_per_step(records, name) or 0.0 for name in names}
    rows: list[Sequence[Cell]] = [
        (SECTION_NAMES[name], Value(means[name], "s"), Value(means[name] / step, "ratio"),
         *_range(run, name))
        for name in names
    ]  # fmt: skip
    rest = max(step - sum(means.values()), 0.0)
    rows.append(("other", Value(rest, "s"), Value(rest / step, "ratio"), Value(None), Value(None)))
    rows.append(("step", Value(step, "s"), Value(1.0, "ratio"), *_range(run, metrics.STEP)))
    largest = max(names, key=lambda name: means[name])
    part = f"{percent(means[largest] / step)} of the time"
    if rest > means[largest]:
        sentences = [
            f"{percent(rest / step)} of the time is in no section, for example code of the script "
            f"between steps, or the tracing of a graph of TensorFlow. The largest section is "
            f"{SECTION_NAMES[largest]}: {part}, as the mean of all ranks."
        ]
    else:
        sentences = [
            f"The largest part of a step is {SECTION_NAMES[largest]}: {part}, as the mean of all "
            f"ranks."
        ]
    if metrics.DATA not in names:
        sentences.append(
            "The time to read batches was not measured apart. It is part of the other sections."
        )
    if metrics.COMMUNICATION in names:
        sentences.append(
            f"A rank waits {percent(means[metrics.COMMUNICATION] / step)} of the time in "
            f"collectives: for the network, and for slower ranks. The rest of the communication "
            f"overlaps with the backward pass."
        )
    if sum(means.values()) > step * (1 + _OVERLAP):
        sentences.append(
            f"The sections overlap: their sum is {percent(sum(means.values()) / step)} of a step."
        )
    if run.has(metrics.ALLOCATED):
        sentences.append(
            "On a GPU, these are times of the Python thread, which runs ahead of the GPU."
        )
    shown = reduced(series(records, metrics.STEP))
    by_step = {record.step: record for record in records}
    places = list(dict.fromkeys(point.step for point in shown))
    parts = {
        SECTION_NAMES[name]: [_mean(by_step[place].metrics.get(name)) for place in places]
        for name in names
    }
    chart = StackChart(
        "time-sections", "time per step by section, mean of the ranks", places, parts
    )
    head = ("section", "mean", "share", "fastest rank", "slowest rank")
    caption = "Per step. Fastest and slowest rank: the smallest and largest value in any report."
    return Section("Where the time goes", sentences, [chart], [Table(head, rows, caption)])


def _mean(statistic: object) -> float:
    return getattr(statistic, "mean", None) or 0.0


def _range(run: TrainingRun, name: str) -> tuple[Value, Value]:
    points = series(run.records, name)
    unit = numbers.unit_of(name)
    lows = [point.low for point in points if point.low is not None]
    highs = [point.high for point in points if point.high is not None]
    return Value(min(lows, default=None), unit), Value(max(highs, default=None), unit)


def communication(run: TrainingRun) -> Section | None:
    """Return the section about bytes and wire formats; None if bytes were not counted."""
    if not run.has(metrics.PAYLOAD):
        return None
    per_step = mean_per_step(run.records, metrics.PAYLOAD) or 0.0
    steps = sum(record.steps for record in run.records if metrics.PAYLOAD in record.metrics)
    formats = ", ".join(run.wire_formats)
    sentences = [
        f"Each rank gave {with_unit(per_step, 'B')} of encoded gradients to collectives per step, "
        f"and {with_unit(per_step * steps, 'B')} in all {count(steps, 'reported step')}.",
        f"The wire format is {formats}." if formats else "The wire format was not recorded.",
    ]
    ranks = max((len(record.ranks) for record in run.records), default=1)
    if ranks > 1:
        factor = 2 * (ranks - 1) / ranks
        times = "as many bytes" if ranks == 2 else f"{factor:.3g} times as many bytes"
        sentences.append(
            f"In a ring over {ranks} ranks, each rank sends {times} over the network. Ranks of one "
            f"host may use shared memory instead."
        )
    charts = [line_chart(run, metrics.PAYLOAD)]
    if run.has(metrics.COMMUNICATION):
        charts.append(line_chart(run, metrics.COMMUNICATION))
    return Section("Communication", sentences, charts)


def own_values(run: TrainingRun) -> Section | None:
    """Return the section about the user's metrics that are not losses; None without any."""
    names = [name for name in run.own_names if not is_loss(name)]
    names += [name for name in run.own_names if is_loss(name)][4:]
    if not names:
        return None
    sentences = []
    if len(names) > _MOST_OWN_CHARTS:
        sentences.append(
            f"{_MOST_OWN_CHARTS} of {len(names)} metrics have a chart. All are in the table at the "
            f"end."
        )
    charts = [line_chart(run, name) for name in names[:_MOST_OWN_CHARTS]]
    return Section("Further values of the script", sentences, charts)


def memory(run: TrainingRun) -> Section | None:
    """Return the section about memory and the GPU; None if this was not measured."""
    names = (metrics.RSS, metrics.ALLOCATED, metrics.PEAK_ALLOCATED, metrics.GPU)
    charts = [line_chart(run, name) for name in names if run.has(name)]
    if not charts:
        return None
    sentences = []
    for name, what in ((metrics.RSS, "A process"), (metrics.PEAK_ALLOCATED, "A GPU")):
        points = [point for point in series(run.records, name) if point.high is not None]
        if points:
            most = max(points, key=lambda point: point.high or 0.0)
            sentences.append(f"{what} needed at most {with_unit(most.high, 'B')}.")
    return Section("Memory", sentences, charts)


def all_metrics(run: TrainingRun) -> Section | None:
    """Return the table of all metrics; None without records."""
    names = [*run.own_names, *(name for name in metrics.METRICS if run.has(name))]
    if not names:
        return None
    rows: list[Sequence[Cell]] = []
    for name in names:
        unit = numbers.unit_of(name)
        points = series(run.records, name)
        means = [point.mean for point in points]
        low, high = _range(run, name)
        bad = sum(bool(point.nonfinite) for point in points)
        rows.append((name, Value(means[0], unit), Value(means[-1], unit), low, high, Value(bad)))
    head = ("metric", "first", "last", "smallest", "largest", "reports with NaN")
    caption = "First and last are means over the ranks; smallest and largest are of any rank."
    return Section("All metrics", (), (), [Table(head, rows, caption)])


#: The sections about metrics, in the order of the page. `hvdkit.report.single` adds the sections of
#: `ranks` and `reliability`.
METRIC_SECTIONS: Sequence[Callable[[TrainingRun], Section | None]] = (
    losses,
    optimization,
    throughput,
    step_sections,
    communication,
)
