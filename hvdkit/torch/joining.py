"""`hvd.join`: end an epoch in which ranks have different numbers of batches."""

import logging

import torch
from horovod.torch import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.monitor.monitor import complete_started_reports
from hvdkit.torch import runtime
from hvdkit.torch.wrapped_optimizer import wrapped_optimizers

log = logging.getLogger("hvdkit.torch")


def join(device: int = -1) -> int:
    """Wait until every rank has called `join`; contribute zeros to the other ranks' reductions.

    Call it at the end of an epoch in which ranks have different numbers of batches. Afterwards the
    ranks compare parameters and settings again. Gradients of an open accumulation window are
    dropped.

    Args:
        device: the GPU on which zeros for reductions of GPU tensors are made; -1 for the current
            GPU. Zeros for reductions of CPU tensors are made on the CPU.

    Returns:
        The last rank to join.

    Raises:
        UsageError: an optimizer has `shard`.
    """
    for optimizer in wrapped_optimizers():
        if optimizer.shards is not None:
            raise UsageError(
                "hvd.join() was called with a sharded optimizer, of which each rank must step its "
                "share: expected as many batches on all ranks, such as those of a "
                "hvd.DistributedSampler, or hvd.DistributedOptimizer without shard"
            )
        if optimizer.reducer.accumulated or optimizer.reducer.window.counts.dropped:
            log.warning(
                "hvd.join() dropped gradients that no step has used. To use them, call "
                "optimizer.flush() before hvd.join(). All ranks must then have made the same "
                "number of passes."
            )
            optimizer.discard_accumulated()
            torch.optim.Optimizer.zero_grad(optimizer)
        optimizer.reducer.mark_gradients_used()
        optimizer.reducer.rounds.complete_deferred()
    complete_started_reports()
    if device == -1 and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    last = int(mpi_ops.join(device))
    runtime.begin_generation()
    for optimizer in wrapped_optimizers():
        if optimizer.hvdkit_tuner is not None:
            optimizer.hvdkit_tuner.cancel()
    return last
