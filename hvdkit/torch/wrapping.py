"""Make a wrapped optimizer of a plain one."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.errors import UsageError
from hvdkit.reduction.accumulation import Window
from hvdkit.torch.reduction.optimizer_reducer import OptimizerReducer
from hvdkit.torch.reduction.settings import Settings
from hvdkit.torch.shards import Shards
from hvdkit.torch.tensor_shards import TensorShards
from hvdkit.torch.wrapped_optimizer import SHARED, WrappedOptimizer


def check_attributes(plain: torch.optim.Optimizer) -> None:
    """Check that an optimizer means the same as before when it is wrapped.

    Raises:
        UsageError: a method of the instance was replaced, which the wrapped optimizer would not
            call, or the optimizer has an attribute that wrapped optimizers have, too.
    """
    kind, ours = type(plain), vars(WrappedOptimizer) | WrappedOptimizer.__annotations__
    for name, value in vars(plain).items():
        if name not in ours or not hasattr(torch.optim.Optimizer, name):
            continue
        # An LR scheduler replaces `step` by a function that calls it.
        function = inspect.unwrap(getattr(value, "__func__", value))
        if function is not inspect.unwrap(getattr(kind, name)):
            raise UsageError(
                f"the method {name} of this {kind.__name__} was replaced, and a "
                f"DistributedOptimizer would not call the replacement. Wrap the optimizer first, "
                f"and then replace the method of the result; or define a subclass of "
                f"{kind.__name__} with this method"
            )
    own = {name for name in ours if not name.startswith("__")}
    own -= {*vars(torch.optim.Optimizer), *SHARED}
    theirs = set(vars(plain)).union(*(vars(c) for c in kind.__mro__ if c not in _BASES))
    if both := sorted(own & theirs):
        raise UsageError(
            f"{kind.__name__} has {', '.join(map(repr, both))}, and so has a DistributedOptimizer, "
            f"with another meaning. Rename it in {kind.__name__}, for example in a subclass"
        )


# Methods of schedule-free optimizers, which change the parameters, as a step does.
_SWITCHES = ("train", "eval")


def _of_shares(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(self: WrappedOptimizer, *args: Any, **options: Any) -> Any:
        return self.step_shares(functools.partial(method, self, *args, **options))

    return called


# Classes with attributes that all optimizers have.
_BASES = (torch.optim.Optimizer, object)


def wrap(
    plain: torch.optim.Optimizer,
    settings: Settings,
    window: Window,
    names: dict[torch.nn.Parameter, str],
    groups: Sequence[Sequence[torch.nn.Parameter]] = (),
    **ranks: Any,
) -> WrappedOptimizer:
    """Return a wrapped optimizer, an instance of the plain optimizer's class.

    Args:
        plain: the plain optimizer.
        settings: the settings.
        window: the accumulation window.
        names: the names of the optimizer's parameters.
        groups: parameters that share a bucket.
        ranks: the arguments of `OptimizerReducer` that describe the ranks, for simulated ones.
    """
    kind = type(plain)
    own = {name: _of_shares(getattr(kind, name)) for name in _SWITCHES if hasattr(kind, name)}
    cls: type[WrappedOptimizer] = type(
        kind.__name__, (WrappedOptimizer, kind), {"__doc__": kind.__doc__, **own}
    )
    optimizer = cls.__new__(cls)
    optimizer._wrap(plain)
    optimizer.reducer = OptimizerReducer(optimizer, settings, window, names, groups, **ranks)
    optimizer.reducer.coordinator.add(optimizer)
    if settings.reduction.sections > 1:
        optimizer.shards = Shards(optimizer.reducer)
    elif settings.shard is not None and not optimizer.reducer.collectives.single_rank:
        optimizer.shards = TensorShards(optimizer.reducer)
    return optimizer
