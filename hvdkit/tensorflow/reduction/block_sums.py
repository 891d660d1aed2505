"""Sums that are sent as blocks of 8-bit integers (`hvdkit.reduction.int8`), with any engine.

hvdkit's own engine has such sums for the CPU (`hvdkit/engine/sources/int8_blocks.h`). Here the same
format is computed by TensorFlow, on any device, and sent by `alltoall` and `allgather`.
"""

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.reduction.int8 import BLOCK, BLOCK_BYTES


def sum_blocks(
    buffer: tf.Tensor, name: str, factor: float, process_set: mpi_ops.ProcessSet
) -> tf.Tensor:
    """Return the sum over the ranks, times a factor.

    Each rank gets one part of the buffer from all ranks, adds the parts, and sends the sums to all.

    Args:
        buffer: float32, of shape [elements].
        name: the prefix of the collectives' names.
        factor: multiply the sum by it.
        process_set: the ranks.
    """
    elements, ranks = buffer.shape.num_elements(), process_set.size()
    blocks = -(-elements // BLOCK)
    blocks += -blocks % ranks
    padded = tf.pad(buffer, [[0, blocks * BLOCK - elements]])
    received = mpi_ops.alltoall(
        encode(tf.reshape(padded, [-1, BLOCK])),
        name=f"{name}.parts",
        ignore_name_scope=True,
        process_set=process_set,
    )
    received = tf.ensure_shape(received, [blocks, BLOCK_BYTES])
    total, *parts = tf.split(decode(received), ranks)
    for part in parts:  # in the order of the ranks
        total += part
    sums = mpi_ops.allgather(
        encode(total * factor), name=f"{name}.sums", ignore_name_scope=True, process_set=process_set
    )
    return tf.reshape(decode(tf.ensure_shape(sums, [blocks, BLOCK_BYTES])), [-1])[:elements]


def encode(numbers: tf.Tensor) -> tf.Tensor:
    """Encode each block as a float32 scale and a code of 8 bits for each number.

    Args:
        numbers: float32, of shape [blocks, BLOCK].

    Returns:
        uint8, of shape [blocks, BLOCK_BYTES].
    """
    # A maximum of floats may ignore NaN. The bits of positive floats have the order of integers,
    # in which infinity and NaN are the largest.
    bits = tf.bitwise.bitwise_and(tf.bitcast(numbers, tf.int32), tf.int32.max)
    largest = tf.bitcast(tf.reduce_max(bits, 1, keepdims=True), tf.float32)
    scale = largest / 127
    # Division may round down, which matters for subnormal numbers.
    above = tf.bitcast(tf.bitcast(scale, tf.int32) + 1, tf.float32)
    scale = tf.where(scale * 127 < largest, above, scale)
    scale = tf.where(tf.math.is_finite(largest), scale, float("nan"))
    quotients = tf.where(scale > 0, numbers / tf.where(scale > 0, scale, 1.0), 0.0)
    codes = tf.cast(tf.round(quotients), tf.int8)
    head = tf.reshape(tf.bitcast(scale, tf.uint8), [-1, 4])
    return tf.concat([head, tf.bitcast(codes, tf.uint8)], 1)


def decode(blocks: tf.Tensor) -> tf.Tensor:
    """Return the numbers that `encode` has rounded: float32, of shape [blocks, BLOCK]."""
    scale = tf.bitcast(blocks[:, :4], tf.float32)
    codes = tf.cast(tf.bitcast(blocks[:, 4:], tf.int8), tf.float32)
    return codes * scale[:, tf.newaxis]
