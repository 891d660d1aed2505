"""Start and shut down Horovod in a PyTorch process."""

from collections.abc import Mapping

import torch

from hvdkit.engine.describe import require
from hvdkit.runtime.lifecycle import Runtime, loading, refuse_in_fork
from hvdkit.torch.devices import use_own_gpu
from hvdkit.torch.inference import allow_inference_mode
from hvdkit.torch.plain_tensors import check_collectives
from hvdkit.training.stragglers import wait_measured


def _torchrun_variables() -> Mapping[str, str]:
    # Imported on use, because only torchrun needs it.
    from hvdkit.torch import torchrun

    return torchrun.horovod_variables()


engine = require("torch")

with loading("torch", torch.__version__, engine):
    import horovod.torch
    from horovod.torch import mpi_ops

allow_inference_mode(mpi_ops, horovod.torch)
check_collectives(mpi_ops)
# All functions of Horovod that wait for a collective call this one, also those of SyncBatchNorm.
mpi_ops.mpi_lib.horovod_torch_wait_and_clear = wait_measured(
    mpi_ops.mpi_lib.horovod_torch_wait_and_clear
)
_COLLECTIVES = [
    name
    for name in dir(mpi_ops.mpi_lib)
    if "_async_" in name or name in ("horovod_torch_join", "horovod_torch_barrier")
]


def _refuse_collectives() -> None:
    for name in _COLLECTIVES:
        setattr(mpi_ops.mpi_lib, name, refuse_in_fork)


_runtime = Runtime(
    "torch",
    torch.__version__,
    engine,
    mpi_ops,
    use_own_gpu,
    _torchrun_variables,
    _refuse_collectives,
)

for _name in ("horovod_torch_wait_and_clear", *_COLLECTIVES):
    _function = getattr(mpi_ops.mpi_lib, _name)
    setattr(mpi_ops.mpi_lib, _name, _runtime.departure.explained(_function))

init = _runtime.init
host_collectives = _runtime.host_collectives
recorder = _runtime.recorder
shutdown = _runtime.shutdown


def generation() -> int:
    """Return a number that increases on all ranks with each `init`, and at the end of `join`."""
    return _runtime.generation


def begin_generation() -> None:
    """Increase `generation`, after the return from `join`."""
    _runtime.begin_generation()
