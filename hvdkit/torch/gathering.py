"""Gather for a loss: an allgather whose gradient is the sum over ranks."""

from typing import Any

import torch
from horovod.torch import mpi_ops


def gather_for_loss(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> torch.Tensor:
    """Return all ranks' rows for a loss that each rank computes of them, as in SimCLR or CLIP.

    The result is that of `allgather`. Only the gradient differs: it is the sum of all ranks'
    gradients of this rank's rows, as with `torch.distributed.nn.all_gather`. The gradient of
    `allgather` is their mean. An optimizer of hvdkit then takes the mean over ranks. With this sum,
    that mean is the gradient of the mean of the ranks' losses.

    Args:
        tensor: rows, of shape `(rows, ...)`. All dimensions but the first are the same on every
            rank. A scalar is one row.
        name: name of the collective, the same on every rank.
        process_set: the ranks to gather from; every one of them must call this function, and
            compute the gradient.

    Returns:
        The rows of all ranks in their order, of the dtype of `tensor`.
    """
    summed = _MultipliedGradient.apply(tensor, process_set)
    return mpi_ops.allgather(summed, name=name, process_set=process_set)


class _MultipliedGradient(torch.autograd.Function):
    """The identity. Its gradient is multiplied by the number of ranks, as allgather divides by it.

    With torch.distributed, the gradient is not divided:
    https://github.com/pytorch/pytorch/pull/45789.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, process_set: mpi_ops.ProcessSet) -> torch.Tensor:
        ctx.process_set = process_set
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.process_set.size(), None
