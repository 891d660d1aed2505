"""Bringing every rank to the same state: variables, Python objects."""

import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import cloudpickle
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdkit.core.consistency import check_consistency
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.tensorflow.collectives import TensorFlowCollectives
from hvdkit.tensorflow.variables import tf_variables

# Small variables are broadcast together, up to so many bytes. Sending 16 MB takes a network longer
# than negotiating a collective.
_PACK_BYTES = 16_000_000
# Variables are sent as bytes, and MPI counts elements in 32 bits: 1 GiB at a time is safe.
_CHUNK_BYTES = 1 << 30
# The name of a `keras.random.SeedGenerator`'s state.
_SEED = "seed_generator_state"


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    inplace: bool = False,
) -> None:
    """Copy rank `root_rank`'s variables into those of every other rank.

    May be called in a `tf.function`. On ranks outside the process set nothing happens.

    The states of Keras's seed generators, which `model.variables` contains, are left as they are:
    with equal ones all ranks would drop the same units in Dropout.

    Args:
        variables: `model.variables`, `optimizer.variables` or any list of `tf.Variable` and
            `keras.Variable`; any dtype but strings.
        root_rank: the rank to copy from.
        process_set: the ranks that take part.
        inplace: let Horovod write into the variables one by one, which needs no further memory;
            otherwise small ones travel together.

    Raises:
        RankMismatchError: on every rank, when names, shapes or dtypes differ between ranks. (In a
            graph Horovod itself complains, of different sizes.)
        UsageError: there is something among them that cannot be sent, no such rank, or this is a
            graph of TensorFlow 1.
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        raise UsageError(
            "broadcast_variables() was called in a tf.Graph that a session would run: call it "
            "eagerly or in a tf.function"
        )
    given = tf_variables(variables)
    for i, variable in enumerate(given):
        if variable.dtype in (tf.string, tf.resource, tf.variant):
            raise UsageError(
                f"variables[{i}], {variable.name!r}, is of {variable.dtype.name}: expected numbers "
                f"or bools; send other things with broadcast_object()"
            )
    own = [variable for variable in given if _plain_name(variable).split("/")[-1] != _SEED]
    collectives = TensorFlowCollectives(process_set)
    _check_root(root_rank, process_set)
    if collectives.alone:
        return
    if tf.executing_eagerly():
        # Not while tracing, which one rank alone may do once more.
        check_consistency(
            collectives,
            [
                f"broadcast_variables from rank {root_rank}{', in place' if inplace else ''}",
                *(f"{_plain_name(v)!r}, {v.dtype.name} {v.shape}" for v in own),
            ],
            "the variables to broadcast",
        )
    if inplace:
        for k, together in enumerate(_by_device(own)):
            # Horovod's broadcast_() takes the variables' own names, which need not be different
            # from each other, nor on all ranks the same.
            mpi_ops.MPI_LIB.horovod_broadcast_inplace_resource(
                [variable.handle for variable in together],
                variable_names=[f"variable.{i}" for i in range(len(together))],
                name=f"hvdkit.broadcast_variables.inplace.{k}",
                root_rank=root_rank,
                process_set_id=process_set.process_set_id,
            )
        return
    for k, pack in enumerate(p for together in _by_device(own) for p in _packs(together)):
        values = _broadcast_pack(pack, k, root_rank, process_set)
        for variable, value in zip(pack, values, strict=True):
            variable.assign(value)


def _plain_name(variable: tf.Variable) -> str:
    # Keras numbers layers of a kind through the whole process, and one rank may have made others
    # before.
    return re.sub(r"_\d+(?=[_/:]|$)", "", variable.name).removesuffix(":0")


def _by_device(variables: Sequence[tf.Variable]) -> list[list[tf.Variable]]:
    devices: dict[str, list[tf.Variable]] = {}
    for variable in variables:
        devices.setdefault(variable.device, []).append(variable)
    return list(devices.values())


def _packs(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """`variables` in as few lists as there should be broadcasts, in their order."""
    pack: list[tf.Variable] = []
    size = 0
    for variable in variables:
        # Of unknown shape is for itself, because it cannot be cut out of a pack.
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
    """The root's values of the variables."""
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
    """One-dimensional, because Horovod does not know every dtype, bfloat16 above all."""
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


def _check_root(root_rank: int, process_set: mpi_ops.ProcessSet) -> None:
    if process_set.included() and root_rank not in process_set.ranks:
        raise UsageError(f"root_rank is {root_rank}: expected one of {list(process_set.ranks)}")


@tf.autograph.experimental.do_not_convert
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> Any:
    """Send rank `root_rank`'s object to every rank, pickled.

    As Horovod's, except that it may be called while a graph is traced, is not limited to 2 GB, and
    fails on every rank when the object cannot be pickled.

    Args:
        obj: what to send; on other ranks anything, such as None.
        root_rank: the rank that sends.
        session: accepted because Horovod's function has it; there are no sessions.
        name: appears in errors.
        process_set: the ranks that take part. On others the object itself is returned.

    Returns:
        On `root_rank` the object itself, elsewhere a copy of it.

    Raises:
        HvdkitError: on every rank but the root, when the root could not pickle its object; the
            root raises what its pickling has raised.
    """
    _no_session(session, "broadcast_object")
    _check_root(root_rank, process_set)
    collectives = TensorFlowCollectives(process_set)
    if collectives.alone:
        return obj
    name = name or "hvdkit.broadcast_object"
    is_root = mpi_ops.rank() == root_rank
    data, error = _pickled(obj) if is_root else (b"", None)
    received = collectives.broadcast(data, root_rank, name)
    if error is not None:
        raise error
    if not received:
        raise HvdkitError(f"{name}: rank {root_rank} could not pickle its object; see its error")
    return obj if is_root else pickle.loads(received)


@tf.autograph.experimental.do_not_convert
def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> list[Any]:
    """Collect an object, pickled, from every rank; types may differ.

    Args:
        obj: this rank's object.
        session: accepted because Horovod's function has it; there are no sessions.
        name: appears in errors.
        process_set: the ranks that take part. On others the object alone is returned.

    Returns:
        One object per rank, in their order.

    Raises:
        HvdkitError: on every rank, when one could not pickle its object; that one raises what its
            pickling has raised.
    """
    _no_session(session, "allgather_object")
    name = name or "hvdkit.allgather_object"
    collectives = TensorFlowCollectives(process_set)
    if collectives.alone:
        return [obj]
    data, error = _pickled(obj)
    gathered = collectives.allgather(data, name)
    if error is not None:
        raise error
    failed = [rank for rank, part in zip(collectives.ranks, gathered, strict=True) if not part]
    if failed:
        raise HvdkitError(f"{name}: ranks {failed} could not pickle their objects; see their error")
    return [pickle.loads(part) for part in gathered]


def _pickled(obj: Any) -> tuple[bytes, Exception | None]:
    """No bytes where it fails: the other ranks wait for something all the same."""
    try:
        return cloudpickle.dumps(obj), None
    except Exception as error:
        return b"", error


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
) -> Callable[[Any], Any]:
    """A function that calls `broadcast_object` with these arguments."""
    _no_session(session, "broadcast_object_fn")

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, None, name, process_set)

    return broadcast


def _no_session(session: Any, function: str) -> None:
    if session is not None:
        raise UsageError(
            f"{function}() was given a session, which TensorFlow 2 does not have: leave it out and "
            f"call it outside of tf.Graph().as_default()"
        )


def broadcast_global_variables(root_rank: int) -> NoReturn:  # noqa: ARG001
    """Not in TensorFlow 2.

    Raises:
        UsageError: always; the message says what to use.
    """
    raise UsageError(
        "broadcast_global_variables() is for TensorFlow 1, where variables are global: use "
        "broadcast_variables(model.variables, root_rank) and, once the optimizer is built, "
        "broadcast_variables(optimizer.variables, root_rank)"
    )


class BroadcastGlobalVariablesHook:
    """Not in TensorFlow 2, which has no estimators.

    Raises:
        UsageError: always; the message says what to use.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:  # noqa: ARG002
        raise UsageError(
            "BroadcastGlobalVariablesHook is for TensorFlow 1's estimators and monitored sessions: "
            "use broadcast_variables(), or with Keras "
            "hvdkit.keras.callbacks.BroadcastGlobalVariablesCallback"
        )
