"""Broadcast variables and Python objects from one rank; gather objects from all ranks."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.agreement import objects
from hvdkit.agreement.collectives import check_root
from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.errors import UsageError
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.unwrapped import shared
from hvdkit.tensorflow.variables import tf_variables

# Small variables are concatenated into broadcasts of up to 16 MB. Larger broadcasts would gain
# little, because sending 16 MB takes longer than the negotiation of a collective.
_PACK_BYTES = 16_000_000
# Variables are sent as bytes. MPI counts elements in 32 bits, so 1 GiB at a time is safe.
_CHUNK_BYTES = 1 << 30
# Name of the state of a `keras.random.SeedGenerator`.
_SEED = "seed_generator_state"


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    inplace: bool = False,
) -> None:
    """Copy rank `root_rank`'s variables to every other rank.

    May be called in a `tf.function`. Does nothing on ranks outside the process set.

    `model.variables` contains the states of Keras's seed generators. They are not broadcast,
    because with equal seeds all ranks would drop the same units in Dropout.

    Args:
        variables: `model.variables`, `optimizer.variables` or any list of `tf.Variable` and
            `keras.Variable`, of any dtype except strings.
        root_rank: the rank to copy from.
        process_set: the participating ranks.
        inplace: let Horovod write into the variables one by one, which needs no further memory.
            Otherwise small variables are concatenated.

    Raises:
        RankMismatchError: on every rank, if names, shapes or dtypes differ between ranks, or an
            argument is invalid on one of them. (The latter rank raises its `UsageError`.) In a
            graph Horovod raises its own error if sizes differ.
        UsageError: a variable cannot be sent, `root_rank` does not exist, or the call is in a
            graph of TensorFlow 1.
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        raise UsageError(
            "broadcast_variables() was called in a tf.Graph of TensorFlow 1: call it eagerly or in "
            "a tf.function"
        )
    collectives = TensorFlowCollectives(process_set)

    def prepare() -> tuple[list[tf.Variable], list[str]]:
        if process_set.included():
            check_root(root_rank, process_set.ranks)
        own = _variables_to_send(variables)
        return own, [
            f"broadcast_variables from rank {root_rank}{', in place' if inplace else ''}",
            *(f"{_plain_name(v)!r}, {v.dtype.name} {v.shape}" for v in own),
        ]

    if tf.executing_eagerly():
        own = prepare_on_all_ranks(collectives, prepare, "the variables to broadcast")
    else:
        # While tracing, ranks are not compared, because one rank alone may trace again.
        own, _ = prepare()
    if collectives.single_rank:
        return
    if not inplace:
        broadcast_unchecked(own, root_rank, process_set)
        return
    shared.note(own)
    for k, variables_of_device in enumerate(_by_device(own)):
        # Horovod's broadcast_() names collectives after the variables. Variable names may repeat
        # and may differ between ranks.
        mpi_ops.MPI_LIB.horovod_broadcast_inplace_resource(
            [variable.handle for variable in variables_of_device],
            variable_names=[f"variable.{i}" for i in range(len(variables_of_device))],
            name=f"hvdkit.broadcast_variables.inplace.{k}",
            root_rank=root_rank,
            process_set_id=process_set.process_set_id,
        )


def broadcast_unchecked(
    variables: Sequence[tf.Variable], root_rank: int, process_set: mpi_ops.ProcessSet
) -> None:
    """Broadcast variables that have the same order, shapes and dtypes on every rank."""
    shared.note(variables)
    packs = (pack for of_device in _by_device(variables) for pack in _packs(of_device))
    for k, pack in enumerate(packs):
        values = _broadcast_pack(pack, k, root_rank, process_set)
        for variable, value in zip(pack, values, strict=True):
            variable.assign(value)


def _variables_to_send(variables: Iterable[Any]) -> list[tf.Variable]:
    """Return the variables without the states of seed generators.

    Raises:
        UsageError: a variable cannot be sent.
    """
    given = tf_variables(variables)
    for i, variable in enumerate(given):
        if variable.dtype in (tf.string, tf.resource, tf.variant):
            raise UsageError(
                f"variables[{i}], {variable.name!r}, has dtype {variable.dtype.name}: expected "
                f"numbers or bools; send other objects with broadcast_object()"
            )
    return [variable for variable in given if not is_seed(variable)]


def is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a seed generator of Keras."""
    return _plain_name(variable).split("/")[-1] == _SEED


def _plain_name(variable: tf.Variable) -> str:
    # Keras numbers the layers of a class per process. A rank that built another model before has
    # other numbers.
    return re.sub(r"_\d+(?=[_/:]|$)", "", variable.name).removesuffix(":0")


def _by_device(variables: Sequence[tf.Variable]) -> list[list[tf.Variable]]:
    devices: dict[str, list[tf.Variable]] = {}
    for variable in variables:
        devices.setdefault(variable.device, []).append(variable)
    return list(devices.values())


def _packs(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Yield the variables, in their order, in one list per broadcast."""
    pack: list[tf.Variable] = []
    size = 0
    for variable in variables:
        # A variable of unknown shape is alone, because it cannot be cut out of a pack.
        count = variable.shape.num_elements()
        nbytes = _PACK_BYTES if count is None else count * variable.dtype.size
        if pack and size + nbytes > _PACK_BYTES:
            yield pack
            pack, size = [], 0
        pack.append(variable)
        size += nbytes
    if pack:
        yield pack


def _broadcast_pack(
    pack: Sequence[tf.Variable], number: int, root_rank: int, process_set: mpi_ops.ProcessSet
) -> list[Any]:
    """Return the root's values of the variables."""
    own = [variable.read_value() for variable in pack]
    contents = [_as_bytes(value) for value in own]
    sizes = [content.shape[0] for content in contents]
    content = contents[0] if len(contents) == 1 else tf.concat(contents, 0)
    name = f"hvdkit.broadcast_variables.{number}"
    if (content.shape[0] or 0) <= _CHUNK_BYTES:
        content = mpi_ops.broadcast(content, root_rank, name, process_set=process_set)
    else:
        content = tf.concat(
            [
                mpi_ops.broadcast(
                    content[start : start + _CHUNK_BYTES],
                    root_rank,
                    f"{name}.{start}",
                    process_set=process_set,
                )
                for start in range(0, content.shape[0], _CHUNK_BYTES)
            ],
            0,
        )
    parts = [content] if len(pack) == 1 else tf.split(content, sizes)
    return [_from_bytes(part, value) for part, value in zip(parts, own, strict=True)]


def _as_bytes(value: Any) -> Any:
    """Return the content as one-dimensional uint8: Horovod lacks some dtypes, such as bfloat16."""
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def _from_bytes(content: Any, like: Any) -> Any:
    shape = like.shape if like.shape.is_fully_defined() else tf.shape(like)
    if like.dtype == tf.bool:
        return tf.reshape(tf.cast(content, tf.bool), shape)
    if like.dtype.size > 1:
        content = tf.reshape(content, [-1, like.dtype.size])
    return tf.reshape(tf.bitcast(content, like.dtype), shape)


@tf.autograph.experimental.do_not_convert
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> Any:
    """Send rank `root_rank`'s object to every rank, pickled.

    Unlike Horovod's function, this one may be called while a graph is traced, is not limited to
    2 GB, and raises on every rank if the object cannot be sent.

    Args:
        obj: the object to send; ignored on ranks other than `root_rank`.
        root_rank: the rank that sends.
        session: for compatibility with Horovod; must be None.
        name: appears in errors.
        process_set: the participating ranks. Other ranks get their own object back.

    Returns:
        On `root_rank` the object itself, on other ranks a copy.

    Raises:
        HvdkitError: on every rank, if the object cannot be pickled, or if another rank cannot
            receive or unpickle it.
    """
    _no_session(session, "broadcast_object")
    name = name or "hvdkit.broadcast_object"
    return objects.broadcast_object(TensorFlowCollectives(process_set), obj, root_rank, name)


@tf.autograph.experimental.do_not_convert
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> list[Any]:
    """Gather an object, pickled, from every rank; types may differ.

    Args:
        obj: this rank's object.
        session: for compatibility with Horovod; must be None.
        name: appears in errors.
        process_set: the participating ranks. Other ranks get `[obj]`.

    Returns:
        One object per rank, in the order of the ranks.

    Raises:
        HvdkitError: on every rank, if a rank cannot pickle its object or unpickle another one.
    """
    _no_session(session, "allgather_object")
    collectives = TensorFlowCollectives(process_set)
    return objects.allgather_object(collectives, obj, name or "hvdkit.allgather_object")


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that calls `broadcast_object` with these arguments."""
    _no_session(session, "broadcast_object_fn")

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, None, name, process_set)

    return broadcast


def _no_session(session: Any, function: str) -> None:
    if session is not None:
        raise UsageError(
            f"{function}() was called with a session, which TensorFlow 2 does not have: omit it, "
            f"and call the function outside of tf.Graph().as_default()"
        )


def broadcast_global_variables(root_rank: int) -> NoReturn:  # noqa: ARG001
    """Raise UsageError with the replacement: TensorFlow 2 has no global variables."""
    raise UsageError(
        "broadcast_global_variables() is for TensorFlow 1, where variables are global: use "
        "broadcast_variables(model.variables, root_rank) and, once the optimizer is built, "
        "broadcast_variables(optimizer.variables, root_rank)"
    )


class BroadcastGlobalVariablesHook:
    """Raise UsageError with the replacement: TensorFlow 2 has no estimators."""

    def __init__(self, root_rank: int, device: str = "") -> None:  # noqa: ARG002
        raise UsageError(
            "BroadcastGlobalVariablesHook is for TensorFlow 1's estimators and monitored sessions: "
            "use broadcast_variables(), or with Keras "
            "hvdkit.keras.callbacks.BroadcastGlobalVariablesCallback"
        )
