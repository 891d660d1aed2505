"""Horovod for PyTorch: `import hvdkit.torch as hvd` replaces `import horovod.torch as hvd`.

All public names of horovod.torch are here, with the same meaning. Docstrings describe the
differences. The import loads torch and Horovod, and raises ImportError if no Horovod for PyTorch is
installed.

Example:
    hvd.init()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

# First, because its errors say what to do if Horovod is missing or does not load.
from hvdkit.torch.runtime import init, shutdown  # isort: skip

from horovod.torch import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    ccl_built,
    check_extension,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_lib_v2,  # noqa: F401
    mpi_threads_supported,
    nccl_built,
    poll,
    rank,
    reducescatter,
    reducescatter_async,
    rocm_built,
    size,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    synchronize,
)

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.checkpoint.checkpointers import Stopped
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.sharding import Shard
from hvdkit.errors import RESUMABLE
from hvdkit.reduction.int8 import Int8
from hvdkit.reduction.nonfinite import NonFiniteGradients
from hvdkit.reduction.step_errors import BackwardFailed, GradientsChanged, PassesDiffer
from hvdkit.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm  # noqa: F401
from hvdkit.torch.amp import GradScaler, patch_torch_grad_scaler
from hvdkit.torch.autotune import autotune
from hvdkit.torch.checkpoint import Checkpointer
from hvdkit.torch.clipping import clip_grad_norm_
from hvdkit.torch.compression import Compression
from hvdkit.torch.data.distributed_sampler import DistributedSampler
from hvdkit.torch.data.equal_batches import equal_batches
from hvdkit.torch.data.sampling import ResumableSampler
from hvdkit.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdkit.torch.gathering import gather_for_loss
from hvdkit.torch.in_place import (
    allreduce_,
    allreduce_async_,
    broadcast_,
    broadcast_async_,
    grouped_allreduce_,
    grouped_allreduce_async_,
)
from hvdkit.torch.joining import join
from hvdkit.torch.monitor import Monitor
from hvdkit.torch.noise_scale import GradientNoiseScale
from hvdkit.torch.optimizer import DistributedOptimizer, no_sync
from hvdkit.torch.process_sets import add_process_set, grid, remove_process_set
from hvdkit.torch.profiling import profile
from hvdkit.torch.sync_batch_norm import SyncBatchNorm
from hvdkit.torch.unwrapped import register_local
from hvdkit.training.schedules import WarmupCosine

#: The former name of `RankMismatchError`, kept for one release.
RanksDisagree = RankMismatchError

__all__ = [
    "RESUMABLE",
    "Adasum",
    "Average",
    "BackwardFailed",
    "Checkpointer",
    "Compression",
    "DistributedOptimizer",
    "DistributedSampler",
    "GradScaler",
    "GradientNoiseScale",
    "GradientsChanged",
    "HorovodInternalError",
    "Int8",
    "KeepBest",
    "Max",
    "Min",
    "Monitor",
    "NonFiniteGradients",
    "PassesDiffer",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "RanksDisagree",
    "ResumableSampler",
    "Shard",
    "Stopped",
    "Sum",
    "SyncBatchNorm",
    "WarmupCosine",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "autotune",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "clip_grad_norm_",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "equal_batches",
    "gather_for_loss",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grid",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "no_sync",
    "poll",
    "profile",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "register_local",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

patch_torch_grad_scaler()
