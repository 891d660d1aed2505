"""Drop-in replacement for `horovod.keras`: `import hvdkit.keras as hvd`. For Keras 3.

KERAS_BACKEND or Keras's configuration selects the framework: TensorFlow or PyTorch. Only Horovod's
extension for this framework is loaded. All public names of horovod.keras and
horovod.tensorflow.keras are here, with the same meaning. Docstrings describe the differences.

Example:
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data, epochs=5, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

# First, because its error explains what to do if Keras runs on another backend.
from hvdkit.keras import backend  # isort: skip

from hvdkit.checkpoint.checkpointers import Stopped
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.errors import RESUMABLE
from hvdkit.keras import callbacks, elastic
from hvdkit.keras.data import ResumableSampler
from hvdkit.keras.fit.batch_check import wrap_train_function
from hvdkit.keras.fit.callback_list import wrap_callback_lists
from hvdkit.keras.fit.collective_callbacks import local_fit
from hvdkit.keras.fit.fit_call import wrap_fit
from hvdkit.keras.fit.resuming import wrap_epochs
from hvdkit.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_model,
    gather_for_loss,
    reducescatter,
)
from hvdkit.keras.models import load_model, wrap_compile
from hvdkit.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, flush
from hvdkit.keras.overlap import wrap_train_step
from hvdkit.keras.prediction import predict
from hvdkit.keras.sharding import shard
from hvdkit.keras.unwrapped import watch_optimizers
from hvdkit.reduction.nonfinite import NonFiniteGradients

Adasum = backend.hvd.Adasum
Average = backend.hvd.Average
Compression = backend.hvd.Compression
Int8 = backend.hvd.Int8
ProcessSet = backend.hvd.ProcessSet
Sum = backend.hvd.Sum
add_process_set = backend.hvd.add_process_set
broadcast_object = backend.hvd.broadcast_object
ccl_built = backend.hvd.ccl_built
cross_rank = backend.hvd.cross_rank
cross_size = backend.hvd.cross_size
cuda_built = backend.hvd.cuda_built
ddl_built = backend.hvd.ddl_built
global_process_set = backend.hvd.global_process_set
grid = backend.hvd.grid
gloo_built = backend.hvd.gloo_built
gloo_enabled = backend.hvd.gloo_enabled
init = backend.hvd.init
is_initialized = backend.hvd.is_initialized
local_rank = backend.hvd.local_rank
local_size = backend.hvd.local_size
mpi_built = backend.hvd.mpi_built
mpi_enabled = backend.hvd.mpi_enabled
mpi_threads_supported = backend.hvd.mpi_threads_supported
nccl_built = backend.hvd.nccl_built
rank = backend.hvd.rank
remove_process_set = backend.hvd.remove_process_set
register_local = backend.hvd.register_local
rocm_built = backend.hvd.rocm_built
shutdown = backend.hvd.shutdown
size = backend.hvd.size
start_timeline = backend.hvd.start_timeline
stop_timeline = backend.hvd.stop_timeline

__all__ = [
    "RESUMABLE",
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Int8",
    "KeepBest",
    "NonFiniteGradients",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "ResumableSampler",
    "Stopped",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_model",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "flush",
    "gather_for_loss",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grid",
    "init",
    "is_initialized",
    "load_model",
    "local_fit",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "predict",
    "rank",
    "reducescatter",
    "register_local",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

wrap_compile()
wrap_epochs()
wrap_fit()
wrap_callback_lists()
wrap_train_function()
wrap_train_step()
watch_optimizers()
