"""Starting and ending Horovod in a TensorFlow process."""

from typing import Any, NoReturn

import tensorflow as tf

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
    last = mpi_ops.join()
    if tf.executing_eagerly():
        return _joined(last)
    # When it happens, and not when the graph is traced.
    return tf.numpy_function(_joined, [last], last.dtype)


def _joined(last: Any) -> Any:
    _runtime.renew()
    # Ranks that have joined early have counted less than others.
    reset_counters()
    return last
