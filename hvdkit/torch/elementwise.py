"""Find out whether an optimizer can step with shares of parameters instead of whole ones.

SGD, Adam and many others compute each element of a parameter alone. Muon, LAMB and Adafactor need
whole tensors. Some optimizers with a norm of all parameters need even all of them. A trial on small
tensors tells them apart.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hvdkit.errors import UsageError

# Some optimizers treat matrices, or dimensions of 128 and more, in another way.
_SHAPES = ((128, 130), (128, 16, 3, 3))
_STEPS = 3
_PARAMETERS = ("params", "param_names")


def steps_with_shares(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether the optimizer computes each element of a parameter alone.

    Args:
        optimizer: the optimizer, which is not changed.
        group: the parameter group whose options the trial uses.

    Raises:
        UsageError: the step of a parameter depends on other parameters, or another optimizer makes
            it.
    """
    kind = type(optimizer).__name__
    inner = {k: v for k, v in vars(optimizer).items() if isinstance(v, torch.optim.Optimizer)}
    if inner:
        raise UsageError(
            f"shard was passed, but the attribute {min(inner)!r} of the {kind} is another "
            f"optimizer, whose step would have whole parameters: expected shard=None"
        )
    generator = torch.Generator().manual_seed(0)
    wholes = [
        [torch.randn(s, generator=generator, device="cpu") for s in _SHAPES]
        for _ in range(_STEPS + 1)
    ]
    for p, gradient in zip(*wholes[:2], strict=True):
        # AdamP and SGDP project the gradient where it is almost orthogonal to the parameter.
        rows, own = gradient.flatten(1), p.flatten(1)
        rows -= 0.99 * own * (rows * own).sum(1, keepdim=True) / own.square().sum(1, keepdim=True)
    for tensors in wholes:
        for each in tensors:
            each[len(each) // 2 :] *= 100  # a mean or norm of the whole is not that of a share
    together = _trial(optimizer, group, wholes)
    if together is None:
        return False  # it does not take these tensors: expect that it needs whole ones
    shares = _trial(optimizer, group, [_first_halves(each) for each in wholes])
    if shares is not None and _equal(shares, _halved(together)):
        return True
    alone = _trial(optimizer, group, [each[:1] for each in wholes])
    # Not the state, where optimizers that need whole tensors may have objects.
    if alone is None or not _equal((alone[0], alone[1][0][0]), (together[0], together[1][0][0])):
        raise UsageError(
            f"shard was passed, but in a {kind} the step of a parameter "
            f"depends on other parameters, of which a rank has only its share: expected shard=None"
        )
    return False


# What a trial leaves: the options, and of each parameter the values and the state.
_Result = tuple[dict[str, Any], list[tuple[torch.Tensor, Any]]]


def _first_halves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the share that the first of two ranks has of each tensor."""
    return [each.flatten().chunk(2)[0] for each in tensors]


def _halved(result: _Result) -> _Result:
    """Return the first halves of parameters, and of the state that `Shards` divides."""

    def half(value: Any, p: torch.Tensor) -> Any:
        whole = isinstance(value, torch.Tensor) and value.shape == p.shape
        return _first_halves([value])[0] if whole else value

    options, parameters = result
    return options, [
        (half(p, p), {key: half(value, p) for key, value in state.items()})
        for p, state in parameters
    ]


def _equal(some: Any, others: Any) -> bool:
    (one, shape), (other, other_shape) = tree_flatten(some), tree_flatten(others)
    return shape == other_shape and all(map(_same, one, other))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@torch.no_grad()
def _trial(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Sequence[torch.Tensor]],
) -> _Result | None:
    """Make a few steps of an optimizer of the same class and options.

    Args:
        optimizer: the optimizer, which is not changed.
        group: the parameter group whose options the trial uses.
        values: the parameters, and then the gradients of each step.

    Returns:
        What the steps leave; None if a step raises an error.
    """
    first, *gradients = values
    parameters = [torch.nn.Parameter(each.clone()) for each in first]
    try:
        twin = _twin(optimizer, group, parameters)
        step = inspect.unwrap(type(twin).step)  # without hooks
        if callable(train := getattr(twin, "train", None)):  # schedule-free optimizers
            train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for each in gradients:
                for p, gradient in zip(parameters, each, strict=True):
                    p.grad = gradient.clone()
                step(twin)
    except Exception:
        return None
    options = {key: value for key, value in twin.param_groups[0].items() if key not in _PARAMETERS}
    return options, [(p.detach(), dict(twin.state.get(p, {}))) for p in parameters]


def _twin(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameters: list[torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options for other parameters."""
    kind = type(optimizer)
    options = copy.deepcopy({k: v for k, v in group.items() if k not in _PARAMETERS})
    known = inspect.signature(kind.__init__).parameters
    try:
        twin = kind(parameters, **{k: v for k, v in options.items() if k in known})
        # Some options are attributes, and not in the groups.
        simple = (bool, int, float, str, tuple, type(None))
        twin.__dict__.update((k, v) for k, v in vars(optimizer).items() if isinstance(v, simple))
    except Exception:
        # The constructor has other arguments: copy the object instead.
        twin = object.__new__(kind)
        twin.__dict__.update(optimizer.__dict__)
        twin.state = defaultdict(dict)
    twin.param_groups = [{**options, "params": parameters}]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    return twin
