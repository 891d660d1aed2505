"""`BaseMonitor`: measure steps on every rank, and report them every few steps.

A report is one small sum over the ranks. The sum begins at the end of a step, runs while the next
step is computed, and is read at the end of the next step. So no rank waits for the sum, and the
record of a step appears one step later.

No decision about a collective depends on data of one rank: reports are due after a number of calls
of `step`, which every rank makes equally often. If a rank has a metric for the first time, a flag
in the sum tells all ranks. All ranks then exchange the names of their metrics and repeat the sum.
Once the loggers are open, all collectives of a monitor are sums, because a rank in `hvd.join()`
takes part in a sum without a call.
"""

import contextlib
import logging
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import hvdkit
from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.agreement.waiting import warning_while_waiting
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.monitor import metrics
from hvdkit.monitor.delivery import Delivery
from hvdkit.monitor.exchange import (
    Contribution,
    Decoded,
    decode,
    encode,
    exchange_names,
    is_complete,
)
from hvdkit.monitor.loggers.console import ConsoleLogger
from hvdkit.monitor.loggers.logger import Logger
from hvdkit.monitor.machine import Machine
from hvdkit.monitor.records import Record, Run, Slowest, Statistic
from hvdkit.runtime.counters import counters
from hvdkit.training import stragglers

_Batch = TypeVar("_Batch")

_log = logging.getLogger("hvdkit.monitor")

# More names than this are a mistake, such as a name with a number in it.
_MAX_NAMES = 500
_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,100}")

# The number of the last monitor, the same on all ranks.
_last = 0

# The monitors of this process that are open.
_open: "weakref.WeakSet[BaseMonitor]" = weakref.WeakSet()


def complete_started_reports() -> None:
    """Wait for the reports that this rank has started, before it calls `join`. Not a collective.

    Horovod counts a rank in `join` as ready for each tensor. So a rank that calls `join` must have
    no collective of its own in flight. The other ranks have started the same reports, because they
    have made the same step.
    """
    for monitor in list(_open):
        monitor.complete_started()


class Framework(Protocol):
    """The parts of a framework's adapter that a monitor needs."""

    @property
    def name(self) -> str:
        """Name and version, such as "torch 2.13.0"."""
        ...

    def scalar(self, value: Any) -> Any:
        """Return a value of the user as a number, or as a scalar of the framework.

        Does not wait for a device.

        Raises:
            UsageError: the value is not a number.
        """
        ...

    def numbers(self, values: Sequence[Any]) -> list[float]:
        """Return results of `scalar` as floats. Waits for the device."""
        ...

    def section_seconds(self) -> Mapping[str, float]:
        """Return section of `hvdkit.training.stragglers` -> seconds spent in it so far."""
        ...

    def forward_began(self) -> float | None:
        """Return the seconds of the section `FORWARD` when a step or a backward pass ended last.

        It is -inf if there was none, and None if the framework cannot tell.
        """
        ...

    def pause(self) -> None:
        """Stop counting sections."""
        ...

    def resume(self) -> None:
        """Count sections again."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Return name of a further counter -> its value so far."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Return metric -> its current value, such as the learning rate."""
        ...

    def gpu(self) -> str | None:
        """Return the UUID of this rank's GPU, such as "GPU-2b34…"; None if it uses none."""
        ...


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
    steps: int
    samples: int
    values: dict[str, list[Any]]
    data_seconds: float = 0.0
    other_seconds: float = 0.0
    paused_seconds: float = 0.0


@dataclass(frozen=True)
class _Pending:
    """A report that has been started.

    Attributes:
        own: this rank's part.
        result: a function that waits for the sum and returns it.
    """

    own: Contribution
    result: Callable[[], list[int]]


def _checked(loggers: Any, every: Any) -> list[Logger]:
    """Return the loggers, after a check of the arguments of a monitor.

    Raises:
        UsageError: an argument is invalid.
    """
    chosen = [ConsoleLogger()] if loggers is None else loggers
    is_list = isinstance(chosen, Sequence)
    if not is_list or not all(isinstance(each, Logger) for each in chosen):
        raise UsageError(
            f"loggers is {loggers!r}: expected a list of loggers of hvdkit.monitor, such as "
            f"[JSONLLogger('metrics.jsonl')]"
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every is {every!r}: expected a whole number >= 1")
    return list(chosen)


class BaseMonitor:
    """Measure the steps of a training loop; see `Monitor` of each adapter."""

    def __init__(
        self,
        collectives: Collectives,
        framework: Framework,
        loggers: Sequence[Logger] | None,
        every: int,
    ) -> None:
        self._steps = 0
        self._collectives = collectives
        self._loggers = self._compare_arguments(loggers, every)
        self._framework = framework
        self._every = every
        self._machine = Machine()
        self._delivery: Delivery | None = None
        self._generation: int | None = None
        self._names: list[str] = sorted(metrics.METRICS)
        self._until = every
        self._pending: _Pending | None = None
        self._written: int | None = None
        self._closed = False
        # The seconds of the section `FORWARD` at the last batch of `batches` (infinite before the
        # first one), and those up to which the sections of the last step are counted.
        self._batch_at, self._counted = float("inf"), 0.0
        self._open_loggers()
        self._interval = self._new_interval()
        _open.add(self)

    # --- the loop ---------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of steps since the beginning of the run.

        Set it after a resume, on every rank. The next record then begins at this step, and replaces
        the records of later steps that were written before the resume.
        """
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        self._interval = self._new_interval()

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
                if self._framework.forward_began() is not None:
                    self._counted = self._forward_seconds()
            self._batch_at = self._counted
            yield batch

    def log(self, values: Mapping[str, Any], samples: int = 0) -> None:
        """Add values to the current step. Not a collective.

        For a report, each rank takes the mean of the values that it logged since the last report.
        The record has the mean, the minimum and the maximum of these means, over the ranks that
        logged the name.

        Args:
            values: name -> a number, or a tensor with one element. Tensors are read in the next
                report.
            samples: the number of samples that this rank has trained since the last call.

        Raises:
            UsageError: a name or a value is invalid.
        """
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
            scalar = self._framework.scalar(value)
            self._interval.values.setdefault(name, []).append(scalar)
        self._interval.samples += int(samples)

    def step(self, values: Mapping[str, Any] | None = None, samples: int = 0) -> None:
        """End a step: call it on every rank, once after each step of the optimizer. A collective.

        Args:
            values: see `log`.
            samples: see `log`.

        Raises:
            UsageError: see `log`.
            HorovodInternalError: a rank has failed.
        """
        try:
            if values or samples:
                self.log(values or {}, samples)
        finally:
            # Also after an error of this rank, because the other ranks count this step.
            self.advance(1)

    def advance(self, steps: int) -> None:
        """End several steps at once. A collective, see `step`."""
        if self._closed:
            raise UsageError("step() was called after close(): make another Monitor")
        self._begin_generation()
        self._finish()
        self._steps += steps
        self._interval.steps += steps
        self._until -= steps
        if self._until <= 0:
            self._until = self._every
            self._start()

    def reports_after(self, steps: int) -> bool:
        """Return whether a report is due within the next `steps` steps."""
        until = self._until
        if self._collectives.generation != self._generation:  # `advance` will change it to this
            until = self._every - self._steps % self._every
        return not self._closed and until <= steps

    def add_data_time(self, seconds: float) -> None:
        """Add seconds of waiting for data, for a loop that does not use `batches`."""
        self._interval.data_seconds += seconds

    def flush(self) -> None:
        """Report now, for example after a validation. A collective: every rank calls it."""
        self._begin_generation()
        self._finish()
        self._start()
        self._finish()
        self._until = self._every

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context, such as a validation, from the metrics."""
        began = time.perf_counter()
        self._framework.pause()
        try:
            yield
        finally:
            self._framework.resume()
            self._interval.paused_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Report the last steps, and close the loggers. A collective: every rank calls it."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the loggers without a last report, after an error. Not a collective."""
        self._closed = True
        self._pending = None
        _open.discard(self)
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception on this rank only, the other ranks are not in `close`.
        if kind is None:
            self.close()
        else:
            self.abandon()

    # --- reports ----------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        return self._collectives.rank == self._collectives.ranks[0]

    @property
    def _place(self) -> int:
        return list(self._collectives.ranks).index(self._collectives.rank)

    def _compare_arguments(self, loggers: Any, every: Any) -> list[Logger]:
        """Return the loggers. Check that all ranks make the same monitor. A collective.

        Raises:
            UsageError: an argument of this rank is invalid.
            RankMismatchError: on every other rank in this case; on every rank, if the arguments of
                the ranks differ.
        """
        global _last

        def prepare() -> tuple[list[Logger], list[str]]:
            own = _checked(loggers, every)
            # Settings of loggers may differ between ranks, such as a folder with the time in its
            # name.
            return own, [f"every: {every}", *(f"logger: {type(each).__name__}" for each in own)]

        with self._warning_while_waiting("Monitor()"):
            own = prepare_on_all_ranks(
                self._collectives,
                prepare,
                "the arguments of Monitor",
                "Every rank must make the same Monitor, because its reports are collectives. Only "
                "the first rank opens the loggers.",
            )
        # In an elastic job, new ranks have made fewer monitors.
        (last,) = self._collectives.max([_last], "hvdkit.monitor.number")
        _last = last + 1
        self._name = f"hvdkit.monitor.{_last}"
        self._collectives.describe(self._name, "a report of hvd.Monitor")
        return own

    def _open_loggers(self) -> None:
        """Open the loggers on the first rank. A collective.

        Raises:
            HvdkitError: on every rank, if a logger cannot be opened.
        """
        problem = b""
        opened: list[Logger] = []
        if self._is_first:
            try:
                for logger in self._loggers:
                    logger.open()
                    opened.append(logger)
            except Exception as error:
                text = f"{type(self._loggers[len(opened)]).__name__} cannot be opened: {error}"
                problem = text.encode(errors="replace")
        first = self._collectives.ranks[0]
        problem = self._collectives.broadcast(problem, first, f"{self._name}.open")
        if problem:
            for logger in opened:
                with contextlib.suppress(Exception):
                    logger.close()
            raise HvdkitError(problem.decode(errors="replace"))
        if self._is_first and self._loggers:
            self._delivery = Delivery(self._loggers)
            # A script may end without close().
            weakref.finalize(self, self._delivery.close)

    def _begin_generation(self) -> None:
        """Compare the positions of the ranks after `init` and after `join`. A collective then.

        Raises:
            UsageError, HvdkitError: on every rank, see `_exchange_names` and `_open_loggers`.
        """
        generation = self._collectives.generation
        if generation == self._generation:
            return
        self._finish_earlier()
        self._generation = generation
        ranks = list(self._collectives.ranks)
        own = [0] * len(ranks)
        own[self._place] = self.steps
        # In an elastic job, another rank may have become the first.
        has_to_open = bool(self._loggers) and self._is_first and self._delivery is None
        with self._warning_while_waiting("Monitor.step()"):
            summed = self._collectives.sum([*own, int(has_to_open)], f"{self._name}.steps")
        # New ranks of an elastic job begin with 0, and a rank that was in `join` made fewer steps.
        self._steps = max(summed[:-1])
        self._until = self._every - self._steps % self._every
        if summed[-1]:
            self._open_loggers()
        self._names = sorted(metrics.METRICS)
        self._exchange_names(self._interval.values)

    def _exchange_names(self, own: Iterable[str]) -> None:
        """Give a slot to each metric of each rank. A collective.

        Raises:
            UsageError: on every rank, if there are too many names.
        """
        added = exchange_names(
            self._collectives, sorted(set(own) - set(self._names)), f"{self._name}.names"
        )
        self._names = sorted({*self._names, *added})
        if len(self._names) > _MAX_NAMES:
            raise UsageError(
                f"Monitor got more than {_MAX_NAMES} names of metrics, such as "
                f"{', '.join(map(repr, added[:3]))}: use the same names in each step"
            )

    def _start(self) -> None:
        """Start a record of the steps since the last record."""
        # `_measure` may wait for the device. The time of this wait belongs to the next interval.
        self._count_other()
        ended, self._interval = self._interval, self._new_interval()
        own = Contribution(self.steps, ended.steps, ended.samples, self._measure(ended))
        place, ranks = self._place, len(self._collectives.ranks)
        numbers = encode(own, self._names, place, ranks)
        result = self._collectives.start_sum(numbers, self._name)
        self._pending = _Pending(own, result)

    def _finish(self) -> None:
        """Complete the report that was started last. A collective if a metric is new."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        ranks = list(self._collectives.ranks)
        summed, names = pending.result(), self._names
        again = None
        if not is_complete(summed, names):
            self._exchange_names(pending.own.values)
            numbers = encode(pending.own, self._names, self._place, len(ranks))
            again = self._collectives.sum(numbers, f"{self._name}.again")
        if self._delivery is None:
            return  # only the first rank writes
        decoded = decode(summed, names, ranks)
        if again is not None:
            # A rank that has called `join` meanwhile is only in the first sum.
            values = decode(again, self._names, ranks).values
            decoded = replace(decoded, values={**values, **decoded.values})
        self._write(decoded)

    def complete_started(self) -> None:
        """Wait for the report that this rank has started; see `complete_started_reports`."""
        if self._pending is not None:
            summed = self._pending.result()
            self._pending = replace(self._pending, result=lambda: summed)

    def _finish_earlier(self) -> None:
        """Write a report that was started before the last `init` or `join`. Not a collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        ranks = list(self._collectives.ranks)
        # The report is lost if Horovod was shut down, or if the number of ranks has changed.
        with contextlib.suppress(Exception):
            self._write(decode(pending.result(), self._names, ranks))

    def _write(self, decoded: Decoded) -> None:
        """Pass a record to the loggers of the first rank."""
        if not decoded.present or self._delivery is None:
            return
        if not self._is_first:
            # In an elastic job, another rank has become the first, and has opened the loggers.
            self._delivery.close()
            self._delivery = None
            return
        if self._collectives.rank not in decoded.present:
            return
        # Another rank that was in `join` may have steps that it has not reported.
        step, steps, _ = decoded.present[self._collectives.rank]
        if not steps and not decoded.values.keys() - metrics.METRICS.keys():
            return
        record = record_of(decoded, step, steps)
        if self._written is None or record.step - record.steps < self._written:
            self._delivery.begin(
                Run(
                    record.step - record.steps,
                    record.time,
                    list(self._collectives.ranks),
                    self._every,
                    self._framework.name,
                    tuple(sorted(counters.wire_formats)),
                    socket.gethostname(),
                    hvdkit.__version__,
                )
            )
        self._written = record.step
        self._delivery.log(record)

    # --- measurements -----------------------------------------------------------------------------

    def _forward_seconds(self) -> float:
        return self._framework.section_seconds().get(stragglers.FORWARD, 0.0)

    def _count_other(self) -> None:
        """Count the time from the end of the last step until now, if it was that of a batch."""
        began = self._framework.forward_began()
        if began is not None and began >= self._batch_at:
            now = self._forward_seconds()
            self._interval.other_seconds += now - max(began, self._counted)
            self._counted = now

    def _new_interval(self) -> _Interval:
        sections = self._framework.section_seconds()
        return _Interval(time.perf_counter(), sections, self._totals(), 0, 0, {})

    def _totals(self) -> dict[str, float]:
        return {
            metrics.CHECKPOINT: counters.checkpoint_seconds,
            **self._framework.totals(),
        }

    def _measure(self, interval: _Interval) -> dict[str, float]:
        """Return this rank's metrics of an interval, which has just ended."""
        values: dict[str, float] = {}
        if interval.steps:
            values |= self._measure_steps(interval)
        names = list(interval.values)
        scalars = [value for name in names for value in interval.values[name]]
        numbers = iter(self._framework.numbers(scalars))
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
        uuid = self._framework.gpu()
        if uuid is not None:
            self._machine.watch_gpu(uuid)
        values = {
            **self._machine.measure(),
            **self._framework.gauges(),
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

    def _warning_while_waiting(self, call: str) -> contextlib.AbstractContextManager[None]:
        advice = "every rank must call it, because it is a collective."
        return warning_while_waiting(_log, self._collectives.rank, call, advice)


def as_float(value: Any) -> float:
    """Convert a value that the user has logged, other than a tensor, to a float.

    Raises:
        UsageError: the value is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"a metric is {value!r}, a {type(value).__name__}: expected a number, or a tensor with "
            f"one element"
        ) from None


def record_of(decoded: Decoded, step: int, steps: int) -> Record:
    """Return the record of a report.

    Args:
        decoded: the contributions of the ranks.
        step: the number of steps of the run.
        steps: the number of steps that the record covers.
    """
    samples = sum(count for _, _, count in decoded.present.values())
    statistics = {name: Statistic.of(values) for name, values in decoded.values.items()}
    durations = decoded.values.get(metrics.STEP, {})
    seconds = max((durations[r] * decoded.present[r][1] for r in durations), default=0.0)
    if samples and seconds > 0:
        rate = samples / seconds
        statistics[metrics.SAMPLES] = Statistic(rate, rate, rate, {})
    return Record(
        step,
        steps,
        time.time(),
        samples,
        list(decoded.present),
        statistics,
        Slowest.of(decoded.values),
    )


# Metric -> the section of `hvdkit.training.stragglers`.
_SECTIONS = {
    metrics.FORWARD: stragglers.FORWARD,
    metrics.BACKWARD: stragglers.BACKWARD,
    metrics.COMMUNICATION: stragglers.WAIT,
    metrics.UPDATE: stragglers.UPDATE,
}
