"""End an epoch in which ranks have different numbers of batches."""

import logging

import torch
from horovod.torch import mpi_ops

from hvdkit.torch import runtime
from hvdkit.torch.wrapped_optimizer import living

log = logging.getLogger("hvdkit.torch")


def join(device: int = -1) -> int:
    """Wait until every rank has called this; until then, add zeros to the other ranks' reductions.

    For ranks with fewer batches than others. Afterwards the ranks compare parameters and settings
    again. Gradients of an incomplete accumulation window are dropped.

    Args:
        device: the GPU for the zeros in collectives of GPU tensors; -1: the current one. The zeros
            in collectives of CPU tensors are on the CPU.

    Returns:
        The last rank to join.
    """
    for optimizer in living():
        if optimizer.accumulated:
            log.warning(
                "hvd.join() drops gradients that no step has used. If all ranks accumulate alike, "
                "call optimizer.flush() before."
            )
            optimizer.reset_step()
            torch.optim.Optimizer.zero_grad(optimizer)
        optimizer.leave_gradients()
        optimizer.complete_deferred()
    if device == -1 and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    last = int(mpi_ops.join(device))
    runtime.begin_generation()
    return last
