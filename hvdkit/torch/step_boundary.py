"""Find the places of a rank between the steps of its optimizers, wrapped or not.

The reducer of a wrapped optimizer knows the passes since the last step. For the other optimizers, a
hook of each parameter counts what passes add to its gradient, and a step of any optimizer ends the
count.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdkit.checkpoint.step_boundary import LACKS_WINDOW, Place, StepBoundary
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.memory import is_nonzero
from hvdkit.torch.unwrapped import steps_made
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

log = logging.getLogger("hvdkit.torch")

Optimizers = Iterable[torch.optim.Optimizer]

# How often passes have added to gradients of optimizers that are not wrapped, since the last step
# of any optimizer.
_added = 0


def _count(_: torch.Tensor) -> None:
    """Hook: a pass has added to a gradient."""
    global _added
    _added += 1


def _after_step(*_: object) -> None:
    """Hook: an optimizer has made a step."""
    global _added
    _added = 0


def _parameters(optimizers: Optimizers) -> list[torch.Tensor]:
    """Return the parameters of the optimizers that are not wrapped."""
    plain = (each for each in optimizers if not isinstance(each, WrappedOptimizer))
    return [p for each in plain for group in each.param_groups for p in group["params"]]


def watch(optimizers: Optimizers) -> None:
    """Count from now on what passes add to the gradients of optimizers that are not wrapped."""
    for parameter in _parameters(optimizers):
        hooks = parameter._post_accumulate_grad_hooks or {}
        if parameter.requires_grad and _count not in hooks.values():
            parameter.register_post_accumulate_grad_hook(_count)


def _waiting(optimizers: Optimizers) -> int:
    """Return what passes have added for the next step of optimizers that are not wrapped."""
    gradients = (parameter.grad for parameter in _parameters(optimizers) if _added)
    return _added if any(g is not None and is_nonzero(g) for g in gradients) else 0


def note_save(optimizers: Optimizers, step: int, warns: bool) -> None:
    """Warn now or at the next step if a checkpoint lacks gradients of this rank.

    Args:
        optimizers: the optimizers in the checkpoint.
        step: its step.
        warns: whether this rank warns of optimizers that are not wrapped.
    """
    if warns and _waiting(optimizers):
        log.warning(LACKS_WINDOW, step)
    for each in optimizers:
        if isinstance(each, WrappedOptimizer):
            each.reducer.note_save(step)


def step_boundary(optimizers: Callable[[], Sequence[torch.optim.Optimizer]]) -> StepBoundary:
    """Return the places between the steps of optimizers.

    A rank is at a boundary if no window is open, no pass runs, and no pass has followed the last
    step or `zero_grad()` of any optimizer of the process. Hooks of gradients run in a pass.
    Gradients that such a step has left to another optimizer do not count: in a GAN, those of the
    discriminator are removed before its next pass. Nor do those that the script has removed itself,
    as with `model.zero_grad()`.
    """

    def place() -> Place:
        given = optimizers()
        watch(given)
        own = [each.reducer for each in given if isinstance(each, WrappedOptimizer)]
        for each in own:
            each.complete_earlier_passes()
        made = max((each.siblings.passes for each in own), default=0)
        windows = [each.window.begun for each in own]
        waiting = (
            each.has_unused_gradients and each.gradients.any_nonzero() for each in own if made
        )
        others = _waiting(given)
        waits = given and (passes.in_backward() or any(waiting) or others)
        return (made, others, *windows) if waits or any(windows) else None

    def steps() -> int:
        own = [each for each in optimizers() if isinstance(each, WrappedOptimizer)]
        return steps_made() + sum(e.hvdkit_steps + e.hvdkit_skipped_steps for e in own)

    return StepBoundary(place, steps)


# A compiled hook would be compiled again in each step.
register_optimizer_step_post_hook(torch._disable_dynamo(_after_step))
