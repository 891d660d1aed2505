"""Which adapter lies under Keras, and the host-side collectives that callbacks need of it.

Keras decides once per process which framework it runs on, and a process loads only one Horovod
extension: on the TensorFlow backend hvdkit.tensorflow, on the PyTorch backend hvdkit.torch.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import ml_dtypes
import numpy as np
from packaging.version import Version

from hvdkit.core.bucketing import uncounted
from hvdkit.core.consistency import check_consistency
from hvdkit.engine.describe import EngineMissing
from hvdkit.errors import HvdkitError, UsageError

# Older ones lack `EpochIterator._enumerate_iterator`, which hvdkit.keras.resuming replaces.
_FIRST_KERAS = "3.7"

_COLLECTIVES = {"tensorflow": "TensorFlowCollectives", "torch": "TorchCollectives"}


def _backend_name() -> str:
    version = getattr(keras, "__version__", "")
    if not version:
        found = ", ".join(getattr(keras, "__path__", [])) or keras.__name__
        raise HvdkitError(
            f"what is imported as keras is {found}, which is not Keras: rename the folder of "
            f"that name, or install Keras"
        )
    if version.split(".")[0] in ("1", "2"):
        raise HvdkitError(
            f"this is Keras {version}, and hvdkit.keras needs Keras 3: pip install 'keras>=3', or "
            f"stay with horovod.keras, which is for Keras 2"
        )
    if Version(version) < Version(_FIRST_KERAS):
        raise HvdkitError(
            f"this is Keras {version}, and hvdkit.keras needs {_FIRST_KERAS} or newer: pip install "
            f"'keras>={_FIRST_KERAS}'"
        )
    name: str = keras.backend.backend()
    if name not in _COLLECTIVES:
        raise HvdkitError(
            f"Keras runs on its {name} backend, and hvdkit.keras needs TensorFlow or PyTorch under "
            f"it: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported"
        )
    return name


#: The framework that Keras runs on: "tensorflow" or "torch".
NAME = _backend_name()


def _adapter() -> Any:
    try:
        return importlib.import_module(f"hvdkit.{NAME}")
    except EngineMissing as error:
        other = "torch" if NAME == "tensorflow" else "tensorflow"
        raise EngineMissing(
            f"Keras runs on its {NAME} backend, and so does hvdkit.keras. {error} If Keras is to "
            f"run on {other}, set KERAS_BACKEND={other} before keras is imported."
        ) from None


#: hvdkit's adapter for that framework.
hvd: Any = _adapter()

_new_collectives: Any = getattr(
    importlib.import_module(f"hvdkit.{NAME}.collectives"), _COLLECTIVES[NAME]
)

GradientReducer: Any = importlib.import_module(f"hvdkit.{NAME}.reducer").GradientReducer
wire_format: Any = importlib.import_module(f"hvdkit.{NAME}.compression").wire_format

_items: Any = importlib.import_module(f"hvdkit.{NAME}.items")

# Bytes that one broadcast carries: few calls for many small variables, and no second copy of a
# large model in memory. MPI counts in 32 bits.
_CHUNK_BYTES = 64 << 20


def collectives(process_set: Any = None) -> Any:
    """`hvdkit.core.collectives.Collectives` for the ranks of a process set, by default all.

    Beyond the protocol they have `alone`, whether there is no other rank to communicate with.
    """
    return _new_collectives(hvd.global_process_set if process_set is None else process_set)


def to_tensor(array: np.ndarray) -> Any:
    """The framework's tensor with an array's content, in CPU memory where there is a choice."""
    if NAME == "torch":
        import torch

        return torch.from_numpy(np.ascontiguousarray(array))
    import tensorflow as tf

    return tf.constant(array)


def sum_arrays(
    arrays: Sequence[np.ndarray], name: str, process_set: Any = None
) -> list[np.ndarray]:
    """Add arrays up over the ranks of a process set, in one allreduce of float64.

    Args:
        arrays: of the same shapes on every rank.
        name: of the collective, the same on every rank.
        process_set: the ranks that take part.

    Returns:
        float64 arrays of the same shapes: exact for counts up to 2^53.
    """
    doubles = [np.asarray(array, dtype=np.float64) for array in arrays]
    group = collectives(process_set)
    total = sum(array.size for array in doubles)
    if group.alone or not total:
        return [array.copy() for array in doubles]
    packed = np.concatenate([array.ravel() for array in doubles])
    reduced = hvd.allreduce(to_tensor(packed), op=hvd.Sum, name=name, process_set=group.process_set)
    flat = np.asarray(reduced)
    ends = np.cumsum([array.size for array in doubles])
    parts = np.split(flat, ends[:-1])
    return [part.reshape(array.shape).copy() for part, array in zip(parts, doubles, strict=True)]


def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: Any = None) -> None:
    """Copy rank `root_rank`'s values into the variables of every other rank of a process set.

    Args:
        variables: `keras.Variable`s of any dtype that Keras can turn into NumPy. They are matched
            by their order: names may differ, because a rank that has built another model before
            counts on.
        root_rank: the global rank to copy from.
        process_set: the ranks that take part.

    Raises:
        RankMismatchError: on every rank, when shapes or dtypes differ between ranks.
        UsageError: `root_rank` is not one of the ranks.
    """
    variables = list(variables)
    group = collectives(process_set)
    if not group.alone and root_rank not in group.ranks:
        raise UsageError(
            f"root_rank is {root_rank}: expected one of the ranks that take part, "
            f"{list(group.ranks)}"
        )
    if group.alone:
        return
    check_consistency(
        group,
        [
            f"{len(variables)} variables from rank {root_rank}",
            *(f"variable {i}, {v.dtype} {list(v.shape)}" for i, v in enumerate(variables)),
        ],
        "the variables to broadcast",
    )
    is_root = hvd.rank() == root_rank
    for batch in _batches(variables):
        sizes = [bytes_of(variable) for variable in batch]
        if is_root:
            packed = np.concatenate([read(variable) for variable in batch])
        else:
            packed = np.empty(sum(sizes), dtype=np.uint8)
        received = np.concatenate(
            [
                np.asarray(
                    hvd.broadcast(
                        to_tensor(packed[start : start + _CHUNK_BYTES]),
                        root_rank,
                        name="hvdkit.keras.broadcast",
                        process_set=group.process_set,
                    )
                )
                for start in range(0, len(packed), _CHUNK_BYTES)
            ]
        )
        # The root's stay as they are: writing to them could only round.
        if not is_root:
            for variable, content in zip(
                batch, np.split(received, np.cumsum(sizes)[:-1]), strict=True
            ):
                write(variable, content)


def is_floating(variable: Any) -> bool:
    """Return whether a `keras.Variable` has floating-point numbers."""
    return "float" in keras.backend.standardize_dtype(variable.dtype)


def is_among(variable: Any, identities: Collection[int]) -> bool:
    """Return whether `identities` has the id of a `keras.Variable`, or of what it holds."""
    return id(variable) in identities or id(variable.value) in identities


def _batches(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Variables in their order, so many at a time as fill a chunk."""
    batch: list[Any] = []
    filled = 0
    for variable in variables:
        size = bytes_of(variable)
        if not size:
            continue
        if batch and filled + size > _CHUNK_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(variable)
        filled += size
    if batch:
        yield batch


def _dtype_of(variable: Any) -> np.dtype:
    # What NumPy lacks (bfloat16, float8) comes from the package that Keras itself uses for it.
    name = str(variable.dtype)
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def bytes_of(variable: Any) -> int:
    """What a `keras.Variable`'s content takes."""
    return int(np.prod(variable.shape, dtype=np.int64)) * _dtype_of(variable).itemsize


def read(variable: Any) -> np.ndarray:
    """A `keras.Variable`'s content, uint8; it may be the variable's own memory."""
    array = keras.ops.convert_to_numpy(variable)
    # On PyTorch a bfloat16 comes as float32, and back without loss.
    array = np.ascontiguousarray(array, dtype=_dtype_of(variable))
    return array.reshape(-1).view(np.uint8)


def write(variable: Any, content: np.ndarray) -> None:
    """Put `content`, as `read` gives it, into a `keras.Variable`."""
    # A slice of the packed bytes may begin anywhere; a copy is aligned.
    values = content.copy().view(_dtype_of(variable))
    variable.assign(values.reshape(tuple(variable.shape)))


def tensor_of(variable: Any) -> Any:
    """`hvdkit.checkpoint.state.Tensor` of a `keras.Variable`."""
    kind = _items.TorchTensor if NAME == "torch" else _items.VariableTensor
    return kind(variable.value)


def randomness() -> Any:
    """A `RankItem`: this rank's random numbers of Python, NumPy and the framework."""
    return _items.Randomness()


def framework_version() -> str:
    """Of what Keras runs on."""
    version: str = importlib.import_module(NAME).__version__
    return version


def build_metrics(model: Any, epoch: Any) -> None:
    """Make the variables of a model's metrics, which may wait for a first batch otherwise.

    Args:
        model: compiled and built.
        epoch: the `EpochIterator` whose batches it is trained with.
    """
    if NAME == "tensorflow":
        # On PyTorch `fit` has done so itself.
        model._symbolic_build(data_batch=epoch._distributed_dataset.element_spec)


def reduce(reducer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Reduce gradients of `keras.Variable`s, as the framework's `GradientReducer` does."""
    if NAME == "tensorflow":
        return list(reducer(gradients, variables))
    names = [uncounted(v.path) for v in variables]
    return list(reducer(gradients, [v.value for v in variables], names))


def expect(reducer: Any, variables: Sequence[Any]) -> None:
    """Send buckets during the backward pass that follows; on PyTorch."""
    if NAME == "torch":
        reducer.expect([v.value for v in variables], [uncounted(v.path) for v in variables])


def end_interrupted(reducer: Any) -> None:
    """Complete the reduction of a backward pass that has raised; on PyTorch.

    Raises:
        BackwardFailed: on every rank, where the pass of others has not raised.
    """
    if NAME == "torch":
        reducer.end_interrupted()


def dense(gradient: Any) -> Any:
    """The gradient with all its rows, where it is one of some rows only."""
    return keras.ops.convert_to_tensor(gradient)


def scaled(gradient: Any, factor: float) -> Any:
    """Return the gradient times `factor`; None stays None, and rows stay rows."""
    if gradient is None:
        return None
    if NAME == "tensorflow":
        import tensorflow as tf

        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values * factor
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * factor


def scaling_of(variables: Sequence[Any]) -> Callable[[float], None]:
    """Return a function that multiplies variables by its argument, in one call of the framework."""
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
    """Within it variables are made that outlive a graph which is being traced."""
    if NAME == "torch":
        return nullcontext()
    import tensorflow as tf

    scope: AbstractContextManager[Any] = tf.init_scope()
    return scope


def check_no_strategy() -> None:
    """Refuse to work within `tf.distribute`.

    Raises:
        UsageError: a strategy is in force.
    """
    if NAME == "torch":
        return
    import tensorflow as tf

    if tf.distribute.has_strategy():
        raise UsageError(
            f"a {type(tf.distribute.get_strategy()).__name__} of tf.distribute is in force, which "
            f"reduces gradients itself: build, compile and train the model outside of its scope()"
        )
