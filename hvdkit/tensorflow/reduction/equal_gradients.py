"""Find gradients that are equal on several ranks before they are reduced.

Gradients of different data differ. If they are equal to the last bit, the ranks train the same
data, or a distributed tape has reduced the gradients already. A second mean changes nothing. A
second sum multiplies the gradients by the number of ranks.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.replicas import SMALL
from hvdkit.agreement.same_data import PASSES, warn_of_equal
from hvdkit.errors import UsageError
from hvdkit.tensorflow.graphs import GraphValue
from hvdkit.tensorflow.variables import NotedVariables, tf_variable_or_none

_log = logging.getLogger("hvdkit.tensorflow")

_SAME_DATA_ADVICE = (
    "Give each rank its own part: dataset = hvd.shard(dataset). Random data need another seed on "
    "each rank"
)
_TWICE = (
    "gradients are reduced twice: by hvd.DistributedGradientTape, and by the optimizer of "
    "hvd.DistributedOptimizer"
)
_TWICE_ADVICE = "Use one of them: a plain tf.GradientTape, or the plain optimizer"

#: The variables whose gradients a tape has reduced.
by_tapes = NotedVariables()


class EqualGradients:
    """Compare a few small gradients of the first `PASSES` reductions of one plan between ranks.

    The ranks compare gradients and not the operations that computed them, because a graph may
    return gradients that another graph applies. The count of a graph begins at 0 again after
    `join`, because joined ranks do not count. A tape that begins to reduce the same gradients after
    these reductions is not found.

    Args:
        prefix: the prefix of the collectives' names.
        process_set: the ranks.
        of_tape: whether a tape reduces these gradients, and not an optimizer.
        average: whether the reduction is a mean.
    """

    def __init__(
        self, prefix: str, process_set: mpi_ops.ProcessSet, of_tape: bool, average: bool
    ) -> None:
        self._name = f"{prefix}.first"
        self._process_set = process_set
        self._of_tape = of_tape
        self._average = average
        self._count = GraphValue(tf.int32)
        # Rank -> digest of all passes so far, 0 if unknown.
        self._digests: dict[int, int] = {}
        self._warned = False

    def compare(self, gradients: Mapping[int, Any], variables: Sequence[Any]) -> None:
        """Count one eager reduction, and compare its gradients. A collective in the first calls.

        Args:
            gradients: this rank's gradients by the index of the variable, before the reduction.
            variables: the variables.

        Raises:
            UsageError: on every rank, if a sum has reduced the gradients twice.
        """
        count = int(self._count.numpy())
        if count < PASSES:
            self._count.set(count + 1)
            table = self._table(self._tensors(gradients, variables), variables)
            self._note(count, table.numpy())

    def compare_in_graph(
        self, gradients: Mapping[int, Any], variables: Sequence[Any], reduced: Sequence[tf.Tensor]
    ) -> None:
        """Count one reduction in a graph, and compare its gradients; see `compare`.

        Args:
            gradients: as for `compare`.
            variables: as for `compare`.
            reduced: the reduced gradients. An error before them could cancel collectives that other
                ranks have started.
        """
        tensors = self._tensors(gradients, variables)
        handle = self._count.handle()
        # Not before the gradients: at the end of the data, they are not computed.
        with tf.device("/cpu:0"), tf.control_dependencies([*tensors, *reduced]):
            count = self._count.read(handle)
            self._count.assign(handle, count + 1)
            tf.cond(
                count < PASSES,
                lambda: self._check(count, tensors, variables),
                lambda: tf.constant(0),
            )

    def _check(
        self, count: tf.Tensor, tensors: Sequence[tf.Tensor], variables: Sequence[Any]
    ) -> tf.Tensor:
        @tf.autograph.experimental.do_not_convert
        def note(count: tf.Tensor, table: tf.Tensor) -> int:
            self._note(int(count), table.numpy())
            return 0

        done = tf.py_function(note, [count, self._table(tensors, variables)], tf.int32)
        return tf.ensure_shape(done, ())

    def _tensors(self, gradients: Mapping[int, Any], variables: Sequence[Any]) -> list[tf.Tensor]:
        """Return the tensors of the gradients of the smallest variables."""
        smallest = sorted(gradients, key=lambda i: math.prod(variables[i].shape))[:SMALL]
        found: list[tf.Tensor] = tf.nest.flatten(
            [gradients[i] for i in smallest], expand_composites=True
        )
        return found

    def _table(self, tensors: Sequence[tf.Tensor], variables: Sequence[Any]) -> tf.Tensor:
        """Return, for each rank, the digest of its gradients and whether a tape reduces them.

        A collective. A digest is 0 if the gradients are zero or not finite, and in `join`.
        """
        ranks = list(self._process_set.ranks)
        ids = [id(v) for each in variables if (v := tf_variable_or_none(each)) is not None]

        @tf.autograph.experimental.do_not_convert
        def own(*values: tf.Tensor) -> np.ndarray:
            by_tape = any(by_tapes.has_id(each, ranks) for each in ids)
            return np.array([_digest(values), by_tape], np.int64)

        if tf.executing_eagerly():
            row = tf.constant(own(*tensors))
        else:
            row = tf.ensure_shape(tf.py_function(own, tensors, tf.int64), (2,))
        before = ranks.index(mpi_ops.rank())
        return mpi_ops._allreduce(
            tf.pad(row[None], [[before, len(ranks) - before - 1], [0, 0]]),
            name=self._name,
            op=mpi_ops.Sum,
            ignore_name_scope=True,
            process_set=self._process_set,
        )

    def _note(self, count: int, table: np.ndarray) -> None:
        """Warn or raise on the data of one reduction. The same on all ranks; not a collective."""
        ranks = self._process_set.ranks
        digests = table[:, 0].tolist()
        is_first = mpi_ops.rank() == ranks[0]
        if not self._of_tape and digests[0] and len({*digests}) == 1 and table[:, 1].any():
            if not self._average:
                raise UsageError(
                    f"{_TWICE}, which would multiply them by {len(ranks)}, because its op is "
                    f"hvd.Sum. {_TWICE_ADVICE}"
                )
            if is_first and not self._warned:
                _log.warning(
                    "%s. The second mean costs time and changes nothing. %s.",
                    *(_TWICE, _TWICE_ADVICE),
                )
            self._warned = True
        for rank, digest in zip(ranks, digests, strict=True):
            earlier = self._digests.get(rank, 1) if count else 1
            text = f"{earlier} {digest}".encode()
            self._digests[rank] = xxhash.xxh64_intdigest(text) if earlier and digest else 0
        if count == PASSES - 1 and self._of_tape and is_first:
            known = {rank: digest for rank, digest in self._digests.items() if digest}
            warn_of_equal(known, "gradients", _SAME_DATA_ADVICE)


def _digest(tensors: Sequence[tf.Tensor]) -> int:
    """Return a digest of gradients, of 62 bits; 0 if all are zero or one is not finite."""
    state = xxhash.xxh64()
    is_zero = True
    for tensor in tensors:
        array = np.ascontiguousarray(tensor.numpy())
        if array.dtype.kind not in "iu":
            # NumPy does not know that bfloat16 is a floating-point type.
            numbers = array if array.dtype.kind == "c" else array.astype(np.float64)
            if not np.isfinite(numbers).all():
                return 0
            is_zero = is_zero and not numbers.any()
        state.update(array.tobytes())
    return 0 if is_zero else (state.intdigest() >> 2) | 1
