"""Collectives on values and variables, whatever framework Keras runs on."""

from collections.abc import Iterable
from typing import Any

import keras

from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.models import finalize

hvd = backend.hvd


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
) -> Any:
    """The mean of a value over all ranks.

    Args:
        value: a number, array or tensor, of the same shape and dtype on every rank.
        name: of the collective, the same on every rank.
        average: whether to take the mean, otherwise the sum; `op` says more.
        prescale_factor: what to multiply with before adding up.
        postscale_factor: what to multiply with afterwards.
        op: `Average` (as where nothing is said), `Sum`, `Min`, `Max` or `Product`.
        compression: `Compression.fp16` to send 16 bits per number.

    Returns:
        A tensor of the framework that Keras runs on.
    """
    if op is not None and average is not None:
        raise UsageError("both op and average were given: op alone says it all")
    if op is None:
        op = hvd.Sum if average is False else hvd.Average
    arguments = {} if compression is None else {"compression": compression}
    return hvd.allreduce(
        keras.ops.convert_to_tensor(value),
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        **arguments,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Every rank's value, joined in the first dimension, in which alone the ranks may differ."""
    return hvd.allgather(keras.ops.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Rank `root_rank`'s value, on all ranks; shapes and dtypes must be the same."""
    return hvd.broadcast(keras.ops.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: Any = None) -> Any:
    """This rank's share, in the first dimension, of the mean over all ranks (or `op=Sum`)."""
    return hvd.reducescatter(
        keras.ops.convert_to_tensor(value), name=name, op=hvd.Average if op is None else op
    )


def broadcast_global_variables(root_rank: int) -> None:
    """Not possible: Keras 3 keeps no list of all variables. Raises UsageError, and what to use."""
    raise UsageError(
        f"broadcast_global_variables({root_rank}): Keras 3 has no global variables. Give fit a "
        f"BroadcastGlobalVariablesCallback({root_rank}), or call broadcast_model(model, "
        f"{root_rank}) once the model is built."
    )


def broadcast_model(
    model: Any,
    root_rank: int,
    process_set: Any = None,
    local_variables: Iterable[Any] = (),
    optimizer: Any = None,
) -> None:
    """Give every rank the weights of rank `root_rank`'s model, and the state of its optimizer.

    The optimizer's counters, learning rate and loss scale are part of its state. Not sent are the
    states of random seeds: with equal ones, all ranks would drop the same units in Dropout and
    augment their images alike, so each keeps the seeds that its script gave it.

    Args:
        model: built, and alike on every rank. An optimizer that is not built yet will be.
        root_rank: the rank to copy from.
        process_set: the ranks that take part, by default all.
        local_variables: variables in the model or optimizer to leave alone, the same on every rank.
        optimizer: by default the one that the model is compiled with.

    Raises:
        RankMismatchError: on every rank, when the models or optimizers differ between ranks.
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    left_out = {id(variable) for variable in local_variables}
    backend.broadcast_variables(
        [
            variable
            for variable in [*model.weights, *(optimizer.variables if optimizer else [])]
            if not backend.is_among(variable, left_out)
        ],
        root_rank,
        process_set,
    )
    finalize(model)
