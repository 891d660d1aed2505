"""Collectives on values, models and optimizers, for every backend of Keras."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import keras

from hvdkit.agreement.consistency import gather
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.further_optimizers import Trained, build, further_optimizers, trained_of
from hvdkit.keras.model_state import weights_of
from hvdkit.keras.models import finalize
from hvdkit.keras_variables.loss_scaling import outermost
from hvdkit.keras_variables.optimizer_slots import optimizer_variables

hvd = backend.hvd

_F = TypeVar("_F", bound=Callable[..., Any])
_calls = 0


def calls() -> int:
    """Return how often this process has called a collective of this module, also in traces."""
    return _calls


def _counted(function: _F) -> _F:
    @functools.wraps(function)
    def counted(*args: Any, **options: Any) -> Any:
        global _calls
        _calls += 1
        return function(*args, **options)

    return cast(_F, counted)


@_counted
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
) -> Any:
    """Return the mean of a value over all ranks, or another reduction.

    Args:
        value: a number, array or tensor, of the same shape and dtype on every rank.
        name: name of the collective, the same on every rank.
        average: True: the mean; False: the sum. Use `op` instead.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`. The mean of integers is cut
            to an integer, with a warning: pass floating-point numbers.
        compression: `Compression.fp16` to send 16 bits per number. None: send the value's dtype.

    Returns:
        A tensor of Keras's backend.

    Raises:
        UsageError: both `op` and `average` are given.
    """
    if op is not None and average is not None:
        raise UsageError("both op and average were given: pass op only")
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


@_counted
def allgather(value: Any, name: str | None = None) -> Any:
    """Return all ranks' values, concatenated along the first dimension.

    The size of the first dimension may differ between ranks. Scalars become a vector. The gradient
    is the mean over ranks: for a loss of the gathered values, use `gather_for_loss`.
    """
    return hvd.allgather(keras.ops.convert_to_tensor(value), name=name)


@_counted
def gather_for_loss(value: Any, name: str | None = None) -> Any:
    """Return all ranks' rows for a loss that each rank computes of them, as in SimCLR or CLIP.

    The result is that of `allgather`. The gradient is the sum over ranks, not the mean. After the
    mean that the optimizer takes, it is the gradient of the mean of the ranks' losses.
    """
    return hvd.gather_for_loss(keras.ops.convert_to_tensor(value), name=name)


@_counted
def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return rank `root_rank`'s value; shapes and dtypes must be the same on all ranks."""
    return hvd.broadcast(keras.ops.convert_to_tensor(value), root_rank, name=name)


@_counted
def reducescatter(value: Any, name: str | None = None, op: Any = None) -> Any:
    """Return this rank's slice, along the first dimension, of the mean over ranks or of `op`."""
    return hvd.reducescatter(
        keras.ops.convert_to_tensor(value), name=name, op=hvd.Average if op is None else op
    )


def broadcast_global_variables(root_rank: int) -> None:
    """Raise UsageError with the replacement: Keras 3 has no list of all variables."""
    raise UsageError(
        f"broadcast_global_variables({root_rank}): Keras 3 has no global variables. Add "
        f"BroadcastGlobalVariablesCallback({root_rank}) to the callbacks of fit, or call "
        f"broadcast_model(model, {root_rank}) after the model is built."
    )


def broadcast_model(
    model: Any,
    root_rank: int,
    process_set: Any = None,
    local_variables: Iterable[Any] = (),
    optimizer: Any = None,
) -> None:
    """Copy the weights of rank `root_rank`'s model and its optimizer's state to every rank.

    If the model has further optimizers as attributes, as a GAN, or nested models with optimizers,
    the states of those that are built are copied, too. Buffers of PyTorch modules in the model,
    such as running statistics, are copied like weights. States of stateful RNN layers are not.

    The optimizer's counters, learning rate and loss scale are part of its state. The states of
    random seeds are not broadcast: with equal seeds, all ranks would drop the same units in Dropout
    and augment their images equally.

    Args:
        model: a built model. On every rank it has the same number of variables, with the same
            shapes and dtypes. Their values may differ. An optimizer that is built on rank
            `root_rank`, or else on another rank, is built on every rank, for the same variables.
        root_rank: the rank to copy from.
        process_set: the participating ranks; default: all.
        local_variables: variables of the model or optimizer that keep their own value on each
            rank. Every rank must pass the same variables.
        optimizer: default: the optimizer of `model.compile`, also if this one is a
            `LossScaleOptimizer` around the given one.

    Raises:
        UsageError: `model` is not a Keras model, or `root_rank` does not exist.
        RankMismatchError: on every rank, if the models or optimizers differ between ranks, or an
            argument is invalid on one of them. (The rank with the invalid argument raises its
            `UsageError`.)
    """

    group = backend.collectives(process_set)
    own: dict[str, Any] = {}
    if isinstance(model, keras.layers.Layer):
        main = outermost(model, optimizer)
        own = {} if main is None else {"optimizer": main}
        own |= {n: each for n, each in further_optimizers(model).items() if each is not main}
    trained = _trained_anywhere(group, root_rank, model, own)

    def variables() -> list[Any]:
        if not isinstance(model, keras.layers.Layer):
            raise UsageError(f"model is a {type(model).__name__}: expected a Keras model")
        build(model, own, trained)
        found = [
            variable
            for name, each in own.items()
            if name in trained or name == "optimizer"
            for variable in optimizer_variables(each)
        ]
        local = {id(variable) for variable in local_variables}
        # The variables of an optimizer may include those of another one in it.
        unique = {id(variable): variable for variable in [*weights_of(model), *found]}
        return [variable for variable in unique.values() if not backend.is_among(variable, local)]

    backend.broadcast_variables(variables, root_rank, process_set)
    finalize(model)


def _trained_anywhere(
    group: Any, root_rank: int, model: Any, optimizers: Mapping[str, Any]
) -> Trained:
    """Return the variables that each optimizer trains on `root_rank`. A collective.

    If `root_rank` has not built an optimizer, those on the first rank that has. Optimizers that a
    rank lacks are left out: only one rank may have loaded a nested model that is compiled.
    """
    if group.single_rank:
        return {}
    built = trained_of(model, optimizers) if optimizers else {}
    own = {name: built.get(name) for name in optimizers}
    # Every rank sends, because `root_rank` may be invalid on some ranks.
    by_rank = gather(group, own, "hvdkit.keras.optimizers")
    everywhere = set.intersection(*map(set, by_rank.values()))
    trained: dict[str, Sequence[int]] = {}
    for each in [by_rank.get(root_rank, {}), *by_rank.values()]:
        for name, numbers in each.items():
            if name in everywhere and numbers is not None:
                trained.setdefault(name, numbers)
    return trained
