"""`hvd.Monitor` for custom training loops of TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.collectives import check_member, check_process_set
from hvdkit.errors import UsageError
from hvdkit.monitor import Logger, metrics
from hvdkit.monitor.framework import as_float
from hvdkit.monitor.monitor import BaseMonitor
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.reduction_items import distribution_of
from hvdkit.tensorflow.step_times import payload_bytes
from hvdkit.tensorflow.tape_reducers import times_of


class Monitor(BaseMonitor):
    """Measure a training loop on all ranks, and write a record every few steps.

    Every rank makes a `Monitor`, and calls `step` after each step, outside of `tf.function`. Only
    the first rank writes. For each metric, a record has the mean, the minimum and the maximum over
    the ranks. A record also names the slowest rank. See docs/monitoring.md for the metrics.

    For `model.fit`, use `hvdkit.keras.callbacks.MonitorCallback`.

    Args:
        loggers: where to write, see `hvdkit.monitor`. Default: `ConsoleLogger()`.
        every: steps per record. A record covers all of these steps.
        optimizer: the `hvd.DistributedOptimizer` that reduces the gradients. None: a
            `hvd.DistributedGradientTape` reduces them.
        process_set: the ranks that train together.

    Raises:
        UsageError: an argument is invalid.
        RankMismatchError: on every rank, if the arguments differ between ranks.
        HvdkitError: on every rank, if a logger cannot be opened on the first rank.

    Example:
        with hvd.Monitor([ConsoleLogger(), JSONLLogger("run/metrics.jsonl")]) as monitor:
            for x, y in monitor.batches(dataset):
                loss = train_step(x, y)
                monitor.step({"loss": loss}, samples=len(x))
    """

    def __init__(
        self,
        loggers: Sequence[Logger] | None = None,
        *,
        every: int = 10,
        optimizer: Any = None,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    ) -> None:
        if not mpi_ops.is_initialized():
            raise UsageError("Horovod is not initialised: call hvd.init() before this")
        check_process_set(process_set)
        check_member(process_set)
        times: Any = times_of(process_set)
        if optimizer is not None:
            distribution = distribution_of(optimizer)
            if distribution is None:
                raise UsageError(
                    f"optimizer is a {type(optimizer).__name__} that is not wrapped: expected the "
                    f"result of hvd.DistributedOptimizer. With a DistributedGradientTape, omit it"
                )
            times = distribution.times
        framework = _TensorFlow(times)
        super().__init__(TensorFlowCollectives(process_set), framework, loggers, every)


class _TensorFlow:
    """`hvdkit.monitor.framework.Framework` for TensorFlow.

    Args:
        times: the `GraphTimes` of the reductions.
    """

    name = f"tensorflow {tf.__version__}"

    def __init__(self, times: Any) -> None:
        self._times = times

    @staticmethod
    def scalar(value: Any) -> Any:
        """See `Framework`."""
        return scalar(value)

    @staticmethod
    def numbers(values: Sequence[Any]) -> list[float]:
        """See `Framework`."""
        return [float(value.numpy()) if tf.is_tensor(value) else value for value in values]

    def section_seconds(self) -> Mapping[str, float]:
        """See `Framework`."""
        return dict(self._times.totals())

    @staticmethod
    def forward_began() -> None:
        """See `Framework`."""

    def pause(self) -> None:
        """See `Framework`."""
        self._times.stop()

    def resume(self) -> None:
        """See `Framework`."""
        self._times.start()

    @staticmethod
    def totals() -> Mapping[str, float]:
        """See `Framework`."""
        return totals()

    @staticmethod
    def gauges() -> Mapping[str, float]:
        """See `Framework`."""
        return memory()

    @staticmethod
    def gpu() -> str | None:
        """See `Framework`."""
        return gpu()


def scalar(value: Any) -> Any:
    """Return a value of the user as a float, or as a tensor without dimensions.

    Raises:
        UsageError: it is not a number.
    """
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        tensor = tf.convert_to_tensor(value)
        if not hasattr(tensor, "numpy"):
            raise UsageError(
                "a metric is a tensor of a graph: call Monitor outside of tf.function, with the "
                "results of the function"
            )
        if tensor.shape.num_elements() != 1 or tensor.dtype.is_complex:
            raise UsageError(
                f"a metric is a tensor of shape {tensor.shape} and dtype {tensor.dtype.name}: "
                f"expected one real number. Pass tf.reduce_mean of it, for instance"
            )
        return tf.reshape(tensor, ())
    return as_float(value)


def totals() -> dict[str, float]:
    """Return the counters of this process: the bytes of the buckets that it has reduced."""
    return {metrics.PAYLOAD: float(payload_bytes.total())}


def gpu() -> str | None:
    """Return None, because TensorFlow does not know the UUID of a GPU."""
    return None


def memory() -> dict[str, float]:
    """Return the memory of tensors on this rank's GPU; empty if it uses none."""
    if not tf.config.list_logical_devices("GPU"):
        return {}
    found = tf.config.experimental.get_memory_info("GPU:0")
    return {
        metrics.ALLOCATED: float(found["current"]),
        metrics.PEAK_ALLOCATED: float(found["peak"]),
    }
