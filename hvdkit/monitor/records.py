"""Records: the metrics of all ranks for the steps since the previous record."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hvdkit.monitor import metrics


@dataclass(frozen=True)
class Statistic:
    """A metric of several ranks.

    Mean, minimum and maximum are those of the finite values; None if there is no finite value.

    Attributes:
        mean: the mean over the ranks.
        min: the smallest value.
        max: the largest value.
        by_rank: rank -> value, of the ranks that have the metric.
    """

    mean: float | None
    min: float | None
    max: float | None
    by_rank: Mapping[int, float]

    @classmethod
    def of(cls, by_rank: Mapping[int, float]) -> "Statistic":
        """Return the statistic of some values."""
        finite = [value for value in by_rank.values() if math.isfinite(value)]
        if not finite:
            return cls(None, None, None, by_rank)
        return cls(fmean(finite), min(finite), max(finite), by_rank)

    @property
    def nonfinite(self) -> list[int]:
        """The ranks whose value is NaN or infinite."""
        return [rank for rank, value in self.by_rank.items() if not math.isfinite(value)]

    @property
    def shown(self) -> float:
        """The mean, or NaN if a value is not finite, so that nobody overlooks it."""
        return math.nan if self.mean is None or self.nonfinite else self.mean


@dataclass(frozen=True)
class Slowest:
    """The rank with the largest own time.

    The own time of a rank is its time per step without communication.

    Attributes:
        rank: the rank.
        seconds: the own time of this rank.
        median: the median of the own times of all ranks, in seconds.
        section: the section in which this rank exceeds the median of the ranks most, such as
            `time/data`.
    """

    rank: int
    seconds: float
    median: float
    section: str

    @classmethod
    def of(cls, values: Mapping[str, Mapping[int, float]]) -> "Slowest | None":
        """Return the slowest rank; None if no rank has a time of a section.

        Args:
            values: metric -> rank -> value.
        """
        own_sections = [s for s in metrics.SECTIONS if s != metrics.COMMUNICATION and s in values]
        ranks = sorted({rank for section in own_sections for rank in values[section]})
        if not ranks:
            return None
        own = {r: sum(values[section].get(r, 0.0) for section in own_sections) for r in ranks}
        rank = max(ranks, key=lambda each: own[each])

        def excess(section: str) -> float:
            usual = median(values[section].get(r, 0.0) for r in ranks)
            return values[section].get(rank, 0.0) - usual

        return cls(rank, own[rank], median(own.values()), max(own_sections, key=excess))


@dataclass(frozen=True)
class Record:
    """One record: the metrics of some steps.

    Attributes:
        step: the number of steps since the beginning of the run, including those before a resume.
        steps: the number of steps that the record covers. 0: values that were logged after the last
            step, such as those of a validation.
        time: seconds since the epoch, by the first rank's clock.
        samples: the number of samples of all ranks in these steps; 0 if unknown.
        ranks: the ranks that made the steps. The others are in `hvd.join()`.
        metrics: name -> statistic.
        slowest: the slowest rank; None if unknown.
    """

    step: int
    steps: int
    time: float
    samples: int
    ranks: Sequence[int]
    metrics: Mapping[str, Statistic]
    slowest: Slowest | None = None


@dataclass(frozen=True)
class Run:
    """A part of a training run: from its start or a restart to the next restart.

    Attributes:
        step: the number of steps before this part. Records of later steps that were written before
            this part are void.
        time: seconds since the epoch.
        ranks: the ranks of the job.
        every: steps per record.
        framework: name and version, such as "torch 2.13.0".
        wire_formats: the names of the wire formats that the first rank has used, such as "fp16".
        host: the hostname of the first rank; "" if unknown.
        hvdkit: the version of hvdkit; "" if unknown.
    """

    step: int
    time: float
    ranks: Sequence[int]
    every: int
    framework: str
    wire_formats: Sequence[str] = ()
    host: str = ""
    hvdkit: str = ""


def scalars(record: Record) -> Mapping[str, float]:
    """Return the numbers of a record for loggers that know only names and numbers."""
    numbers: dict[str, float] = {}
    for name, statistic in record.metrics.items():
        numbers[name] = statistic.shown
        if statistic.min is None or statistic.max is None:
            continue
        if statistic.min != statistic.max or statistic.nonfinite:
            numbers |= {f"{name}_min": statistic.min, f"{name}_max": statistic.max}
    if record.slowest is not None and len(record.ranks) > 1:
        numbers["slowest_rank"] = float(record.slowest.rank)
    return numbers
