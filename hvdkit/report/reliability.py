"""The sections of a report about checkpoints, starts, restarts and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdkit.monitor import metrics
from hvdkit.report.document import Cell, Section, Table, Value
from hvdkit.report.numbers import UNKNOWN, count, duration, moment, percent, short, times
from hvdkit.report.series import mean_per_step
from hvdkit.report.training_run import LONGEST_EXPLANATION, StartFolder, TrainingRun

#: The most starts whose explanation is on the page.
_MOST_EXPLANATIONS = 10


def checkpoints(run: TrainingRun) -> Section | None:
    """Return the section about checkpoints; None if the run has none and spent no time on them."""
    step = mean_per_step(run.records, metrics.STEP)
    spent = mean_per_step(run.records, metrics.CHECKPOINT, of_slowest=True)
    if not run.checkpoint_folder and not spent:
        return None
    sentences = []
    good = [entry for entry in run.checkpoints if entry.error is None]
    if good:
        newest = good[-1]
        after = max((run.steps or newest.step) - newest.step, 0)
        rest = (
            f"{count(after, 'later step')} {'was' if after == 1 else 'were'} reported"
            if after
            else "no later step was reported"
        )
        sentences.append(
            f"There {'is' if len(good) == 1 else 'are'} {count(len(good), 'checkpoint')}. The "
            f"newest one is of step {newest.step:,}; {rest}."
        )
        sentences.append("Older checkpoints may have been deleted.")
    elif run.checkpoint_folder:
        sentences.append(f"There is no complete checkpoint in {run.checkpoint_folder}.")
    if spent is not None and step:
        sentences.append(
            f"The rank with the longest time in the checkpointer spends {percent(spent / step)} of "
            f"the time there, without waiting for other ranks."
        )
    rows: list[Sequence[Cell]] = []
    for entry in run.checkpoints:
        made = entry.manifest
        values = [] if made is None else [f"{k} {short(v)}" for k, v in made.metrics.items()]
        rows.append(
            (
                f"step {entry.step:,}",
                UNKNOWN if made is None or made.epoch is None else str(made.epoch),
                Value(float(entry.size), "B"),
                UNKNOWN if made is None else moment(made.time),
                UNKNOWN if made is None else str(made.world_size),
                ", ".join(values) or UNKNOWN,
                "complete" if entry.error is None else f"not good: {entry.error}",
            )
        )
    head = ("", "epoch", "size", "saved", "ranks", "metrics", "state")
    return Section("Checkpoints", sentences, (), [Table(head, rows)] if rows else ())


def starts(run: TrainingRun) -> Section | None:
    """Return the section about starts, restarts and failures; None if nothing is known."""
    if not run.starts and not run.restarts:
        return None
    sentences = [*_conclusion(run), *_repeated(run)]
    rows: list[Sequence[Cell]] = []
    texts: dict[str, str] = {}
    for number, each in enumerate(run.starts, 1):
        start = each.start
        took = None if start is None or start.ended is None else start.ended - start.began
        first = _resumed_at(run, number - 1)
        rows.append(
            (
                f"start {number}",
                moment(each.began),
                UNKNOWN if took is None else duration(took),
                str(each.ranks),
                UNKNOWN if start is None else _hosts(start.hosts),
                UNKNOWN if first is None else f"{first:,}",
                each.end,
            )
        )
        if each.explanation and len(texts) < _MOST_EXPLANATIONS:
            text = each.explanation
            if len(text) > LONGEST_EXPLANATION:
                text = f"{text[:LONGEST_EXPLANATION]}\n… (see hvdkit why {each.path})"
            texts[f"hvdkit why {each.path.name}, of start {number}"] = text
    explained = sum(bool(each.explanation) for each in run.starts)
    if explained > len(texts):
        sentences.append(f"The page explains the first {len(texts)} of {explained} failures.")
    head = ("", "began", "time", "ranks", "hosts", "first step", "end")
    return Section("Starts and failures", sentences, (), [Table(head, rows)] if rows else (), texts)


def _conclusion(run: TrainingRun) -> list[str]:
    if not run.starts:
        return [
            f"The run has resumed {times(len(run.restarts))}. The launcher's records are "
            f"missing, so the page does not show why."
        ]
    failures = [each for each in run.starts if each.failed]
    text = f"The job was started {times(len(run.starts))}"
    if not failures:
        return [f"{text}, and no start failed by itself."]
    sentences = [f"{text}, and {count(len(failures), 'start')} failed."]
    ends: dict[str, list[int]] = {}
    for number, each in enumerate(run.starts, 1):
        if each.failed:
            ends.setdefault(each.end, []).append(number)
    for end, places in sorted(ends.items(), key=lambda item: -len(item[1]))[:3]:
        shown = ", ".join(map(str, places[:6])) + (", …" if len(places) > 6 else "")
        sentences.append(f"Start{'' if len(places) == 1 else 's'} {shown}: {end}")
    return sentences


def _repeated(run: TrainingRun) -> list[str]:
    """Return a sentence about the steps that were made twice."""
    void = run.history.void
    if not void:
        return []
    steps = sum(record.steps for record in void)
    seconds = sum(
        record.steps * (record.metrics[metrics.STEP].mean or 0.0)
        for record in void
        if metrics.STEP in record.metrics
    )
    return [
        f"{count(len(void), 'report')} of {count(steps, 'step')} ({duration(seconds)} of training) "
        f"are void, because the run has resumed at an earlier checkpoint and made these steps "
        f"again. The other sections do not count them."
    ]


def _resumed_at(run: TrainingRun, place: int) -> int | None:
    """Return the step at which a start began; None if it has not reported any step."""
    begin = run.starts[place].began
    end = run.starts[place + 1].began if place + 1 < len(run.starts) else float("inf")
    steps = [part.step for part in run.parts if begin <= part.time < end]
    return steps[0] if steps else None


def _hosts(hosts: Mapping[str, int]) -> str:
    names = list(hosts)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def state(run: TrainingRun) -> str:
    """Return whether the run has ended, and how, in a sentence."""
    if not run.starts:
        if not run.records:
            return "It is unknown whether the job runs: the launcher's records are missing."
        last = moment(run.records[-1].time)
        return f"The last report is of {last}. The launcher's records are missing."
    last_start: StartFolder = run.starts[-1]
    end = last_start.end
    if last_start.start is not None and last_start.start.running:
        return "The job still runs: this page has what was recorded until now."
    if end == "succeeded":
        return "The job succeeded."
    return f"The last start: {end}"
