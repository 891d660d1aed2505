"""Check within a graph that every rank has a batch, before a training step uses collectives.

Keras on TensorFlow reads a batch within the graph of a step. If the data of a rank have ended, this
rank leaves the graph. Without the check, the other ranks would wait for its gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.tensorflow.graphs import new_variable
from hvdkit.tensorflow.reduction.bucket_reduction import allreduce
from hvdkit.tensorflow.step_times import GraphTimes, clock_after

#: The function of each process set that takes part outside of a step.
_functions: WeakKeyDictionary[mpi_ops.ProcessSet, Any] = WeakKeyDictionary()


class BatchCheck:
    """A sum over the ranks at the beginning of each training step; turned off at first.

    Args:
        name: the name of the sum of three int64: 1 for each rank, 1 for each rank with a batch, and
            a number of `sums`. A rank whose data have ended takes part with `sums`.
        process_set: the ranks.
        fail: called on every rank with a batch if another rank has none; raises an error.
    """

    def __init__(
        self, name: str, process_set: mpi_ops.ProcessSet, fail: Callable[[], None]
    ) -> None:
        self._name = name
        self._process_set = process_set
        self._fail = fail
        self._active = new_variable(0)

    def turn(self, on: bool) -> None:
        """Turn the check on or off, on all ranks together. Graphs need not be traced again."""
        self._active.assign(int(on))

    def sums(self, values: Sequence[int]) -> list[int]:
        """Take part outside of a step, with three numbers. A collective. Return their sums."""
        # Eager collectives have other names than those of graphs.
        function = _functions.get(self._process_set)
        if function is None:
            function = tf.function(
                functools.partial(allreduce, name=self._name, process_set=self._process_set),
                autograph=False,
            )
            _functions[self._process_set] = function
        sums: list[int] = function(tf.constant(values, tf.int64)).numpy().tolist()
        return sums

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Any, times: Sequence[GraphTimes]) -> Any:
        """Check that all ranks have a batch.

        Args:
            data: the batch. If reading it fails, the check does not run.
            times: they count the wait for slower ranks as a wait.

        Returns:
            The operation that must run before the step.
        """
        tensors = [t for t in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies([tf.identity(tensor) for tensor in tensors]):
            active = self._active.read_value()
        return tf.cond(active > 0, lambda: self._check(active, times), lambda: tf.constant(0))

    def _check(self, active: tf.Tensor, times: Sequence[GraphTimes]) -> tf.Tensor:
        began = clock_after([active])
        with tf.control_dependencies([began]):
            # Not constants: TensorFlow runs a collective of constants only once.
            one = tf.cast(active, tf.int64)
            own = tf.stack([one, one, tf.zeros_like(one)])
            sums = allreduce(own, self._name, self._process_set)
        ended = clock_after([sums])
        counted = [each.count_wait_in_graph(began, ended) for each in times]

        @tf.autograph.experimental.do_not_convert
        def fail() -> int:
            self._fail()
            return 0

        with tf.control_dependencies(counted):
            return tf.cond(
                tf.equal(sums[0], sums[1]),
                lambda: tf.constant(0),
                lambda: tf.ensure_shape(tf.py_function(fail, [], tf.int32), ()),
            )
