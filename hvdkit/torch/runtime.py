"""Start and end Horovod in a PyTorch process."""

from collections.abc import Mapping

import torch

from hvdkit.core.runtime import Runtime, loading
from hvdkit.engine.describe import require
from hvdkit.torch.devices import use_own_gpu


def _connect_under_torchrun() -> Mapping[str, str]:
    # Imports what other launches have no need of.
    from hvdkit.torch import torchrun

    return torchrun.horovod_variables()


engine = require("torch")

with loading("torch", torch.__version__, engine):
    from horovod.torch import mpi_ops

_runtime = Runtime(
    "torch", torch.__version__, engine, mpi_ops, use_own_gpu, _connect_under_torchrun
)

init = _runtime.init
shutdown = _runtime.shutdown


def generation() -> int:
    """Return a number that changes on all ranks when earlier agreements are void."""
    return _runtime.generation


def begin_generation() -> None:
    """Make earlier agreements of the ranks void, on all ranks after `join`."""
    _runtime.begin_generation()
