"""Find gradients that contain NaN or infinity before they are reduced, eagerly or in a graph."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.consistency import grouped
from hvdkit.agreement.names import unique_names
from hvdkit.reduction.nonfinite import (
    LAST_FIRST,
    describe,
    describe_groups,
    names_text,
    raise_or_log,
)
from hvdkit.tensorflow.collectives import TensorFlowCollectives


class NonFiniteCheck:
    """Finds gradients that are not finite on a rank, and raises or logs on all ranks.

    Args:
        count: the number of gradients.
        prefix: the prefix of the collectives' names.
        collectives: the collectives of the ranks.
        policy: `RAISE` or `SKIP`, see `hvdkit.reduction.nonfinite`.
    """

    def __init__(
        self, count: int, prefix: str, collectives: TensorFlowCollectives, policy: str
    ) -> None:
        self._count = count
        self._prefix = f"{prefix}.nonfinite"
        self._collectives = collectives
        self._policy = policy

    def flags(self, gradients: Mapping[int, Any]) -> tf.Tensor:
        """Return a vector with 1 for each gradient that is not finite, else 0.

        Args:
            gradients: the gradients by their index.
        """
        if not gradients:
            return tf.zeros([self._count], tf.int32)
        values = {i: _values(gradient) for i, gradient in gradients.items()}
        # A sum is half as much work as the exact check. The sum of finite elements may overflow, so
        # the exact check follows if a sum is not finite.
        sums = tf.stack([tf.cast(tf.reduce_sum(each), tf.float32) for each in values.values()])

        def exact() -> tf.Tensor:
            found = [tf.constant(0)] * self._count
            for i, each in values.items():
                finite = tf.reduce_all(tf.math.is_finite(each))
                found[i] = tf.cast(tf.logical_not(finite), tf.int32)
            return tf.stack(found)

        finite = tf.reduce_all(tf.math.is_finite(sums))
        return tf.cond(finite, lambda: tf.zeros([self._count], tf.int32), exact)

    def handle(self, flags: np.ndarray, found: int, count: int, sources: Sequence[Any]) -> bool:
        """Raise or log, outside of a graph. A collective if `found` is not 0.

        Args:
            flags: the flags of this rank.
            found: the number of ranks that have gradients that are not finite.
            count: the number of ranks that have not called `join`.
            sources: the variables of the gradients.

        Returns:
            Whether all ranks skip the step.

        Raises:
            NonFiniteGradients: on every rank, with the policy `RAISE`.
        """
        if not found:
            return False
        text = describe(
            self._collectives, _listed(flags, _names_of(sources)), found, count, LAST_FIRST
        )
        raise_or_log(self._collectives, self._policy, text)
        return True

    def handle_in_graph(
        self, flags: tf.Tensor, reduced: Mapping[int, Any], sources: Sequence[Any]
    ) -> tuple[dict[int, Any], tf.Tensor]:
        """Raise or log, in a graph. A collective.

        Args:
            flags: the flags of this rank.
            reduced: the reduced gradients.
            sources: the variables of the gradients.

        Returns:
            The reduced gradients, and whether all ranks skip the step. With the policy `RAISE`,
            both fail with an error of TensorFlow that has the text of NonFiniteGradients.
        """
        own = tf.stack([1, tf.reduce_max(flags)])
        sums = own if self._collectives.single_rank else self._allreduce(own)
        names = _names_of(sources)

        def report() -> tf.Tensor:
            return self._report(flags, sums, names)

        # After all collectives. Otherwise an error could cancel the collectives that other ranks
        # have started.
        with tf.control_dependencies(tf.nest.flatten(dict(reduced), expand_composites=True)):
            done = tf.cond(sums[1] > 0, report, lambda: tf.constant(0))
        with tf.control_dependencies([done]):
            passed = tf.nest.map_structure(tf.identity, dict(reduced), expand_composites=True)
            return passed, tf.identity(sums[1] > 0)

    def _report(self, flags: tf.Tensor, sums: tf.Tensor, names: Sequence[str]) -> tf.Tensor:
        """Raise or log, on all ranks. A collective."""
        ranks = list(self._collectives.ranks)

        @tf.autograph.experimental.do_not_convert
        def report(sums: tf.Tensor, gathered: tf.Tensor) -> int:
            count, found = (int(n) for n in sums)
            # Empty if some ranks are in `join`, because ranks in `join` take part in sums only.
            rows = gathered.numpy()
            texts = {
                rank: names_text(_listed(row, names))
                for rank, row in zip(ranks, rows, strict=False)
            }
            raise_or_log(
                self._collectives,
                self._policy,
                describe_groups(found, count, grouped(texts), LAST_FIRST),
            )
            return 0

        def gather() -> tf.Tensor:
            if self._collectives.single_rank:
                return flags[None]
            return mpi_ops.allgather(
                flags[None],
                f"{self._prefix}.flags",
                ignore_name_scope=True,
                process_set=self._collectives.process_set,
            )

        gathered = tf.cond(
            tf.equal(sums[0], len(ranks)), gather, lambda: tf.zeros((0, self._count), tf.int32)
        )
        done = tf.py_function(report, [sums, gathered], tf.int32)
        return tf.ensure_shape(done, ())

    def _allreduce(self, tensor: tf.Tensor) -> tf.Tensor:
        return mpi_ops._allreduce(
            tensor,
            name=f"{self._prefix}.found",
            op=mpi_ops.Sum,
            ignore_name_scope=True,
            process_set=self._collectives.process_set,
        )


def _values(gradient: Any) -> tf.Tensor:
    """Return the elements of a gradient as real numbers."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if values.dtype.is_complex:
        values = tf.stack([tf.math.real(values), tf.math.imag(values)])
    return values


def _names_of(sources: Sequence[Any]) -> list[str]:
    # Every tf.Variable without a name is called `Variable:0`.
    return unique_names(
        [getattr(s, "path", None) or getattr(s, "name", None) or "tensor" for s in sources]
    )


def _listed(flags: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return the names of gradients that are not finite, the last variables first."""
    return [names[k] for k in np.flatnonzero(flags)[::-1]]
