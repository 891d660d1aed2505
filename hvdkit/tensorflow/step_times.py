"""The time that a rank spends in each section of its steps, measured in a graph or eagerly."""

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.replicas import INTERVAL
from hvdkit.runtime import time_of_day
from hvdkit.tensorflow.collectives import TensorFlowCollectives, measured
from hvdkit.tensorflow.graphs import GraphValue
from hvdkit.training.stragglers import BACKWARD, FORWARD, SECTIONS, WAIT, StragglerReport

# The first three of `SECTIONS`. The time of an update counts as `FORWARD` of the next step, because
# a graph does not measure updates.
_SECTIONS = (FORWARD, BACKWARD, WAIT)
# If the clock is set, the time of day moves against the monotonic clock: by more than these
# seconds, and by more than this part of the elapsed time. NTP moves it more slowly.
_SET_SECONDS, _SET_PART = 0.05, 0.001


class GraphTimes:
    """Measures the times of `hvdkit.training.stragglers` around the reductions of this process.

    Python does not run between the operations of a graph, so operations read the clock: once when
    the first gradient exists, once when all gradients exist, and once when all are reduced. This
    clock is the time of day: TensorFlow has no operation for a monotonic clock. If the time of day
    was set, `take` and `take_in_graph` return zeros, so that the rank is not compared this time.
    `totals`, which `hvd.Monitor` reads, is not corrected: a record of this time is wrong.
    """

    def __init__(self) -> None:
        # `_graph` is for graphs and `_eager` for eager reductions. Each has the seconds in each
        # section, and then the time at which the last reduction ended, 0 if unknown.
        self._graph = GraphValue(tf.float64, [len(_SECTIONS) + 1])
        self._eager = [0.0] * (len(_SECTIONS) + 1)
        # Seconds in each section that `take` and `take_in_graph` have removed from the values
        # above.
        self._taken_in_graphs = GraphValue(tf.float64, [len(_SECTIONS)])
        self._taken = [0.0] * len(_SECTIONS)
        self._day = _Day()
        measured.add(self)

    def begin_reduction(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the times at which the first and the last gradient exist.

        Args:
            gradients: this rank's gradients, in the order of the variables; None if missing.
        """
        if tf.executing_eagerly():
            return [time.monotonic()] * 2
        tensors = tf.nest.flatten(
            [each for each in gradients if each is not None], expand_composites=True
        )
        # A backward pass begins with the last variables.
        return [clock_after(tensors[-1:]), clock_after(tensors)]

    def end_reduction(self, begun: Sequence[Any], reduced: Sequence[Any]) -> tf.Tensor | None:
        """Add the times of one step.

        Args:
            begun: the result of `begin_reduction`.
            reduced: the reduced gradients.

        Returns:
            In a graph, a handle for `take_in_graph`.
        """
        if tf.executing_eagerly():
            self._eager = _added(self._eager, [*begun, time.monotonic()])
            return None
        tensors = [each for each in reduced if each is not None]
        end = clock_after(tf.nest.flatten(tensors, expand_composites=True))
        handle = self._graph.handle()
        values = _added(tf.unstack(self._graph.read(handle)), [*begun, end])
        self._graph.assign(handle, tf.stack(values))
        return handle

    def count_wait_in_graph(self, began: tf.Tensor, ended: tf.Tensor) -> tf.Operation:
        """Count a wait before the first gradient as `WAIT`; return the operation.

        Args:
            began, ended: times of `clock_after`.
        """
        handle = self._graph.handle()
        *sums, last = tf.unstack(self._graph.read(handle))
        seconds = tf.where(last > 0, ended - began, tf.zeros_like(last))
        sums[_SECTIONS.index(WAIT)] += seconds
        return self._graph.assign(handle, tf.stack([*sums, last + seconds]))

    def count_wait(self, seconds: float) -> None:
        """Count a wait between two steps as `WAIT`, outside of graphs."""
        graph = self._graph.numpy().tolist()
        if graph[-1]:
            self._graph.set([*graph[:-1], graph[-1] + seconds])
        if self._eager[-1]:
            self._eager[-1] += seconds
        # Once, because the times of graphs and of eager reductions are added up.
        if graph[-1] or self._eager[-1]:
            self._eager[_SECTIONS.index(WAIT)] += seconds

    def take_in_graph(self, handle: tf.Tensor) -> tf.Tensor:
        """Return the seconds in each of `_SECTIONS` since the last call, and count from 0 again."""
        values = self._graph.read(handle)

        @tf.autograph.experimental.do_not_convert
        def factor() -> float:
            return 0.0 if self._day.was_set() else 1.0

        values *= tf.ensure_shape(tf.py_function(factor, [], tf.float64), ())
        self._graph.assign(handle, tf.concat([tf.zeros_like(values[:-1]), values[-1:]], 0))
        taken = self._taken_in_graphs.handle()
        self._taken_in_graphs.assign(taken, self._taken_in_graphs.read(taken) + values[:-1])
        return values[:-1]

    def start(self) -> None:
        """Begin counting, unless the times are being counted."""
        if not self._graph.numpy()[-1]:
            self._graph.set([*self._graph.numpy()[:-1], time.time()])
        if not self._eager[-1]:
            self._eager[-1] = time.monotonic()

    def stop(self) -> None:
        """Stop counting until the next reduction or `start`."""
        self._graph.set([*self._graph.numpy()[:-1], 0.0])
        self._eager[-1] = 0.0

    def end_step(self) -> None:
        """Record that a step ends. Does nothing, because a step ends with its reduction."""

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, and count from 0 again."""
        graph, eager = self._graph.numpy().tolist(), self._eager
        if self._day.was_set():
            graph, eager = [0.0] * len(graph), [0.0] * len(eager)
        self._graph.set([0.0] * len(_SECTIONS) + [graph[-1]])
        self._eager = [0.0] * len(_SECTIONS) + [eager[-1]]
        spent = [float(graph[k] + eager[k]) for k in range(len(_SECTIONS))]
        self._taken = [a + b for a, b in zip(self._taken, spent, strict=True)]
        return dict(zip(_SECTIONS, spent, strict=True))

    def totals(self) -> dict[str, float]:
        """Return the seconds in each section since the beginning."""
        graphs: list[Any] = [self._graph.numpy(), self._taken_in_graphs.numpy()]
        parts = [*graphs, self._eager, self._taken]
        return {s: float(sum(part[k] for part in parts)) for k, s in enumerate(_SECTIONS)}


class _Day:
    """Finds out whether the time of day was set."""

    def __init__(self) -> None:
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Return the time of the monotonic clock, and its distance to the time of day."""
        return time.monotonic(), time_of_day.offset() / 1e9

    def was_set(self) -> bool:
        """Return whether the time of day was set since the last call."""
        (since, before), self._last = self._last, self._now()
        now, offset = self._last
        return abs(offset - before) > max(_SET_SECONDS, _SET_PART * (now - since))


class PayloadBytes:
    """The bytes of the buckets that this rank has reduced, as in `hvdkit.runtime.counters`."""

    def __init__(self) -> None:
        # Made on use, because it starts TensorFlow's devices.
        self._value: GraphValue | None = None

    def add(self, number: Any) -> None:
        """Add a number, in the graph that is being traced."""
        if self._value is None:
            self._value = GraphValue(tf.int64)
        handle = self._value.handle()
        self._value.assign(handle, self._value.read(handle) + tf.cast(number, tf.int64))

    def total(self) -> int:
        """Return the number of bytes since the beginning, outside of graphs."""
        return 0 if self._value is None else int(self._value.numpy())


#: The bytes of the buckets that this process has reduced.
payload_bytes = PayloadBytes()


class TapeStragglers:
    """Compares the ranks' times every `INTERVAL` reductions of one set of gradients.

    Every rank has one for each plan. After `join`, the count of a graph
    begins at 0 again: it does not increase on a rank that is in `join`.

    Args:
        report: compares the times that `times` measures.
        times: the times of this rank.
        collectives: the collectives of the ranks.
        name: the name of the collective.
    """

    def __init__(
        self,
        report: StragglerReport,
        times: GraphTimes,
        collectives: TensorFlowCollectives,
        name: str,
    ) -> None:
        self._report = report
        self._times = times
        self._collectives = collectives
        self._name = name
        self._eager_counts = itertools.count(1)

    @functools.cached_property
    def _counter(self) -> GraphValue:
        return GraphValue(tf.int32)

    def count(self, handle: tf.Tensor | None) -> None:
        """Count one reduction, and compare if a comparison is due. A collective.

        Args:
            handle: the result of `GraphTimes.end_reduction`.
        """
        if handle is None:
            if next(self._eager_counts) % INTERVAL == 0:
                self._report.report()
            return
        counter = self._counter.handle()
        count = self._counter.read(counter) + 1
        self._counter.assign(counter, count)
        tf.cond(
            tf.equal(count % INTERVAL, 0), lambda: self._compare(handle), lambda: tf.constant(0)
        )

    def _compare(self, handle: tf.Tensor) -> tf.Tensor:
        own = tf.cast(self._times.take_in_graph(handle) * 1e6, tf.int64)
        ranks = list(self._collectives.ranks)
        before = ranks.index(self._collectives.rank) * len(SECTIONS)
        after = len(ranks) * len(SECTIONS) - before - len(_SECTIONS)
        summed = mpi_ops._allreduce(
            tf.pad(own, [[before, after]]),
            name=self._name,
            op=mpi_ops.Sum,
            ignore_name_scope=True,
            process_set=self._collectives.process_set,
        )

        @tf.autograph.experimental.do_not_convert
        def compare(summed: tf.Tensor) -> int:
            self._report.compare(summed.numpy().tolist())
            return 0

        return tf.ensure_shape(tf.py_function(compare, [summed], tf.int32), ())


def clock_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the time of day at which tensors exist, in a graph."""
    with tf.control_dependencies(list(tensors)):
        return tf.timestamp()


def _added(values: Sequence[Any], times: Sequence[Any]) -> list[Any]:
    """Add the sections of a step to the sums.

    Args:
        values: the sums, and the end of the last reduction, or 0.
        times: when the first gradient existed, when all gradients existed, and when all were
            reduced.
    """
    *sums, last = values
    first, computed, end = times
    if isinstance(last, float):
        before = first - last if last else 0.0
    else:
        before = tf.where(last > 0, first - last, tf.zeros_like(last))
    sections = [before, computed - first, end - computed]
    return [*(a + b for a, b in zip(sums, sections, strict=True)), end]
