"""Check within a graph that every rank has a batch, before a training step uses collectives.

Keras on TensorFlow reads a batch within the graph of a step. If the data of a rank have ended, this
rank leaves the graph. Without the check, the other ranks would wait for its gradients.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.tensorflow.bucket_reduction import allreduce
from hvdkit.tensorflow.graphs import new_variable


class BatchCheck:
    """A sum over the ranks at the beginning of each training step; turned off at first.

    Args:
        name: the name of the sum of two int64: 1 for each rank, and 1 for each rank with a batch.
            A rank whose data have ended takes part with `sums`.
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
        # Eager collectives have other names than those of graphs.
        self._outside = tf.function(self._sums, autograph=False)

    def turn(self, on: bool) -> None:
        """Turn the check on or off, on all ranks together. Graphs need not be traced again."""
        self._active.assign(int(on))

    def sums(self, has_batch: bool) -> list[int]:
        """Take part outside of a step. A collective.

        Returns:
            The number of ranks, and the number of ranks with a batch.
        """
        sums: list[int] = self._outside(tf.constant(int(has_batch), tf.int64)).numpy().tolist()
        return sums

    def _sums(self, has_batch: tf.Tensor) -> tf.Tensor:
        # Not constants: TensorFlow runs a collective of constants only once.
        own = tf.stack([tf.ones_like(has_batch), has_batch])
        return allreduce(own, self._name, self._process_set)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Any) -> Any:
        """Check that all ranks have a batch.

        Args:
            data: the batch. If reading it fails, the check does not run.

        Returns:
            The operation that must run before the step.
        """
        tensors = [t for t in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies([tf.identity(tensor) for tensor in tensors]):
            active = self._active.read_value()
        return tf.cond(active > 0, lambda: self._check(active), lambda: tf.constant(0))

    def _check(self, active: tf.Tensor) -> tf.Tensor:
        sums = self._sums(tf.cast(active, tf.int64))

        @tf.autograph.experimental.do_not_convert
        def fail() -> int:
            self._fail()
            return 0

        return tf.cond(
            tf.equal(sums[0], sums[1]),
            lambda: tf.constant(0),
            lambda: tf.ensure_shape(tf.py_function(fail, [], tf.int32), ()),
        )
