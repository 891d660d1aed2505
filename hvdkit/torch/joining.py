"""Ending an epoch in which ranks have different numbers of batches."""

import logging

import torch
from horovod.torch import mpi_ops

from hvdkit.torch import runtime
from hvdkit.torch.wrapped_optimizer import living

log = logging.getLogger("hvdkit.torch")


def join(device: int = -1) -> int:
    """Wait until every rank has called this; until then, add zeros to what the others reduce.

    For ranks with fewer batches than others. Afterwards the ranks compare again what they reduce.
    Gradients of an open accumulation window are dropped.

    Args:
        device: the GPU on which zeros for collectives of GPU tensors are made; -1: the current
            one. Zeros for collectives of CPU tensors are made on the CPU.

    Returns:
        The last rank to join.
    """
    for optimizer in living():
        if optimizer.accumulated:
            log.warning(
                "hvd.join() was called with gradients that no step has used: they are dropped. "
                "Call optimizer.flush() before, where all ranks accumulate alike."
            )
            optimizer.begin_anew()
            torch.optim.Optimizer.zero_grad(optimizer)
        optimizer.leave_gradients()
        optimizer.settle()
    if device == -1 and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    last = int(mpi_ops.join(device))
    runtime.renew()
    return last
