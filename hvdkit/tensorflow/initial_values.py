"""Compare the variables of a training loop between ranks, eagerly or in a graph.

Mean gradients keep equal models equal, and different ones different: a forgotten broadcast trains
one model per rank without any error.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash
from horovod.tensorflow import mpi_ops

from hvdkit.core.consistency import RankMismatchError
from hvdkit.tensorflow.graphs import Counter
from hvdkit.tensorflow.variables import tf_variable_or_none

_log = logging.getLogger("hvdkit.tensorflow")

#: Before which reductions variables are compared, counted from 0. Not before the first, because
#: Horovod's scripts broadcast after it. Every number of twins that take turns has one of these.
_COMPARED = (1, 2, 5, 10, 21, 42, 85, 170, 341)
#: From which on a difference is an error. A loop may reduce many times before its first update.
_ERROR = 170
# Relative to the largest element of a variable. Ranks on processors of different kinds may round a
# step differently, by about 1e-7; other initial values differ by about 1.
_TOLERANCE = 1e-4
# Elements of a variable that an error shows.
_SHOWN = 3

_ADVICE = (
    "Call hvd.broadcast_variables(model.variables, root_rank=0) before the first step or after it. "
    "If ranks are to have different values, pass check_parameters=False to "
    "hvd.DistributedGradientTape."
)


class InitialValues:
    """Compares, before some of the reductions, what they are the gradients of.

    Every rank makes one for the same plan, and they count the plan's reductions, which are
    collectives. Those of a graph are counted from 0 again after `join`: a rank that has joined
    does not count.

    Args:
        names: of the variables, for errors.
        prefix: of the collectives' names.
        process_set: the ranks to compare.
    """

    def __init__(self, names: Sequence[str], prefix: str, process_set: mpi_ops.ProcessSet) -> None:
        self._names = list(names)
        self._prefix = f"{prefix}.values"
        self._process_set = process_set
        self._counted = 0
        self._counter: Counter | None = None

    def compare(self, variables: Callable[[], Mapping[int, Any]]) -> None:
        """Count one reduction, eagerly, and compare if it is time to. A collective.

        Args:
            variables: gives the places of variables among the names, and these.

        Raises:
            RankMismatchError: on every rank, naming the first variable that differs.
        """
        count, self._counted = self._counted, self._counted + 1
        if count in _COMPARED:
            self._check(tf.constant(count), variables())

    def compare_in_graph(self, variables: Mapping[int, Any]) -> Any:
        """The same as `compare`, in a graph. The error is TensorFlow's own, with this text in it.

        Returns:
            The operation, which the reduction is to wait for.
        """
        if self._counter is None:
            self._counter = Counter()
        handle = self._counter.handle()
        count = Counter.read(handle)
        checked = tf.cond(
            tf.reduce_any(tf.equal(count, _COMPARED)),
            lambda: self._check(count, variables),
            lambda: tf.constant(0),
        )
        with tf.control_dependencies([checked]):
            return Counter.assign(handle, tf.minimum(count, _COMPARED[-1]) + 1)

    def _check(self, count: tf.Tensor, variables: Mapping[int, Any]) -> tf.Tensor:
        found = {
            k: variable
            for k, source in variables.items()
            if (variable := tf_variable_or_none(source)) is not None
        }
        if not found:
            return tf.constant(0)
        with tf.device("/cpu:0"):
            values = [variable.read_value() for variable in found.values()]
            own = tf.ensure_shape(tf.py_function(_digest, values, tf.int64), ())
            # Sums tell whether n numbers are equal: n * sum(x^2) == sum(x)^2 only then.
            sums = self._allreduce(tf.stack([1, own, own * own]), "equal", mpi_ops.Sum)
            all_are_here = tf.equal(sums[0], self._process_set.size())
            return tf.cond(
                tf.logical_and(all_are_here, tf.not_equal(sums[0] * sums[2], sums[1] ** 2)),
                lambda: self._tell(count, [self._names[k] for k in found], values),
                lambda: tf.constant(0),
            )

    def _tell(
        self, count: tf.Tensor, names: Sequence[str], values: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Find out which variables differ by more than rounding, and tell it."""
        flat = [tf.reshape(_as_float(value), [-1]) for value in values]
        root = self._process_set.ranks[0]
        differ = []
        for k, own in enumerate(flat):
            first = mpi_ops.broadcast(
                own,
                root,
                f"{self._prefix}.first.{k}",
                ignore_name_scope=True,
                process_set=self._process_set,
            )
            finite = tf.math.is_finite(first)
            broken = tf.reduce_any(tf.not_equal(finite, tf.math.is_finite(own)))
            distance = tf.boolean_mask(tf.abs(own - first), finite)
            largest = tf.boolean_mask(tf.abs(first), finite)
            limit = _TOLERANCE * tf.reduce_max(tf.concat([largest, [0.0]], 0))
            far = tf.reduce_max(tf.concat([distance, [0.0]], 0)) > limit
            differ.append(tf.cast(tf.logical_or(broken, far), tf.int64))
        anywhere = self._allreduce(tf.stack(differ), "differ", mpi_ops.Max)
        shown = tf.stack([tf.pad(own, [[0, _SHOWN]])[:_SHOWN] for own in flat])
        told = mpi_ops.allgather(
            shown[None],
            f"{self._prefix}.told",
            ignore_name_scope=True,
            process_set=self._process_set,
        )
        ranks = list(self._process_set.ranks)

        @tf.autograph.experimental.do_not_convert
        def report(count: tf.Tensor, anywhere: tf.Tensor, told: tf.Tensor) -> int:
            places = np.flatnonzero(anywhere.numpy())
            if not places.size:
                return 0
            place, reductions = int(places[0]), int(count)
            everyones = "; ".join(
                f"rank {rank}: {', '.join(f'{x:.6g}' for x in of_rank[place])}"
                for rank, of_rank in zip(ranks, told.numpy(), strict=True)
            )
            text = (
                f"ranks have different values of {names[place]!r} (its first elements: "
                f"{everyones}) after {reductions} reductions of its gradient, and mean gradients "
                f"never make them equal. {_ADVICE}"
            )
            if reductions >= _ERROR:
                self._begin_anew()
                raise RankMismatchError(text)
            if mpi_ops.rank() == ranks[0]:
                _log.warning("%s This will be an error after %d reductions.", text, _ERROR)
            return 0

        done = tf.py_function(report, [count, anywhere, told], tf.int32)
        return tf.ensure_shape(done, ())

    def _begin_anew(self) -> None:
        """After an error the next model of this kind is counted from 0."""
        self._counted = 0
        if self._counter is not None:
            self._counter.reset()

    def _allreduce(self, tensor: tf.Tensor, name: str, op: int) -> tf.Tensor:
        return mpi_ops._allreduce(
            tensor,
            name=f"{self._prefix}.{name}",
            op=op,
            ignore_name_scope=True,
            process_set=self._process_set,
        )


@tf.autograph.experimental.do_not_convert
def _digest(*values: tf.Tensor) -> int:
    """Return 24 bits of all bytes: over 30,000 ranks the sum of squares fits into 64."""
    state = xxhash.xxh64()
    for value in values:
        state.update(np.ascontiguousarray(value.numpy()).tobytes())
    return state.intdigest() & 0xFFFFFF


def _as_float(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_complex:
        value = tf.stack([tf.math.real(value), tf.math.imag(value)], -1)
    return tf.cast(value, tf.float64)
