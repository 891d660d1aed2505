"""Starting and ending Horovod in a TensorFlow process."""

from typing import Any, NoReturn

import tensorflow as tf

# Not public: nothing else lets an op without inputs run again.
from tensorflow.python.eager import context

from hvdkit.core.runtime import Runtime, loading
from hvdkit.engine.describe import require
from hvdkit.errors import HvdkitError
from hvdkit.tensorflow.devices import use_own_gpu
from hvdkit.tensorflow.graphs import forget_traces, reset_counters

engine = require("tensorflow")

with loading(
    "tensorflow", tf.__version__, engine, (ImportError, tf.errors.NotFoundError, AttributeError)
):
    from horovod.tensorflow import mpi_ops


def _refuse_torchrun() -> NoReturn:
    raise HvdkitError(
        "torchrun has started several ranks, and only ranks with PyTorch can find each other "
        "through it: start this script with `hvdkit run`, horovodrun, mpirun or srun"
    )


_runtime = Runtime("tensorflow", tf.__version__, engine, mpi_ops, use_own_gpu, _refuse_torchrun)

shutdown = _runtime.shutdown


def init(*args: Any, **kwargs: Any) -> None:
    """Initialise Horovod; see `hvdkit.core.runtime.Runtime.init`.

    Functions that reduce gradients are traced again after it: the ranks may be others.
    """
    _runtime.init(*args, **kwargs)
    forget_traces()


def generation() -> int:
    """Changes, on all ranks alike, when what they agreed on before may be void."""
    return _runtime.generation


def join() -> Any:
    """Take no further part until every rank has come here; what the others reduce gets zeros.

    Horovod's, for ranks with fewer batches than others. Afterwards the ranks compare anew what
    they mean to reduce, because one that has joined before its first step never did.

    Returns:
        The last rank to join, an integer tensor.
    """
    if tf.executing_eagerly():
        return _join()
    # When it happens, and not when the graph is traced or optimized.
    return tf.ensure_shape(tf.numpy_function(_join, [], tf.int32), ())


def _join() -> Any:
    # To TensorFlow the op is a constant: it has no inputs and no state. Without this, a second call
    # returns what the first one has, at once.
    context.context().clear_kernel_cache()
    last = mpi_ops.join()
    _runtime.renew()
    # Ranks that have joined early have counted less than others.
    reset_counters()
    return last
