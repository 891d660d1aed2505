"""Select the adapter for Keras's backend, and hide the differences between the adapters.

Keras selects its backend once per process, and a process loads only one Horovod extension:
hvdkit.tensorflow on the TensorFlow backend, hvdkit.torch on the PyTorch backend.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import ml_dtypes
import numpy as np
from packaging.version import Version

from hvdkit.agreement.collectives import check_root
from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.engine.describe import EngineMissing
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.training.stragglers import BACKWARD, StepTimes

# Older versions lack `CallbackList._flush_futures`, and their `EpochIterator` yields other tuples.
_FIRST_KERAS = "3.12"

_COLLECTIVES = {"tensorflow": "TensorFlowCollectives", "torch": "TorchCollectives"}
# Backend -> module and class in its adapter.
_TENSORS = {"tensorflow": ("items", "VariableTensor"), "torch": ("items.tensors", "TorchTensor")}
_COPY_ADVICE = {"tensorflow": ("elastic", "copy_advice"), "torch": ("elastic.state", "copy_advice")}
_RANDOMNESS = {"tensorflow": ("items", "Randomness"), "torch": ("items.randomness", "Randomness")}


def _backend_name() -> str:
    version = getattr(keras, "__version__", "")
    if not version:
        found = ", ".join(getattr(keras, "__path__", [])) or keras.__name__
        raise HvdkitError(
            f"`import keras` imports {found}, which is not Keras: rename that folder, or install "
            f"Keras"
        )
    if version.split(".")[0] in ("1", "2"):
        raise HvdkitError(
            f"this is Keras {version}, and hvdkit.keras needs Keras 3: pip install "
            f"'keras>={_FIRST_KERAS}', or use hvd.DistributedGradientTape of "
            f"hvdkit.tensorflow for Keras 2"
        )
    if Version(version) < Version(_FIRST_KERAS):
        raise HvdkitError(
            f"this is Keras {version}, and hvdkit.keras needs {_FIRST_KERAS} or newer: pip install "
            f"'keras>={_FIRST_KERAS}'"
        )
    name: str = keras.backend.backend()
    if name not in _COLLECTIVES:
        raise HvdkitError(
            f"Keras runs on its {name} backend, and hvdkit.keras needs TensorFlow or PyTorch: set "
            f"KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported"
        )
    return name


#: The backend of Keras: "tensorflow" or "torch".
NAME = _backend_name()


def _adapter() -> Any:
    try:
        return importlib.import_module(f"hvdkit.{NAME}")
    except EngineMissing as error:
        other = "torch" if NAME == "tensorflow" else "tensorflow"
        raise EngineMissing(
            f"Keras runs on its {NAME} backend, so hvdkit.keras needs Horovod for {NAME}. {error} "
            f"If Keras should run on {other}, set KERAS_BACKEND={other} before keras is imported."
        ) from None


#: hvdkit's adapter for the backend.
hvd: Any = _adapter()


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"hvdkit.{NAME}.{module}"), name)


_new_collectives: Any = _imported("collectives", _COLLECTIVES[NAME])

#: The `hvdkit.agreement.differences.Access` to the values of variables.
access: Any = _imported("replicas", "TensorAccess")()
GradientReducer: Any = _imported("reduction.reducer", "GradientReducer")
wire_format: Any = _imported("compression", "wire_format")
#: Returns what to do with a value that an elastic state must not copy.
copy_advice: Any = _imported(*_COPY_ADVICE[NAME])

_functions: Any = importlib.import_module(f"hvdkit.{NAME}.functions")
_broadcast: Any = (
    _functions.broadcast_parameters if NAME == "torch" else _functions.broadcast_unchecked
)
_new_tensor: Any = _imported(*_TENSORS[NAME])
_new_randomness: Any = _imported(*_RANDOMNESS[NAME])


def collectives(process_set: Any = None) -> Any:
    """Return `agreement.collectives.Collectives` for the ranks of a process set; default: all."""
    return _new_collectives(hvd.global_process_set if process_set is None else process_set)


def to_tensor(array: np.ndarray) -> Any:
    """Return the backend's tensor of an array, in CPU memory if possible."""
    if NAME == "torch":
        import torch

        return torch.from_numpy(np.ascontiguousarray(array))
    import tensorflow as tf

    return tf.constant(array)


def sum_arrays(
    arrays: Sequence[np.ndarray], name: str, process_set: Any = None
) -> list[np.ndarray]:
    """Add arrays over the ranks of a process set, in one allreduce of float64.

    Args:
        arrays: arrays with the same shapes on every rank.
        name: name of the collective, the same on every rank.
        process_set: the participating ranks; default: all.

    Returns:
        float64 arrays of the same shapes, exact for counts up to 2^53.
    """
    doubles = [np.asarray(array, dtype=np.float64) for array in arrays]
    group = collectives(process_set)
    total = sum(array.size for array in doubles)
    if group.single_rank or not total:
        return [array.copy() for array in doubles]
    packed = np.concatenate([array.ravel() for array in doubles])
    reduced = hvd.allreduce(to_tensor(packed), op=hvd.Sum, name=name, process_set=group.process_set)
    flat = np.asarray(reduced)
    ends = np.cumsum([array.size for array in doubles])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(array.shape).copy() for part, array in zip(parts, doubles, strict=True)]


def broadcast_variables(
    variables: Iterable[Any] | Callable[[], Iterable[Any]], root_rank: int, process_set: Any = None
) -> None:
    """Copy rank `root_rank`'s values into the variables of every other rank of a process set.

    Args:
        variables: `keras.Variable`s of any dtype, matched by their order; or a function that
            returns them, and may raise. Names may differ, because Keras numbers layers per process.
        root_rank: the global rank to copy from.
        process_set: the participating ranks; default: all.

    Raises:
        RankMismatchError: on every rank, if shapes or dtypes differ between ranks, or an argument
            is invalid on one of them. (This rank raises the error about its argument.)
        UsageError: `root_rank` is not one of the ranks.
    """
    group = collectives(process_set)

    def prepare() -> tuple[list[Any], list[str]]:
        if not group.single_rank:
            check_root(root_rank, group.ranks)
        own = list(variables() if callable(variables) else variables)
        return [variable.value for variable in own], [
            f"{len(own)} variables from rank {root_rank}",
            *(f"variable {i}, {v.dtype} {list(v.shape)}" for i, v in enumerate(own)),
        ]

    values = prepare_on_all_ranks(group, prepare, "the variables to broadcast")
    if not group.single_rank:
        _broadcast(values, root_rank, group.process_set)


def is_floating(variable: Any) -> bool:
    """Return whether a `keras.Variable` has a floating-point dtype."""
    return "float" in keras.backend.standardize_dtype(variable.dtype)


def is_among(variable: Any, identities: Collection[int]) -> bool:
    """Return whether `identities` contains the id of a `keras.Variable` or of its value."""
    return id(variable) in identities or id(variable.value) in identities


def dtype_of(variable: Any) -> np.dtype:
    """Return the dtype of a `keras.Variable`."""
    # NumPy lacks bfloat16 and float8. Keras itself uses ml_dtypes for them.
    name = str(variable.dtype)
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def bytes_of(variable: Any) -> int:
    """Return the size of a `keras.Variable` in bytes."""
    return int(np.prod(variable.shape, dtype=np.int64)) * dtype_of(variable).itemsize


def read(variable: Any) -> np.ndarray:
    """Return a `keras.Variable`'s content as one-dimensional uint8, equal on all backends.

    The array may share the variable's memory.
    """
    array = keras.ops.convert_to_numpy(variable)
    # On PyTorch, Keras returns bfloat16 as float32, which converts back without loss. PyTorch
    # stores uint32 as int64.
    array = np.ascontiguousarray(array, dtype=dtype_of(variable))
    return array.reshape(-1).view(np.uint8)


def write(variable: Any, content: np.ndarray) -> None:
    """Write a result of `read` into a `keras.Variable`."""
    # A copy, because `content` may be unaligned.
    values = content.copy().view(dtype_of(variable))
    variable.assign(values.reshape(tuple(variable.shape)))


def digests(variables: Sequence[Any]) -> list[int]:
    """Return a 64-bit digest of each `keras.Variable`. PyTorch computes it on the device."""
    return list(access.digests([variable.value for variable in variables]))


def tensor_of(variable: Any) -> Any:
    """Return the `hvdkit.checkpoint.state.Tensor` of a `keras.Variable`."""
    return _new_tensor(variable.value)


def randomness() -> Any:
    """Return the `RankItem` of the random states of Python, NumPy and the backend."""
    return _new_randomness()


def tape_items() -> dict[str, Any]:
    """Return the item of the reductions of gradient tapes; empty without TensorFlow."""
    return {} if NAME == "torch" else _imported("reduction_items", "tape_items")()


def tapes_reduce(variables: Sequence[Any], process_set: Any) -> bool:
    """Return whether gradient tapes reduce the gradients of all variables; False on PyTorch."""
    if NAME == "torch":
        return False
    return bool(_imported("replicas", "all_reduced")(variables, process_set))


def framework_version() -> str:
    """Return the version of the backend."""
    version: str = importlib.import_module(NAME).__version__
    return version


def build_metrics(model: Any, epoch: Any) -> None:
    """Create the variables of a model's metrics, which Keras may create at the first batch only.

    Args:
        model: a compiled and built model.
        epoch: the `EpochIterator` of the training data.
    """
    if NAME == "tensorflow":
        # On PyTorch `fit` itself creates them.
        model._symbolic_build(data_batch=epoch._distributed_dataset.element_spec)


def reduce(reducer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
    """Reduce gradients of `keras.Variable`s; see `reduce` of the backend's `GradientReducer`."""
    if NAME == "tensorflow":
        return reducer.reduce(gradients, variables)
    return reducer.reduce(gradients, [v.value for v in variables], [v.path for v in variables])


def maximum(values: Sequence[Any], name: str, process_set: Any) -> list[Any]:
    """Return the element-wise maximum over the ranks of float tensors, in one allreduce."""
    flat = keras.ops.concatenate([keras.ops.reshape(value, [-1]) for value in values])
    largest = hvd.allreduce(flat, op=hvd.Max, name=name, process_set=process_set)
    sizes = [int(np.prod(value.shape, dtype=np.int64)) for value in values]
    parts = keras.ops.split(largest, np.cumsum(sizes)[:-1].tolist())
    return [
        keras.ops.reshape(part, tuple(value.shape))
        for part, value in zip(parts, values, strict=True)
    ]


def step_times() -> Any:
    """Return an object that measures the time that a rank spends in each section of its steps."""
    if NAME == "torch":
        return StepTimes()
    return importlib.import_module("hvdkit.tensorflow.step_times").GraphTimes()


def batch_check(name: str, process_set: Any, fail: Callable[[], None]) -> Any:
    """Return a check in graphs of TensorFlow; None on PyTorch. See `keras.fit.batch_check`."""
    if NAME == "torch":
        return None
    return _imported("batch_check", "BatchCheck")(name, process_set, fail)


def begin_backward(times: Any) -> None:
    """Record that the backward pass begins. Does nothing on TensorFlow, whose graph records it."""
    if NAME == "torch":
        times.enter(BACKWARD)


def expect(reducer: Any, variables: Sequence[Any]) -> None:
    """Send buckets during the next backward pass. Does nothing on TensorFlow."""
    if NAME == "torch":
        reducer.expect([v.value for v in variables], [v.path for v in variables])


def end_interrupted(reducer: Any) -> None:
    """Complete the reduction of a backward pass that has raised. Does nothing on TensorFlow.

    Raises:
        BackwardFailed: on every rank, if the backward pass raised on some ranks only.
    """
    if NAME == "torch":
        reducer.end_interrupted()


def dense(gradient: Any) -> Any:
    """Return the gradient as a dense tensor."""
    return keras.ops.convert_to_tensor(gradient)


def scaled(gradient: Any, factor: float) -> Any:
    """Return the gradient times `factor`; None stays None, and sparse gradients stay sparse."""
    if NAME == "tensorflow":
        from hvdkit.tensorflow.reduction.backend import multiply

        return multiply(gradient, factor)
    return None if gradient is None else gradient * factor


def scaling_of(variables: Sequence[Any]) -> Callable[[float], None]:
    """Return a function that multiplies variables by its argument, in one call of the backend."""
    values = [variable.value for variable in variables]
    if NAME == "torch":
        import torch

        def scale(factor: float) -> None:
            with torch.no_grad():
                if values:
                    torch._foreach_mul_(values, factor)

        return scale
    import tensorflow as tf

    @tf.function(autograph=False)
    def scale_all(factor: Any) -> None:
        for value in values:
            value.assign(value * tf.cast(factor, value.dtype))

    return lambda factor: scale_all(tf.constant(factor, tf.float64))


def outside_of_graphs() -> AbstractContextManager[Any]:
    """Return a context in which new variables outlive a graph that is being traced."""
    if NAME == "torch":
        return nullcontext()
    import tensorflow as tf

    scope: AbstractContextManager[Any] = tf.init_scope()
    return scope


def after_backward(gradients: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a context whose operations run after the first gradient that depends on the batch.

    Only in a graph of TensorFlow, operations may otherwise run without a batch. At the end of a
    `tf.data.Dataset` of unknown length, `fit` runs the graph once more, and reading a batch fails.

    Args:
        gradients: the gradients in the order of the layers; None for a missing one. The backward
            pass computes them in the reverse order.
    """
    if NAME == "torch":
        return nullcontext()
    import tensorflow as tf

    if tf.executing_eagerly():
        return nullcontext()
    found = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    first = next((gradient for gradient in reversed(found) if _depends_on_batch(gradient)), None)
    dependencies: AbstractContextManager[Any] = tf.control_dependencies(
        [] if first is None else [first]
    )
    return dependencies


def _depends_on_batch(gradient: Any) -> bool:
    """Return whether a tensor of a graph depends on more than variables and constants."""
    import tensorflow as tf

    if not tf.is_symbolic_tensor(gradient):
        return False
    left: list[Any] = [gradient.op]
    seen: set[Any] = set(left)
    while left:
        operation = left.pop()
        is_argument = operation.type == "Placeholder" and operation.outputs[0].dtype != tf.resource
        if is_argument or operation.type == "IteratorGetNext":
            return True
        new = {tensor.op for tensor in operation.inputs} - seen
        seen |= new
        left += new
    return False


def check_zero(number: Any, message: str) -> None:
    """Raise `tf.errors.InvalidArgumentError` when a graph runs in which a number is not 0.

    Does nothing outside of graphs.
    """
    if NAME == "torch":
        return
    import tensorflow as tf

    if not tf.executing_eagerly():
        tf.debugging.assert_equal(number, 0, message)


def after_assignment(variable: Any) -> AbstractContextManager[Any]:
    """Return a context whose operations run after the last assignment of a `keras.Variable`.

    Only in a graph of TensorFlow, operations may otherwise run in another order.
    """
    if NAME == "torch":
        return nullcontext()
    import tensorflow as tf

    dependencies: AbstractContextManager[Any] = tf.control_dependencies(
        [variable.value.read_value()]
    )
    return dependencies


def check_no_strategy() -> None:
    """Raise if a strategy of `tf.distribute` is active.

    Raises:
        UsageError: a strategy is active.
    """
    if NAME == "torch":
        return
    import tensorflow as tf

    if tf.distribute.has_strategy():
        raise UsageError(
            f"a {type(tf.distribute.get_strategy()).__name__} of tf.distribute is active, which "
            f"reduces gradients itself: build, compile and train the model outside of its scope()"
        )
