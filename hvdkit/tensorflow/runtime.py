"""Start and stop Horovod in a TensorFlow process."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

# Not public. No public function makes TensorFlow run an op without inputs again, or changes the
# text of an error.
from tensorflow.python.eager import context, core, execute

from hvdkit.engine.describe import require
from hvdkit.errors import HvdkitError
from hvdkit.runtime.lifecycle import Runtime, loading
from hvdkit.tensorflow.call_order import order_calls
from hvdkit.tensorflow.devices import use_own_gpu
from hvdkit.tensorflow.graphs import clear_traces, reset_values

engine = require("tensorflow")

with loading(
    "tensorflow", tf.__version__, engine, (ImportError, tf.errors.NotFoundError, AttributeError)
):
    from horovod.tensorflow import mpi_ops


def _refuse_torchrun() -> NoReturn:
    raise HvdkitError(
        "torchrun has started several ranks, but only PyTorch ranks can rendezvous through "
        "torchrun: start this script with `hvdkit run`, horovodrun, mpirun or srun"
    )


_runtime = Runtime("tensorflow", tf.__version__, engine, mpi_ops, use_own_gpu, _refuse_torchrun)


def _explain_errors() -> None:
    """Let the error of a collective name the rank that has called `hvd.shutdown()`.

    TensorFlow calls `core._status_to_exception` for the error of an op, and functions of `execute`
    for a graph. Another version of TensorFlow may not have these functions.
    """
    explained_text = _runtime.departure.explained_text

    def explain_op(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(convert)
        def explained(status: Any) -> Any:
            status.message = explained_text(str(status.message))
            return convert(status)

        return explained

    def explain_graph(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def explained(*args: Any, **options: Any) -> Any:
            try:
                return run(*args, **options)
            except tf.errors.OpError as error:
                error._message = explained_text(str(error.message))
                raise

        return explained

    for module, name, explain in (
        (core, "_status_to_exception", explain_op),
        (execute, "execute", explain_graph),
        (execute, "execute_with_cancellation", explain_graph),
    ):
        if hasattr(module, name):
            setattr(module, name, explain(getattr(module, name)))


_explain_errors()
order_calls()

shutdown = _runtime.shutdown
host_collectives = _runtime.host_collectives
recorder = _runtime.recorder


def init(*args: Any, **kwargs: Any) -> None:
    """Initialise Horovod; see `hvdkit.runtime.lifecycle.Runtime.init`.

    Functions that reduce gradients are traced again afterwards, because the number of ranks may
    have changed.
    """
    _runtime.init(*args, **kwargs)
    clear_traces()


def generation() -> int:
    """Return a number that `init` and the return from `join` increase, on all ranks."""
    return _runtime.generation


def join() -> Any:
    """Wait until every rank has called `join`; contribute zeros to the other ranks' reductions.

    Call `join` at the end of an epoch in which ranks have different numbers of batches. After
    `join`, the ranks run the consistency checks again, because a rank that joined before its first
    step has not run them.

    Returns:
        The last rank to join, an integer tensor.
    """
    if tf.executing_eagerly():
        return _join()
    # `numpy_function` runs with the graph, not while the graph is traced or optimized.
    return tf.ensure_shape(tf.numpy_function(_join, [], tf.int32), ())


def _join() -> Any:
    # TensorFlow treats the op as a constant, because it has neither inputs nor state. With a cached
    # kernel a second call would return the first result immediately.
    context.context().clear_kernel_cache()
    last = mpi_ops.join()
    _runtime.begin_generation()
    # Ranks that joined early have counted fewer reductions than ranks that joined late.
    reset_values()
    return last
