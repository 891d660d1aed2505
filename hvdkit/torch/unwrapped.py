"""Find parameters that ranks train without a reduction: a `DistributedOptimizer` was forgotten.

Such a script raises no error. Each rank trains a model of its own, and rank 0 saves its model.

- Rank 0 counts the steps of optimizers that are not wrapped, in a step hook of PyTorch. After ten
  steps, it warns if no collective can have reduced the gradients. The hook has only what this rank
  knows, so it communicates nothing.
- With Accelerate and Fabric, the first step of such an optimizer raises on every rank, because the
  library has prepared the model for a reduction.
- `hvd.Checkpointer` compares the models and optimizers that no wrapped optimizer compares.
"""

import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from horovod.torch import mpi_ops
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.agreement.replicas import CheckSettings, ReplicaCheck
from hvdkit.errors import UsageError
from hvdkit.runtime.counters import counters
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.dtensors import is_dtensor
from hvdkit.torch.items import compiled
from hvdkit.torch.plain_tensors import has_own_dispatch, traffic
from hvdkit.torch.reduction import records
from hvdkit.torch.replicas import is_readable, torch_replicas
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer, wrapped_optimizers

log = logging.getLogger("hvdkit.torch")

# The step before which an optimizer is examined. An inner loop, as in meta-learning, makes fewer
# steps with each of its optimizers.
_STEPS = 10
# A script with many optimizers gets no more warnings than this.
_MOST_WARNINGS = 3

_ADVICE = (
    "No hvd.DistributedOptimizer keeps these tensors equal. If an optimizer trains them, wrap it: "
    "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters()). Before the first "
    "step, call hvd.broadcast_parameters(model.state_dict(), root_rank=0). If ranks should have "
    "different values, call hvd.register_local(model_or_optimizer); checkpoints then have those of "
    "the first rank."
)


# An optimizer that is not wrapped -> the bytes that the script itself has sent, before each of its
# first steps.
_sent: "weakref.WeakKeyDictionary[Any, list[int]]" = weakref.WeakKeyDictionary()
# Parameter -> True.
_local: WeakIdKeyDictionary = WeakIdKeyDictionary()
# A parameter of a model that a library prepares -> how to have its gradients reduced.
_prepared: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Memory that the script has made equal on all ranks -> True.
_shared: WeakIdKeyDictionary = WeakIdKeyDictionary()
# The optimizers that were warned of, by their classes.
_warned: list[str] = []
_steps_made = 0


def register_local(
    trained: torch.optim.Optimizer | torch.nn.Module | Iterable[torch.Tensor],
) -> None:
    """Declare that each rank has its own values of parameters, which nothing reduces.

    Optimizers of these parameters get no warning that they are not wrapped, and
    `hvd.Checkpointer` does not compare the parameters. It saves those of the first rank.

    Args:
        trained: an optimizer that is not wrapped, a module, or parameters.

    Raises:
        UsageError: the argument is something else, or a wrapped optimizer.
    """
    if isinstance(trained, WrappedOptimizer):
        raise UsageError(
            "register_local was called with a DistributedOptimizer, which reduces the gradients of "
            "its parameters: expected an optimizer that is not wrapped, or a module"
        )
    parameters: list[Any]
    if isinstance(trained, torch.optim.Optimizer):
        parameters = _parameters_of(trained)
    elif isinstance(trained, torch.nn.Module):
        parameters = list(trained.parameters())
    else:
        single = isinstance(trained, torch.Tensor) or not isinstance(trained, Iterable)
        parameters = [trained] if single else list(trained)
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise UsageError(
                f"register_local got a {type(parameter).__name__}: expected an optimizer, a "
                f"module, or parameters"
            )
    for parameter in parameters:
        _local[parameter] = True


def steps_made() -> int:
    """Return the number of steps that the optimizers of this process have made, of all kinds."""
    return _steps_made


def note_shared(tensors: Iterable[torch.Tensor]) -> None:
    """Note that the script makes these tensors equal on all ranks, so they should stay equal."""
    for tensor in filter(is_readable, tensors):
        _shared[tensor.untyped_storage()] = True


def expect_reduction(parameters: Iterable[torch.Tensor], advice: str) -> None:
    """Note that no optimizer may train these parameters without a reduction.

    Args:
        parameters: the parameters.
        advice: how to have the library wrap an optimizer.
    """
    for parameter in parameters:
        _prepared[parameter] = advice


def replica_checks(
    collectives: TorchCollectives,
    models: Mapping[str, torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
) -> list[ReplicaCheck | None]:
    """Return the comparisons before a checkpoint: one for each optimizer, and one for the rest.

    The rest are the parameters that no optimizer of the checkpointer has.

    Args:
        collectives: the collectives of the checkpointer's ranks.
        models: the saved models.
        optimizers: the saved optimizers, wrapped or not.
    """
    for model in models.values():
        note_shared(model.parameters())
    ranks = list(collectives.ranks)

    def names() -> dict[torch.Tensor, str]:
        named: dict[torch.Tensor, str] = {}
        for model, module in models.items():
            plain = compiled.without_prefixes(module)
            for name, parameter in module.named_parameters():
                text = f"{model}: {plain(name)}" if len(models) > 1 else plain(name)
                named.setdefault(parameter, text)
        return named

    def of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        named = names()
        return {
            named.get(parameter, f"group{g}.parameter{k}"): parameter
            for g, group in enumerate(optimizer.param_groups)
            for k, parameter in enumerate(group["params"])
            if not _may_differ(parameter, ranks)
        }

    def rest() -> dict[str, torch.Tensor]:
        covered: set[int] = set()
        for each in optimizers.values():
            covered.update(map(id, _parameters_of(each)))
            if isinstance(each, WrappedOptimizer):
                covered.update(map(id, each.reducer.compared_parameters().values()))
        return {
            name: parameter
            for parameter, name in sorted(names().items(), key=operator.itemgetter(1))
            if id(parameter) not in covered and not _may_differ(parameter, ranks)
        }

    def check(
        parameters: Callable[[], dict[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> ReplicaCheck:
        return ReplicaCheck(
            collectives, CheckSettings(), lambda: torch_replicas(parameters(), optimizer), _ADVICE
        )

    own = [
        each.replicas
        if isinstance(each, WrappedOptimizer)
        else check(partial(of_optimizer, each), each)
        for each in optimizers.values()
    ]
    return [*own, check(rest)]


def _may_differ(parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
    """Return whether ranks may have different values of a parameter.

    The script has said so; or the parameter is a DTensor, whose parts a save compares itself.
    """
    if parameter in _local or is_dtensor(parameter):
        return True
    owner = records.owner_of(parameter)
    if owner is None:
        return False
    replicas = owner.rounds.replicas
    # Without these comparisons, or with other ranks, the script has wrapped an optimizer of its
    # own for these ranks.
    return replicas is None or not replicas.settings.interval or list(replicas.ranks) != list(ranks)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hook: an optimizer is about to make a step. Not a collective."""
    global _steps_made
    _steps_made += 1
    if isinstance(optimizer, WrappedOptimizer) or not mpi_ops.is_initialized():
        return
    _check_not_plain(optimizer)
    if mpi_ops.size() == 1:
        return
    _check_prepared(optimizer)
    examine(optimizer, lambda: [p for p in _parameters_of(optimizer) if p.grad is not None])


def examine(optimizer: Any, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
    """Warn if nothing has reduced the gradients of an optimizer's tenth step. Not a collective.

    Args:
        optimizer: an optimizer of PyTorch or Keras that is about to make a step.
        parameters: returns the parameters with gradients that should be reduced.
    """
    if not mpi_ops.is_initialized() or mpi_ops.size() == 1 or mpi_ops.rank() != 0:
        return
    sent = _sent.setdefault(optimizer, [])
    if len(sent) < _STEPS:
        sent.append(traffic.bytes - counters.payload_bytes)
        if len(sent) == _STEPS and _trains_alone(optimizer, parameters(), sent[-1] - sent[0]):
            _warn(optimizer)


def _check_not_plain(optimizer: torch.optim.Optimizer) -> None:
    """Check that a step does not use gradients that its wrapped optimizer has not reduced.

    Raises:
        UsageError: it does.
    """
    owner = next((records.owner_of(p) for p in _parameters_of(optimizer)), None)
    if owner is None or owner.optimizer()._plain is not optimizer or not owner.accumulated:
        return
    raise UsageError(
        f"step() of the {type(optimizer).__name__} that hvd.DistributedOptimizer wraps was called "
        f"while gradients wait for their reduction: call step() of the wrapped optimizer"
    )


def _check_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Check that the gradients of prepared models are reduced.

    Raises:
        UsageError: the optimizer uses such a gradient, and nothing has reduced it.
    """
    for p in _parameters_of(optimizer) if _prepared else ():
        if p.grad is None or p in _local or records.owner_of(p) is not None:
            continue
        if advice := _prepared.get(p):
            raise UsageError(
                f"an optimizer ({type(optimizer).__name__}) is about to train a prepared model on "
                f"{mpi_ops.size()} ranks, but nothing has reduced the gradients, because the "
                f"optimizer was not prepared: each rank would train a model of its own. {advice}. "
                f"If each rank should train its own parameters, call hvd.register_local(optimizer)"
            )


def _trains_alone(optimizer: Any, parameters: Sequence[torch.Tensor], sent: int) -> bool:
    """Return whether the ranks should train one model, and nothing reduces the gradients.

    Args:
        optimizer: the optimizer.
        parameters: its parameters with gradients.
        sent: the bytes that the script itself has sent between the first steps.
    """
    if not parameters or any(p in _local or has_own_dispatch(p) for p in parameters):
        return False
    if any(records.owner_of(p) is not None for p in parameters):
        return False  # a wrapped optimizer has reduced them
    # The attribute is one of Horovod's own optimizers, also of that for Adasum.
    if hasattr(optimizer, "_allreduce_delay"):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False  # DDP, FSDP, or a library that calls torch.distributed
    if sent >= sum(p.nbytes for p in parameters):
        return False  # the script reduces gradients, or averages weights, itself
    # If the script wraps other optimizers, it may train these tensors on each rank on purpose.
    if not (wrapped_optimizers() or counters.payload_bytes):
        return True
    return any(p.untyped_storage() in _shared for p in filter(is_readable, parameters))


def _warn(optimizer: Any) -> None:
    if len(_warned) == _MOST_WARNINGS:
        return
    _warned.append(type(optimizer).__name__)
    of_keras = not isinstance(optimizer, torch.optim.Optimizer)
    log.warning(
        "an optimizer (%s) makes its step %d on %d ranks, but it is not wrapped, and nothing has "
        "reduced the gradients of its parameters: each rank trains a model of its own. Wrap it "
        "before the first step: optimizer = hvd.DistributedOptimizer(optimizer%s). If each rank "
        "should train its own parameters, or if the script averages them only later (local SGD), "
        "call hvd.register_local(%s).",
        *(_warned[-1], _STEPS, mpi_ops.size()),
        *(("", "model") if of_keras else (", model.named_parameters()", "optimizer")),
    )


# A compiled hook would be compiled again in each step, because it counts them.
register_optimizer_step_pre_hook(torch._disable_dynamo(_before_step))
