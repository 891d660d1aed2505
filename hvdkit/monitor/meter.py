"""`Meter`: measure the steps of this rank between two reports."""

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvdkit.errors import UsageError
from hvdkit.monitor import metrics
from hvdkit.monitor.exchange import Contribution
from hvdkit.monitor.framework import Framework
from hvdkit.monitor.machine import measure_machine
from hvdkit.runtime.counters import counters
from hvdkit.training import stragglers

_Batch = TypeVar("_Batch")

_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,100}")

# Metric -> the section of `hvdkit.training.stragglers`.
_SECTIONS = {
    metrics.FORWARD: stragglers.FORWARD,
    metrics.BACKWARD: stragglers.BACKWARD,
    metrics.COMMUNICATION: stragglers.WAIT,
    metrics.UPDATE: stragglers.UPDATE,
}


@dataclass
class _Interval:
    """The steps since the last report.

    Attributes:
        began: the time at which the interval began, by `time.perf_counter`.
        sections: `Framework.section_seconds` at the beginning of the interval.
        totals: the counters at the beginning of the interval.
        steps: the number of steps.
        samples: the number of samples.
        values: name -> the logged values.
        data_seconds: the seconds that `batches` waited for data.
        other_seconds: the seconds between a step and the next call of `batches`, such as in a
            validation, with checkpoints.
        paused_seconds: the seconds in `paused`.
    """

    began: float
    sections: Mapping[str, float]
    totals: Mapping[str, float]
    steps: int = 0
    samples: int = 0
    values: dict[str, list[Any]] = field(default_factory=dict)
    data_seconds: float = 0.0
    other_seconds: float = 0.0
    paused_seconds: float = 0.0


class Meter:
    """Measure the steps of this rank. No method is a collective."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        # The seconds of the section `FORWARD` at the last batch of `batches` (infinite before the
        # first one), and those up to which the sections of the last step are counted.
        self._batch_at, self._counted = float("inf"), 0.0
        self.restart()

    def restart(self) -> None:
        """Begin an interval, without the steps and values of the last one."""
        totals = {metrics.CHECKPOINT: counters.checkpoint_seconds, **self.framework.totals()}
        sections = self.framework.section_seconds()
        self._interval = _Interval(time.perf_counter(), sections, totals)

    @property
    def names(self) -> list[str]:
        """The names of the values that have been logged in this interval."""
        return list(self._interval.values)

    def batches(self, data: Iterable[_Batch]) -> Iterator[_Batch]:
        """Iterate over `data`, and measure the time spent waiting for each batch: `time/data`."""
        iterator = iter(data)
        while True:
            self._count_other()
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._interval.data_seconds += time.perf_counter() - began
                if self.framework.forward_began() is not None:
                    self._counted = self._forward_seconds()
            self._batch_at = self._counted
            yield batch

    def log(self, values: Mapping[str, Any], samples: int) -> None:
        """Add values and samples to the current step; see `BaseMonitor.log`."""
        for name, value in values.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UsageError(
                    f"a metric has the name {name!r}: expected a string of 1 to 100 characters, "
                    f"without control characters such as a line break"
                )
            if name.startswith(metrics.RESERVED):
                raise UsageError(
                    f"a metric has the name {name!r}, but Monitor measures metrics with this "
                    f"prefix itself: choose another name"
                )
            scalar = self.framework.scalar(value)
            self._interval.values.setdefault(name, []).append(scalar)
        self._interval.samples += int(samples)

    def add_steps(self, steps: int) -> None:
        """Count steps that have ended."""
        self._interval.steps += steps

    def add_data_time(self, seconds: float) -> None:
        """Add seconds of waiting for data."""
        self._interval.data_seconds += seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context from the interval."""
        began = time.perf_counter()
        self.framework.pause()
        try:
            yield
        finally:
            self.framework.resume()
            self._interval.paused_seconds += time.perf_counter() - began

    def end_interval(self, step: int) -> Contribution:
        """Return this rank's part of a report at `step`, and begin the next interval."""
        # The measurement may wait for the device. The time of this wait belongs to the next
        # interval.
        self._count_other()
        ended = self._interval
        self.restart()
        return Contribution(step, ended.steps, ended.samples, self._measure(ended))

    def _forward_seconds(self) -> float:
        return self.framework.section_seconds().get(stragglers.FORWARD, 0.0)

    def _count_other(self) -> None:
        """Count the time from the end of the last step until now, if it was that of a batch."""
        began = self.framework.forward_began()
        if began is not None and began >= self._batch_at:
            now = self._forward_seconds()
            self._interval.other_seconds += now - max(began, self._counted)
            self._counted = now

    def _measure(self, interval: _Interval) -> dict[str, float]:
        """Return this rank's metrics of an interval, which has just ended."""
        values: dict[str, float] = {}
        if interval.steps:
            values |= self._measure_steps(interval)
        names = list(interval.values)
        scalars = [value for name in names for value in interval.values[name]]
        numbers = iter(self.framework.numbers(scalars))
        for name in names:
            found = [next(numbers) for _ in interval.values[name]]
            values[name] = sum(found) / len(found)
        return values

    def _measure_steps(self, interval: _Interval) -> dict[str, float]:
        steps, following = interval.steps, self._interval
        seconds = following.began - interval.began - interval.paused_seconds
        counted = following.totals
        before = interval.totals
        spent = {name: max(counted[name] - before.get(name, 0.0), 0.0) for name in counted}
        values = {
            **measure_machine(self.framework.gpu()),
            **self.framework.gauges(),
            metrics.STEP: seconds / steps,
            metrics.DATA: interval.data_seconds / steps,
        }
        for name in (metrics.CHECKPOINT, metrics.PAYLOAD):
            if name in spent:
                values[name] = spent[name] / steps
        for name in (metrics.OVERFLOWS, metrics.SKIPPED):
            if name in spent:
                values[name] = spent[name]
        if interval.samples and seconds > 0:
            values[metrics.SAMPLES_OF_RANK] = interval.samples / seconds
        sections = following.sections
        for name, section in _SECTIONS.items():
            if section in sections:
                spent_in = sections[section] - interval.sections.get(section, 0.0)
                values[name] = max(spent_in, 0.0) / steps
        if metrics.FORWARD in values:
            # The forward section begins at the end of a step, so it contains the times in which the
            # loop reads data, saves a checkpoint, and does other things.
            forward, data = values[metrics.FORWARD], values[metrics.DATA]
            other = max(interval.other_seconds / steps, values[metrics.CHECKPOINT])
            values[metrics.FORWARD] = max(forward - data - other, 0.0)
            if interval.other_seconds:
                values[metrics.OTHER] = other - values[metrics.CHECKPOINT]
        return values
