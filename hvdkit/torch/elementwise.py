"""Find out whether an optimizer can step with shares of parameters instead of whole ones.

SGD, Adam and many others compute each element of a parameter alone. Muon, LAMB and Adafactor need
whole tensors. Some optimizers with a norm of all parameters need even all of them. A trial on tiny
tensors tells them apart.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from hvdkit.errors import UsageError

_SHAPE = (6, 32)
_STEPS = 3


def steps_with_shares(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer computes each element of a parameter alone.

    Raises:
        UsageError: the step of a parameter depends on other parameters.
    """
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(2, *_SHAPE, generator=generator) for _ in range(_STEPS + 1)]
    wholes = [list(each) for each in draw]
    together = _trial(optimizer, wholes)
    if together is None:
        return False  # it does not take these tensors: expect that it needs whole ones
    shares = _trial(optimizer, [_first_halves(each) for each in wholes])
    if shares is not None and _equal(shares, _first_halves(together)):
        return True
    alone = _trial(optimizer, [each[:1] for each in wholes])
    if alone is None or not _equal(alone, together[:1]):
        raise UsageError(
            f"shard was passed, but in a {type(optimizer).__name__} the step of a parameter "
            f"depends on other parameters, of which a rank has only its share: expected shard=None"
        )
    return False


def _first_halves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the share that the first of two ranks has of each tensor."""
    return [each.flatten().chunk(2)[0] for each in tensors]


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    one, other = (torch.cat([t.flatten() for t in tensors]) for tensors in (some, others))
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def _trial(
    optimizer: torch.optim.Optimizer, values: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor] | None:
    """Return parameters after a few steps of an optimizer of the same class and options.

    Args:
        optimizer: the optimizer, which is not changed.
        values: the parameters, and then the gradients of each step.

    Returns:
        The parameters; None if a step raises an error.
    """
    first, *gradients = values
    parameters = [torch.nn.Parameter(each.clone()) for each in first]
    try:
        twin = _twin(optimizer, parameters)
        step = inspect.unwrap(type(twin).step)  # without hooks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for each in gradients:
                for p, gradient in zip(parameters, each, strict=True):
                    p.grad = gradient.clone()
                step(twin)
    except Exception:
        return None
    return [p.detach() for p in parameters]


def _twin(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options for other parameters."""
    kind = type(optimizer)
    options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    known = inspect.signature(kind.__init__).parameters
    try:
        twin = kind(parameters, **{k: v for k, v in options.items() if k in known})
    except Exception:
        # The constructor has other arguments: copy the object instead.
        twin = object.__new__(kind)
        twin.__dict__.update(optimizer.__dict__)
        twin.state = defaultdict(dict)
    group: dict[str, Any] = copy.deepcopy(options)
    twin.param_groups = [{**group, "params": parameters}]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[name] = OrderedDict()
    return twin
