"""Drop-in replacement for `horovod.tensorflow`: `import hvdkit.tensorflow as hvd`.

All public names of horovod.tensorflow for TensorFlow 2 are here, with the same meaning. Docstrings
describe the differences. Names for TensorFlow 1 raise an error that names the replacement.
Importing this package loads TensorFlow, Keras and Horovod. It raises ImportError if Horovod for
TensorFlow is not installed.

Example:
    hvd.init()
    with tf.GradientTape() as tape:
        loss = loss_of(model(batch))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if step == 0:
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
"""

# First, because its error explains what to do if Horovod is missing or does not load.
from hvdkit.tensorflow.runtime import init, join, shutdown  # isort: skip

from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    ccl_built,
    check_extension,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    gpu_available,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    handle_average_backwards_compatibility,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    refs_to_vars,
    rocm_built,
    size,
    size_op,
    split_list,
    start_timeline,
    stop_timeline,
    vars_to_refs,
)

# Scripts modelled on Horovod's own tests read this private name.
from horovod.tensorflow.util import _executing_eagerly as _executing_eagerly

from hvdkit.checkpoint.checkpointers import Stopped
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.sharding import Shard
from hvdkit.errors import RESUMABLE
from hvdkit.reduction.int8 import Int8
from hvdkit.reduction.nonfinite import NonFiniteGradients
from hvdkit.tensorflow import elastic
from hvdkit.tensorflow import mpi_ops as mpi_ops
from hvdkit.tensorflow import util as util
from hvdkit.tensorflow.checkpoint import Checkpointer
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.data import shard
from hvdkit.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdkit.tensorflow.gathering import gather_for_loss
from hvdkit.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from hvdkit.tensorflow.monitor import Monitor
from hvdkit.tensorflow.optimizer import DistributedOptimizer
from hvdkit.tensorflow.process_sets import add_process_set, grid, remove_process_set
from hvdkit.tensorflow.profiling import profile
from hvdkit.tensorflow.sampling import ResumableSampler
from hvdkit.tensorflow.sync_batch_norm import SyncBatchNormalization
from hvdkit.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdkit.tensorflow.unwrapped import noting, register_local
from hvdkit.training.schedules import WarmupCosine

allreduce, grouped_allreduce = noting(allreduce), noting(grouped_allreduce)
reducescatter, grouped_reducescatter = noting(reducescatter), noting(grouped_reducescatter)

__all__ = [
    "RESUMABLE",
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Checkpointer",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Int8",
    "KeepBest",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "Monitor",
    "NonFiniteGradients",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ResumableSampler",
    "Shard",
    "Stopped",
    "Sum",
    "SyncBatchNormalization",
    "WarmupCosine",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "gather_for_loss",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grid",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "profile",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "register_local",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "vars_to_refs",
]
