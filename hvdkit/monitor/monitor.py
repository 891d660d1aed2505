"""`BaseMonitor`: measure steps on every rank, and report them every few steps.

`Meter` measures this rank, `Reports` adds up the ranks, and `Writer` writes on the first rank. All
collectives are made here and in `Reports`.
"""

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.agreement.waiting import warning_while_waiting
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.monitor.exchange import Decoded
from hvdkit.monitor.framework import Framework
from hvdkit.monitor.loggers.console import ConsoleLogger
from hvdkit.monitor.loggers.logger import Logger
from hvdkit.monitor.meter import Meter
from hvdkit.monitor.reports import Reports
from hvdkit.monitor.writer import Writer

_Batch = TypeVar("_Batch")

_log = logging.getLogger("hvdkit.monitor")

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
        monitor.wait_for_started()


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
        self._framework = framework
        self._every = every
        self._loggers, self._name = self._compare_arguments(loggers, every)
        self._reports = Reports(collectives, self._name, every)
        self._writer = self._open_writer()
        self._meter = Meter(framework)
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
        self._meter.restart()

    def batches(self, data: Iterable[_Batch]) -> Iterator[_Batch]:
        """Iterate over `data`, and measure the time spent waiting for each batch: `time/data`."""
        return self._meter.batches(data)

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
        self._meter.log(values, samples)

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
        if self not in _open:
            raise UsageError("step() was called after close(): make another Monitor")
        self._begin_generation()
        self._finish()
        self._steps += steps
        self._meter.add_steps(steps)
        if self._reports.count(steps):
            self._start()

    def reports_after(self, steps: int) -> bool:
        """Return whether a report is due within the next `steps` steps."""
        return self in _open and self._reports.are_due(self._steps, steps)

    def add_data_time(self, seconds: float) -> None:
        """Add seconds of waiting for data, for a loop that does not use `batches`."""
        self._meter.add_data_time(seconds)

    def flush(self) -> None:
        """Report now, for example after a validation. A collective: every rank calls it."""
        self._begin_generation()
        self._finish()
        self._start()
        self._finish()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Exclude the time in this context, such as a validation, from the metrics."""
        return self._meter.paused()

    def close(self) -> None:
        """Report the last steps, and close the loggers. A collective: every rank calls it."""
        if self not in _open:
            return
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the loggers without a last report, after an error. Not a collective."""
        _open.discard(self)
        self._close_writer()

    def wait_for_started(self) -> None:
        """Wait for the report that this rank has started; see `complete_started_reports`."""
        self._reports.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception on this rank only, the other ranks are not in `close`.
        if kind is None:
            self.close()
        else:
            self.abandon()

    # --- reports ----------------------------------------------------------------------------------

    def _compare_arguments(self, loggers: Any, every: Any) -> tuple[list[Logger], str]:
        """Return the loggers and a name. Check that all ranks make the same monitor. A collective.

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
        name = f"hvdkit.monitor.{_last}"
        self._collectives.describe(name, "a report of hvd.Monitor")
        return own, name

    def _open_writer(self) -> Writer | None:
        """Open the loggers, and return a writer on the first rank. A collective.

        Raises:
            HvdkitError: on every rank, if a logger cannot be opened.
        """
        problem = b""
        opened: list[Logger] = []
        if self._collectives.is_first:
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
        if not opened:
            return None
        return Writer(opened, self._collectives, self._every, self._framework.name)

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _begin_generation(self) -> None:
        """Compare the positions of the ranks after `init` and after `join`. A collective then.

        Raises:
            UsageError, HvdkitError: on every rank, see `Reports.exchange_names`, `_open_writer`.
        """
        if not self._reports.is_new_generation:
            return
        # In an elastic job, another rank may have become the first.
        if not self._collectives.is_first:
            self._close_writer()
        self._write(self._reports.finish_earlier())
        has_to_open = bool(self._loggers) and self._collectives.is_first and self._writer is None
        with self._warning_while_waiting("Monitor.step()"):
            self._steps, opens = self._reports.compare(self._steps, has_to_open)
        if opens:
            self._writer = self._open_writer()
        self._reports.exchange_names(self._meter.names)

    def _start(self) -> None:
        """Start a report of the steps since the last report. A collective."""
        self._reports.start(self._meter.end_interval(self._steps))

    def _finish(self) -> None:
        """Complete the report that was started last. A collective if a metric is new."""
        # Only the first rank writes.
        self._write(self._reports.finish(is_read=self._writer is not None))

    def _write(self, decoded: Decoded | None) -> None:
        if decoded is not None and self._writer is not None:
            self._writer.write(decoded)

    def _warning_while_waiting(self, call: str) -> contextlib.AbstractContextManager[None]:
        advice = "every rank must call it, because it is a collective."
        return warning_while_waiting(_log, self._collectives.rank, call, advice)
