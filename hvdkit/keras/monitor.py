"""A callback that measures `model.fit` on all ranks."""

import contextlib
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.checkpoint import Checkpoint
from hvdkit.keras.fit.collective_callbacks import LastCallback
from hvdkit.keras.fit.metrics import numbers_of
from hvdkit.keras.models import main_optimizer
from hvdkit.keras.multi_optimizer import updating_optimizers
from hvdkit.keras.optimizer import distribution_of
from hvdkit.monitor import Logger, metrics
from hvdkit.monitor.monitor import BaseMonitor

_adapter: Any = importlib.import_module(f"hvdkit.{backend.NAME}.monitor")


class MonitorCallback(LastCallback):
    """Measure `fit` on all ranks, and write a record every few batches.

    Pass a `MonitorCallback` to `fit` on every rank. Only the first rank writes. For each metric, a
    record has the mean, the minimum and the maximum over the ranks. A record also names the slowest
    rank. See docs/monitoring.md for the metrics.

    A step is a batch. Loss and metrics are Keras's means since the beginning of the epoch.
    At the end of each epoch there is a record with the logs of the epoch, including validation.
    After a resume by `hvd.callbacks.Checkpoint`, the number of steps continues from the checkpoint.

        from hvdkit.monitor import ConsoleLogger, JSONLLogger

        loggers = [ConsoleLogger(), JSONLLogger("run/metrics.jsonl")]
        model.fit(data, callbacks=[hvd.callbacks.MonitorCallback(loggers, batch_size=32)])
    """

    needs_one_model = True

    def __init__(
        self,
        loggers: Sequence[Logger] | None = None,
        *,
        every: int = 10,
        batch_size: int | None = None,
    ) -> None:
        """
        Args:
            loggers: where to write, see `hvdkit.monitor`. Default: `ConsoleLogger()`. Each `fit`
                opens and closes them.
            every: batches per record.
            batch_size: the number of samples in a batch of each rank. None: do not report samples
                per second.
        """
        super().__init__()
        self._loggers = loggers
        self._every = every
        self._batch_size = batch_size
        self._monitor: BaseMonitor | None = None
        # The steps at the end of the last `fit`.
        self._steps = 0
        # Returns the steps before the first epoch of `fit`; None after it has begun.
        self._first: Callable[[int], int] | None = None
        self._logs: Mapping[str, Any] = {}
        self._batch_ended: float | None = None
        self._pause = contextlib.ExitStack()

    def fit_begins(self, callbacks: Sequence[Any]) -> None:
        """Open the loggers. A collective.

        Raises:
            UsageError, RankMismatchError, HvdkitError: on every rank, as for `hvd.Monitor`.
        """
        if not backend.hvd.is_initialized():
            raise UsageError("Horovod is not initialised: call hvd.init() before this")
        if self._monitor is not None:
            # Keras does not tell callbacks that an exception has ended `fit`.
            self._monitor.abandon()
        distribution = distribution_of(main_optimizer(self.model))
        self._monitor = BaseMonitor(
            distribution.collectives if distribution else backend.collectives(),
            _Keras(self.model, distribution.times if distribution else None),
            self._loggers,
            self._every,
        )
        found = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
        before, of_epoch = self._steps, self.params.get("steps") or 0
        # A `Checkpoint` may begin after this callback.
        self._first = lambda epoch: found[0].step if found else before or epoch * of_epoch

    def epoch_begins(self, epoch: int) -> None:
        """Continue with the steps of a checkpoint. Not a collective."""
        self._batch_ended = None
        first, self._first = self._first, None
        if first is not None:
            assert self._monitor is not None
            self._monitor.steps = first(epoch)

    def batch_is_read(self) -> None:
        """Count the time since the last batch. Not a collective."""
        if self._monitor is None or self._batch_ended is None or backend.NAME != "torch":
            return  # on TensorFlow, the training function reads the batch
        self._monitor.add_data_time(time.perf_counter() - self._batch_ended)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._logs = logs or {}

    def batches_end(self, batches: range) -> None:
        """Report if a report is due. A collective."""
        monitor = self._monitor
        assert monitor is not None
        steps = len(batches)
        values = _numbers(self._logs) if monitor.reports_after(steps) else {}
        monitor.log(values, steps * (self._batch_size or 0))
        monitor.advance(steps)
        self._steps = monitor.steps
        self._batch_ended = time.perf_counter()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        if self._monitor is not None:
            self._pause.enter_context(self._monitor.paused())

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._pause.close()

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Report the logs of the epoch. A collective."""
        assert self._monitor is not None
        self._monitor.log({**_numbers(logs), "epoch": epoch + 1})
        self._monitor.flush()

    def fit_ends(self) -> None:
        """Close the loggers. A collective."""
        monitor, self._monitor = self._monitor, None
        assert monitor is not None
        monitor.close()


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in the logs of Keras; a custom `train_step` may return anything."""
    found = numbers_of(logs)
    return {name: x for name, x in found.items() if not name.startswith(metrics.RESERVED)}


class _Keras:
    """`hvdkit.monitor.framework.Framework` for Keras.

    Args:
        model: the model.
        times: measures the sections; None if nothing does.
    """

    name = f"keras {keras.__version__} on {backend.NAME} {backend.framework_version()}"

    def __init__(self, model: Any, times: Any) -> None:
        self._model = model
        self._times = times

    @staticmethod
    def scalar(value: Any) -> Any:
        """See `Framework`."""
        return float(value)

    @staticmethod
    def numbers(values: Sequence[Any]) -> list[float]:
        """See `Framework`."""
        return list(values)

    def section_seconds(self) -> Mapping[str, float]:
        """See `Framework`."""
        return {} if self._times is None else dict(self._times.totals())

    @staticmethod
    def forward_began() -> None:
        """See `Framework`."""

    def pause(self) -> None:
        """See `Framework`. The coordination of `fit` stops the times itself."""

    def resume(self) -> None:
        """See `Framework`."""

    @staticmethod
    def totals() -> Mapping[str, float]:
        """See `Framework`."""
        return dict(_adapter.totals())

    def gauges(self) -> Mapping[str, float]:
        """See `Framework`."""
        values = dict(_adapter.memory())
        optimizer = main_optimizer(self._model)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            values[metrics.LOSS_SCALE] = _number(optimizer.dynamic_scale)
        # As for PyTorch, the rate of the first group of variables.
        values[metrics.LR] = _number(updating_optimizers(optimizer)[0].learning_rate)
        return values

    @staticmethod
    def gpu() -> str | None:
        """See `Framework`."""
        found: str | None = _adapter.gpu()
        return found


def _number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))
