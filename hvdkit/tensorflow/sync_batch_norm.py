"""Batch normalization with the statistics of all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement.collectives import check_process_set, is_single_rank
from hvdkit.errors import UsageError
from hvdkit.tensorflow.graphs import retrace_after_init, trace_position
from hvdkit.tensorflow.variables import tf_variable_or_none

# The id of a `tf.Variable` -> the layer that has it, and that has normalized in training.
_layers: "WeakValueDictionary[int, SyncBatchNormalization]" = WeakValueDictionary()


@keras.saving.register_keras_serializable(package="hvdkit")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with the statistics of all ranks' batches.

    In training, mean and variance are computed over the samples of all ranks, without masked
    samples. Each sample has the same weight, also if ranks have batches of different sizes.
    Gradients equal the gradients of one process with the whole batch. The forward pass costs a
    small allgather, the backward pass a small allreduce.

    A saved model loads wherever `hvdkit.tensorflow` is imported. The file does not contain
    `process_set`: set `layer.process_set` after loading.

    Args:
        fused: for compatibility with Horovod; must be False.
        process_set: the ranks whose batches are normalized together. Gradients of the layer must be
            reduced over these ranks, and maybe over others: otherwise the reduction raises
            `UsageError`. On other ranks, the layer is a plain `BatchNormalization`.
        kwargs: arguments of `keras.layers.BatchNormalization`.

    Raises:
        UsageError: `fused` is True or None, `process_set` is not a process set, or Keras does not
            run on TensorFlow.
    """

    def __init__(
        self,
        fused: bool | None = False,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
        **kwargs: Any,
    ) -> None:
        if fused is not False:
            raise UsageError(
                f"fused is {fused}: a fused kernel cannot share its statistics; omit the argument"
            )
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"Keras runs on {keras.backend.backend()}: expected KERAS_BACKEND=tensorflow"
            )
        check_process_set(process_set)
        super().__init__(**kwargs)
        self.process_set = process_set

    @tf.autograph.experimental.do_not_convert
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        retrace_after_init()
        _layers.update((id(variable.value), self) for variable in self.trainable_variables)
        if is_single_rank(self.process_set):
            return super()._moments(inputs, mask)
        if mask is not None:
            mask = tf.cast(tf.expand_dims(mask, -1), tf.bool)
            mask = tf.broadcast_to(mask, tf.shape(inputs))
        return _moments_of_all(inputs, mask, self._reduction_axes, self.process_set)


def check_ranks(sources: Iterable[Any], ranks: Sequence[int]) -> None:
    """Check that no layer normalizes over a rank that has no part in the gradients of the layer.

    Such a rank trains another model, whose samples would change the statistics.

    Args:
        sources: the sources of the gradients that are reduced.
        ranks: the ranks over which they are reduced.

    Raises:
        UsageError: a layer does so. The same on every rank.
    """
    for source in sources:
        variable = tf_variable_or_none(source)
        layer = _layers.get(id(variable))
        if layer is None or all(variable is not own.value for own in layer.trainable_variables):
            continue
        if not set(layer.process_set.ranks) <= set(ranks):
            raise UsageError(
                f"a SyncBatchNormalization normalizes over ranks {layer.process_set.ranks}, but "
                f"its gradients are reduced over ranks {list(ranks)}, so the statistics would be "
                f"those of different models: pass the process_set of the tape or the optimizer to "
                f"SyncBatchNormalization, too"
            )


def _moments_of_all(
    inputs: Any, mask: Any, axes: Sequence[int], process_set: mpi_ops.ProcessSet
) -> tuple[Any, Any]:
    """Return the mean and variance of each channel over the ranks' `inputs` where `mask` is True.

    Args:
        inputs: float32 or float64.
        mask: bool, of the shape of `inputs`; None: use all inputs.
        axes: the axes to reduce over, all but one.
        process_set: the ranks.
    """
    # A rank may be in other sets, too, in which it calls layers at other times.
    key = SyncBatchNormalization, process_set
    name = f"hvdkit.sync_batch_norm.{trace_position(key)}"
    # Keras adds epsilon to the count under a mask, so that an empty batch is not 0 / 0.
    extra_count = 0.0 if mask is None else keras.backend.epsilon()
    along_channels = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]

    def centered(x: Any, mean: Any) -> Any:
        distance = x - tf.reshape(mean, along_channels)
        return distance if mask is None else tf.where(mask, distance, 0)

    @tf.custom_gradient
    def moments(x: Any) -> Any:
        if mask is None:
            own_sum = tf.reduce_sum(x, axes)
            samples = tf.size(x) / tf.maximum(tf.size(own_sum), 1)
            own_count = tf.fill(tf.shape(own_sum), tf.cast(samples, x.dtype))
        else:
            own_sum = tf.reduce_sum(tf.where(mask, x, 0), axes)
            own_count = tf.reduce_sum(tf.cast(mask, x.dtype), axes)
        own_mean = tf.math.divide_no_nan(own_sum, own_count)
        # Squares around each rank's own mean are combined with the mean of all. E[x^2] - E[x]^2
        # would lose the variance of values that are far from 0.
        own_squares = tf.reduce_sum(centered(x, own_mean) ** 2, axes)
        own = tf.stack([own_count, own_mean, own_squares])[None]
        # Second derivatives follow this path, because `gradient` uses the mean. The gradient of
        # allgather is divided by the number of ranks. (A custom gradient cannot be nested here.)
        own += (process_set.size() - 1) * (own - tf.stop_gradient(own))
        gathered = mpi_ops.allgather(own, name, ignore_name_scope=True, process_set=process_set)
        counts, means, squares = tf.unstack(gathered, axis=1)
        count = tf.reduce_sum(counts, 0)
        divisor = count + tf.cast(extra_count, x.dtype)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), divisor)
        total_squares = tf.reduce_sum(squares + counts * (means - mean) ** 2, 0)
        variance = tf.math.divide_no_nan(total_squares, divisor)

        def gradient(grad_mean: Any, grad_variance: Any) -> Any:
            # Every rank's loss depends on these moments, which depend on every rank's inputs.
            grad_mean, grad_variance = tf.unstack(
                mpi_ops._allreduce(
                    tf.stack([grad_mean, grad_variance]),
                    name=f"{name}.gradient.{trace_position((*key, name))}",
                    op=mpi_ops.Sum,
                    ignore_name_scope=True,
                    process_set=process_set,
                )
            )
            # Because of the extra count, the mean does not minimize the sum of squares, so the
            # variance depends on the mean.
            mean_term = 2 * mean * tf.math.divide_no_nan(divisor - count, divisor)
            constant = tf.math.divide_no_nan(grad_mean - grad_variance * mean_term, divisor)
            slope = tf.math.divide_no_nan(2 * grad_variance, divisor)
            constant, slope = (tf.reshape(t, along_channels) for t in (constant, slope))
            if mask is not None:
                constant = tf.where(mask, constant, 0)
            return constant + slope * centered(x, mean)

        return (mean, variance), gradient

    mean, variance = moments(inputs)
    return mean, variance
