"""The section of a report about the ranks: which one is slow, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from hvdkit.monitor import Record, metrics
from hvdkit.report.charts import MOST_BARS, BarChart
from hvdkit.report.document import Cell, Section, Table, Value
from hvdkit.report.numbers import percent
from hvdkit.report.sections import SECTION_NAMES
from hvdkit.report.training_run import TrainingRun

#: A rank is not named for a smaller part of the time: among equal ranks, chance decides which rank
#: is the slowest.
_NOTABLE_SHARE = 0.02


@dataclass(frozen=True)
class SlowRanks:
    """Which ranks were the slowest.

    Attributes:
        reports: the number of reports that name a slowest rank.
        counts: rank -> the number of reports in which it was the slowest.
        sections: rank -> the section in which the rank exceeded the median most, in most of these
            reports.
        share: the time by which the slowest ranks exceeded the median rank, divided by the time of
            all reported steps.
    """

    reports: int
    counts: Mapping[int, int]
    sections: Mapping[int, str]
    share: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> SlowRanks | None:
        """Return the slowest ranks; None if no report of several ranks names one."""
        counts: Counter[int] = Counter()
        sections: dict[int, Counter[str]] = {}
        excess = seconds = 0.0
        for record in records:
            slowest, step = record.slowest, record.metrics.get(metrics.STEP)
            if slowest is None or len(record.ranks) < 2 or step is None or step.mean is None:
                continue
            counts[slowest.rank] += 1
            sections.setdefault(slowest.rank, Counter())[slowest.section] += 1
            excess += record.steps * (slowest.seconds - slowest.median)
            seconds += record.steps * step.mean
        if not counts or not seconds:
            return None
        named = {rank: found.most_common(1)[0][0] for rank, found in sections.items()}
        return cls(counts.total(), counts, named, excess / seconds)

    @property
    def sentence(self) -> str:
        """The conclusion."""
        rank, times = max(self.counts.items(), key=lambda item: item[1])
        section = SECTION_NAMES.get(self.sections[rank], self.sections[rank])
        took = (
            f"On average, the slowest rank of a report took longer than the median rank, by "
            f"{percent(self.share)} of the time of a step"
        )
        if self.share < _NOTABLE_SHARE:
            return f"No rank was much slower than the others. {took}."
        if times * 2 >= self.reports:
            return (
                f"Rank {rank} was the slowest in {percent(times / self.reports)} of the reports, "
                f"mostly because of {section}. {took}, and the other ranks waited for it."
            )
        return (
            f"The slowest rank changed: most often it was rank {rank}, in "
            f"{percent(times / self.reports)} of the reports, mostly because of {section}. {took}."
        )


def ranks(run: TrainingRun) -> Section | None:
    """Return the section about the ranks; None for a run of one rank, or without times."""
    found = SlowRanks.of(run.records)
    if found is None:
        return None
    sentences = [found.sentence]
    # After a restart on other hosts, a rank may be another process on another host.
    if len({len(part.ranks) for part in run.parts}) > 1:
        sentences.append(
            "The number of ranks has changed, so a rank may have been different processes."
        )
    times = {name: _by_rank(run.records, name) for name in (*metrics.SECTIONS, metrics.STEP)}
    numbers = sorted({rank for values in times.values() for rank in values})
    rows: list[Sequence[Cell]] = []
    for rank in numbers or sorted(found.counts):
        own = _own_times(run.records, rank)
        rows.append(
            (
                f"rank {rank}",
                Value(fmean(own) if own else None, "s"),
                Value(min(own, default=None), "s"),
                Value(max(own, default=None), "s"),
                Value(_mean(times[metrics.COMMUNICATION].get(rank)), "s"),
                Value(found.counts.get(rank, 0) / found.reports, "ratio"),
            )
        )
    head = ("", "own time, mean", "smallest", "largest", "exposed communication", "slowest in")
    caption = "Per step. The own time is a step without exposed communication."
    table = Table(head, rows, caption)
    if not numbers:
        sentences.append(
            "The file has no values of each rank, because the job has more than 64 ranks."
        )
        return Section("Ranks", sentences, (), [table])
    if len(numbers) > MOST_BARS:
        sentences.append(f"The chart has the first {MOST_BARS} ranks.")
    shown = numbers[:MOST_BARS]
    parts = {
        SECTION_NAMES[name]: [_mean(times[name].get(rank)) or 0.0 for rank in shown]
        for name in metrics.SECTIONS
        if times[name]
    }
    chart = BarChart(
        "ranks", "time per step of each rank", [f"rank {rank}" for rank in shown], parts
    )
    return Section("Ranks", sentences, [chart], [table])


def _by_rank(records: Sequence[Record], name: str) -> dict[int, list[float]]:
    """Return rank -> its values of a metric, one for each report."""
    found: dict[int, list[float]] = {}
    for record in records:
        if name in record.metrics and record.steps:
            for rank, value in record.metrics[name].by_rank.items():
                if isfinite(value):
                    found.setdefault(rank, []).append(value)
    return found


def _own_times(records: Sequence[Record], rank: int) -> list[float]:
    """Return a rank's time per step without communication, of each report."""
    own = [name for name in metrics.SECTIONS if name != metrics.COMMUNICATION]
    found = []
    for record in records:
        values = [
            record.metrics[name].by_rank[rank]
            for name in own
            if name in record.metrics and rank in record.metrics[name].by_rank
        ]
        if values and record.steps:
            found.append(sum(values))
    return found


def _mean(values: Sequence[float] | None) -> float | None:
    return fmean(values) if values else None
