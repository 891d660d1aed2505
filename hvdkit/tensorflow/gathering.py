"""Gather for a loss: an allgather whose gradient is the sum over ranks."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops


def gather_for_loss(
    tensor: Any,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> Any:
    """Return all ranks' rows for a loss that each rank computes of them, as in SimCLR or CLIP.

    The result is that of `allgather`. Only the gradient differs: it is the sum of all ranks'
    gradients of this rank's rows. The gradient of `allgather` is their mean. The tape and the
    optimizer of hvdkit then take the mean over ranks. With this sum, that mean is the gradient of
    the mean of the ranks' losses.

    Args:
        tensor: rows, of shape `(rows, ...)`. All dimensions but the first are the same on every
            rank. A scalar is one row.
        name: name of the collective, the same on every rank.
        process_set: the ranks to gather from; every one of them must call this function, and
            compute the gradient.

    Returns:
        The rows of all ranks in their order, of the dtype of `tensor`.
    """
    ranks = process_set.size()

    @tf.custom_gradient
    def summed(rows: Any) -> tuple[Any, Callable[[Any], Any]]:
        # The gradient of allgather is divided by the number of ranks.
        return tf.identity(rows), lambda gradient: gradient * tf.cast(ranks, gradient.dtype)

    rows = summed(tf.convert_to_tensor(tensor))
    return mpi_ops.allgather(rows, name=name, process_set=process_set)
