"""Starting and ending Horovod in a PyTorch process."""

import torch

from hvdkit.core.runtime import Runtime, loading
from hvdkit.engine.describe import require
from hvdkit.torch.devices import use_own_gpu

engine = require("torch")

with loading("torch", torch.__version__, engine):
    from horovod.torch import mpi_ops

_runtime = Runtime("torch", torch.__version__, engine, mpi_ops, use_own_gpu)

init = _runtime.init
shutdown = _runtime.shutdown


def generation() -> int:
    """Changes, on all ranks alike, when what they agreed on before may be void."""
    return _runtime.generation


def join(device: int = -1) -> int:
    """Take no further part until every rank has come here; what the others reduce gets zeros.

    Horovod's, for ranks with fewer batches than others. Afterwards the ranks compare anew what
    they mean to reduce, because one that has joined before its first step never did.

    Args:
        device: where to make the zeros: a GPU's number, or -1 for the CPU.

    Returns:
        The last rank to join.
    """
    last = int(mpi_ops.join(device))
    _runtime.renew()
    return last
