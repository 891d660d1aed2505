"""Batch normalization with the statistics of all ranks."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.core.collectives import is_alone
from hvdkit.errors import UsageError
from hvdkit.tensorflow.graphs import place, trace_again_after_init


@keras.saving.register_keras_serializable(package="hvdkit")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` over the batches of all ranks together.

    In training, mean and variance are those of all ranks' samples, each with the same weight
    however many its rank has, masked ones left out; gradients are those of one process with the
    whole batch. A step costs a small allgather, and on the way back a small allreduce.

    A saved model loads wherever `hvdkit.tensorflow` is imported.

    Args:
        fused: must be False; Horovod's layer has it.
        kwargs: those of `keras.layers.BatchNormalization`.

    Raises:
        UsageError: `fused` is True or None, or Keras does not run on TensorFlow.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused is not False:
            raise UsageError(
                f"fused is {fused}: a fused kernel cannot share its statistics, leave it out"
            )
        if keras.backend.backend() != "tensorflow":
            raise UsageError(
                f"Keras runs on {keras.backend.backend()}: expected KERAS_BACKEND=tensorflow"
            )
        super().__init__(**kwargs)

    @tf.autograph.experimental.do_not_convert
    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        trace_again_after_init()
        if is_alone(mpi_ops.global_process_set):
            return super()._moments(inputs, mask)
        if mask is not None:
            mask = tf.cast(tf.expand_dims(mask, -1), tf.bool)
            mask = tf.broadcast_to(mask, tf.shape(inputs))
        return _moments_of_all(inputs, mask, self._reduction_axes)


def _moments_of_all(inputs: Any, mask: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """Mean and variance for each channel, of all ranks' `inputs` where `mask` is True.

    Args:
        inputs: float32 or float64.
        mask: of the shape of `inputs`, or None for all of them.
        axes: those to reduce over, all but one.
    """
    name = f"hvdkit.sync_batch_norm.{place(SyncBatchNormalization)}"
    # What Keras adds to the count under a mask, so that a batch without anything is not 0 / 0.
    spare = 0.0 if mask is None else keras.backend.epsilon()
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
        # About each rank's own mean, and then about that of all: E[x^2] - E[x]^2 would lose the
        # variance of values that are far from 0.
        own_squares = tf.reduce_sum(centered(x, own_mean) ** 2, axes)
        everyones = mpi_ops.allgather(
            tf.stack([own_count, own_mean, own_squares])[None], name, ignore_name_scope=True
        )
        counts, means, squares = tf.unstack(everyones, axis=1)
        count = tf.reduce_sum(counts, 0)
        divisor = count + tf.cast(spare, x.dtype)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), divisor)
        apart = squares + counts * (means - mean) ** 2
        variance = tf.math.divide_no_nan(tf.reduce_sum(apart, 0), divisor)

        def gradient(of_mean: Any, of_variance: Any) -> Any:
            # Every rank's loss depends on these moments, and so on every rank's inputs.
            of_mean, of_variance = tf.unstack(
                mpi_ops._allreduce(
                    tf.stack([of_mean, of_variance]),
                    name=f"{name}.gradient.{place((SyncBatchNormalization, name))}",
                    op=mpi_ops.Sum,
                    ignore_name_scope=True,
                )
            )
            # The squares are about the mean, which a spare count moves away from their minimum.
            tilt = 2 * mean * tf.math.divide_no_nan(divisor - count, divisor)
            constant = tf.math.divide_no_nan(of_mean - of_variance * tilt, divisor)
            slope = tf.math.divide_no_nan(2 * of_variance, divisor)
            constant, slope = (tf.reshape(t, along_channels) for t in (constant, slope))
            if mask is not None:
                constant = tf.where(mask, constant, 0)
            return constant + slope * centered(x, mean)

        return (mean, variance), gradient

    mean, variance = moments(inputs)
    return mean, variance
