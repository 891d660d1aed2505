"""Compare the variables of a training loop between ranks, eagerly or in a graph.

A comparison also logs if a variable is NaN or infinite on all ranks.

Mean gradients never make different models equal. Without this check, a forgotten broadcast would
silently train a different model on each rank.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash
from horovod.tensorflow import mpi_ops

from hvdkit.core.consistency import RankMismatchError, name_ranks
from hvdkit.core.nonfinite import describe_weight
from hvdkit.core.replicas import SMALL
from hvdkit.tensorflow.graphs import GraphValue
from hvdkit.tensorflow.variables import tf_variable_or_none

_log = logging.getLogger("hvdkit.tensorflow")

#: Variables are compared before these reductions, counted from 0, and from `_ERROR` on before every
#: `_INTERVAL`th. Reduction 0 is not included, because Horovod's scripts broadcast after it. Models
#: of the same architecture share a count. The numbers have all remainders modulo 2 and 3. If a loop
#: trains two or three such models in turn, each of them is therefore compared.
_COMPARED = (1, 2, 5, 10, 21, 42, 85, 170, 341)
_INTERVAL = 97
#: A difference is an error from this reduction on, because a loop may reduce often before its first
#: update.
_ERROR = 170
# Relative to the largest element of a variable. Ranks on different processors may round a step
# differently, by about 1e-7. Different initial values differ by about 1.
_TOLERANCE = 1e-4

_ADVICE = (
    "Call hvd.broadcast_variables(model.variables, root_rank=0) before the first step or after it. "
    "If ranks should have different values, pass check_parameters=False to "
    "hvd.DistributedGradientTape."
)
_NONFINITE_ADVICE = (
    "on_nonfinite='raise' of hvd.DistributedGradientTape raises in the first such step, and names "
    "the rank."
)


class ValueCheck:
    """Compare the variables between ranks before some of the reductions of their gradients.

    Every rank has one for each plan. It counts the reductions of the plan, which are collectives.
    The count of a graph begins at 0 again after `join`, because joined ranks do not count.

    Args:
        names: the variables' names, for errors.
        prefix: the prefix of the collectives' names.
        process_set: the ranks to compare.
    """

    def __init__(self, names: Sequence[str], prefix: str, process_set: mpi_ops.ProcessSet) -> None:
        self._names = list(names)
        self._prefix = f"{prefix}.values"
        self._process_set = process_set
        self._counted = 0
        self._counter: GraphValue | None = None
        self._logged_nonfinite = False
        # The text of an error that `compare` raises: TensorFlow would change its class.
        self._mismatch = ""

    def compare(self, variables: Mapping[int, Any]) -> None:
        """Count one eager reduction, and compare if a comparison is due. A collective.

        Args:
            variables: the variables by their index among the names.

        Raises:
            RankMismatchError: on every rank, naming the first variable that differs.
        """
        count, self._counted = self._counted, self._counted + 1
        if count in _COMPARED or (count > _ERROR and count % _INTERVAL == 0):
            self._check(tf.constant(count), variables)
            mismatch, self._mismatch = self._mismatch, ""
            if mismatch:
                raise RankMismatchError(mismatch)

    def compare_in_graph(self, variables: Mapping[int, Any]) -> Any:
        """Count one reduction in a graph, and compare if a comparison is due. A collective.

        Returns:
            The operation that must run before the reduction. On a difference it fails with an error
            of TensorFlow, which has the text of the RankMismatchError.
        """
        if self._counter is None:
            self._counter = GraphValue(tf.int32)
        handle = self._counter.handle()
        count = self._counter.read(handle)
        later = tf.logical_and(count > _ERROR, tf.equal(count % _INTERVAL, 0))
        checked = tf.cond(
            tf.logical_or(tf.reduce_any(tf.equal(count, _COMPARED)), later),
            lambda: self._check(count, variables),
            lambda: tf.constant(0),
        )
        with tf.control_dependencies([checked]):
            return self._counter.assign(handle, count + 1)

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
            # n numbers are equal exactly if n * sum(x^2) == sum(x)^2.
            sums = self._allreduce(tf.stack([1, own, own * own]), "equal", mpi_ops.Sum)
            none_joined = tf.equal(sums[0], self._process_set.size())
            names = [self._names[k] for k in found]
            differ = tf.cond(
                tf.logical_and(none_joined, tf.not_equal(sums[0] * sums[2], sums[1] ** 2)),
                lambda: self._report(count, names, values),
                lambda: tf.constant(0),
            )
            equal = tf.logical_and(none_joined, tf.equal(differ, 0))
            return self._check_finite(count, equal, names, values)

    def _check_finite(
        self, count: tf.Tensor, equal: tf.Tensor, names: Sequence[str], values: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Log if the variables of all ranks contain NaN or infinity. Not a collective.

        A loss that is NaN on one rank makes all variables NaN that the loss depends on, so only a
        few small variables are read.

        Args:
            count: the number of reductions.
            equal: whether the variables are equal on all ranks.
            names: the names of the variables.
            values: their values.
        """
        sizes = {
            k: math.prod(value.shape) for k, value in enumerate(values) if value.dtype.is_floating
        }
        small = sorted((k for k in sizes if sizes[k]), key=lambda k: sizes[k])[:SMALL]
        if not small:
            return tf.constant(0)

        @tf.autograph.experimental.do_not_convert
        def log(count: tf.Tensor, nan: tf.Tensor, finite: tf.Tensor) -> int:
            if not self._logged_nonfinite and mpi_ops.rank() == self._process_set.ranks[0]:
                first = int(np.argmin(finite.numpy()))
                when = f"After {int(count)} reductions of its gradient"
                weight = describe_weight(repr(names[small[first]]), bool(nan[first]), when)
                _log.warning("%s %s", weight, _NONFINITE_ADVICE)
            self._logged_nonfinite = True
            return 0

        finite = tf.stack([tf.reduce_all(tf.math.is_finite(values[k])) for k in small])

        def found() -> tf.Tensor:
            nan = tf.stack([tf.reduce_any(tf.math.is_nan(values[k])) for k in small])
            return tf.ensure_shape(tf.py_function(log, [count, nan, finite], tf.int32), ())

        wrong = tf.logical_and(equal, tf.logical_not(tf.reduce_all(finite)))
        return tf.cond(wrong, found, lambda: tf.constant(0))

    def _report(
        self, count: tf.Tensor, names: Sequence[str], values: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """Find the variables that differ by more than rounding; log or raise.

        Returns:
            1 if there are such variables; otherwise 0.
        """
        flat = [tf.reshape(_as_float(value), [-1]) for value in values]
        root = self._process_set.ranks[0]
        differ, largest_of, digests = [], [], []
        for k, own in enumerate(flat):
            first = mpi_ops.broadcast(
                own,
                root,
                f"{self._prefix}.first.{k}",
                ignore_name_scope=True,
                process_set=self._process_set,
            )
            finite = tf.math.is_finite(first)
            same = tf.equal(finite, tf.math.is_finite(own))
            both = tf.logical_and(finite, same)
            zeros = tf.zeros_like(own)
            distance = tf.where(both, tf.abs(tf.where(both, own - first, zeros)), zeros)
            distance = tf.where(same, distance, tf.constant(float("inf"), tf.float64))
            largest = tf.where(finite, tf.abs(tf.where(finite, first, zeros)), zeros)
            limit = _TOLERANCE * tf.reduce_max(tf.concat([largest, [0.0]], 0))
            far = tf.reduce_max(tf.concat([distance, [0.0]], 0)) > limit
            differ.append(tf.cast(far, tf.int64))
            largest_of.append(_largest(distance, own, first))
            digests.append(tf.ensure_shape(tf.py_function(_digest, [values[k]], tf.int64), ()))
        anywhere = self._allreduce(tf.stack(differ), "differ", mpi_ops.Max)
        told = [
            mpi_ops.allgather(
                tf.stack(each)[None],
                f"{self._prefix}.{name}",
                ignore_name_scope=True,
                process_set=self._process_set,
            )
            for name, each in (("told", largest_of), ("digests", digests))
        ]
        ranks, is_eager = list(self._process_set.ranks), tf.executing_eagerly()

        @tf.autograph.experimental.do_not_convert
        def report(
            count: tf.Tensor, anywhere: tf.Tensor, told: tf.Tensor, digests: tf.Tensor
        ) -> int:
            differing = np.flatnonzero(anywhere.numpy())
            if not differing.size:
                return 0
            index, reductions = int(differing[0]), int(count)
            where = _describe(ranks, told.numpy()[:, index], digests.numpy()[:, index])
            text = (
                f"ranks have different values of {names[index]!r} after {reductions} reductions of "
                f"its gradient: {where}. Mean gradients never make them equal. {_ADVICE}"
            )
            if reductions >= _ERROR:
                self._reset()
                if not is_eager:
                    raise RankMismatchError(text)
                self._mismatch = text
                return 1
            if mpi_ops.rank() == ranks[0]:
                _log.warning("%s This will be an error after %d reductions.", text, _ERROR)
            return 1

        done = tf.py_function(report, [count, anywhere, *told], tf.int32)
        return tf.ensure_shape(done, ())

    def _reset(self) -> None:
        """Count from 0 again, because after an error a new model may use the same plan."""
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
    """Return a 24-bit digest.

    With more than 181 ranks, the products in `_check` overflow and are compared modulo 2^64.
    """
    state = xxhash.xxh64()
    for value in values:
        state.update(np.ascontiguousarray(value.numpy()).tobytes())
    return state.intdigest() & 0xFFFFFF


def _as_float(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_complex:
        value = tf.stack([tf.math.real(value), tf.math.imag(value)], -1)
    return tf.cast(value, tf.float64)


def _largest(distance: tf.Tensor, own: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Return the number of elements that differ, and the index and both values of the farthest."""
    distance, own, first = (tf.concat([each, [0.0]], 0) for each in (distance, own, first))
    index = tf.argmax(distance)
    count = tf.math.count_nonzero(distance)
    return tf.stack([*(tf.cast(n, tf.float64) for n in (count, index)), own[index], first[index]])


def _describe(ranks: Sequence[int], told: np.ndarray, digests: np.ndarray) -> str:
    """Return which ranks differ from the others, and in which element.

    Args:
        ranks: the ranks.
        told: for each rank, the result of `_largest`, compared with the first rank.
        digests: for each rank, a digest of its value.
    """
    alike: dict[int, list[int]] = {}
    for place, digest in enumerate(digests.tolist()):
        alike.setdefault(digest, []).append(place)
    # Without a majority, the others are compared with the first rank.
    majority = max(alike.values(), key=len)
    if len(majority) <= len(ranks) // 2:
        majority = alike[int(digests[0])]
    usual = majority[0]
    texts = []
    for places in alike.values():
        if places is majority:
            continue
        # All ranks were compared with the first one. If the first rank differs from the majority,
        # the comparison of a rank of the majority describes the difference.
        is_first = places[0] == 0
        count, index, own, first = told[usual if is_first else places[0]]
        value, other = (first, own) if is_first else (own, first)
        base = ranks[usual if is_first else 0]
        texts.append(
            f"{name_ranks([ranks[place] for place in places])} differ{'s' * (len(places) == 1)} in "
            f"{int(count):,} elements from rank {base}: element {int(index)} is {value:.6g}, and "
            f"{other:.6g} on rank {base}"
        )
    return "; ".join(texts)
