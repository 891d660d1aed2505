"""Find the places of a rank between the steps of its optimizers, wrapped or not.

The reducer of a wrapped optimizer knows the passes since the last step. For the other optimizers, a
hook of each parameter counts what passes add to its gradient, and a step of any optimizer ends the
count.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import TensorWeakRef

from hvdkit.checkpoint.step_boundary import LACKS_WINDOW, Place, StepBoundary
from hvdkit.torch.reduction import passes
from hvdkit.torch.reduction.memory import is_nonzero
from hvdkit.torch.reduction.optimizer_reducer import GRADIENTS_NOT_SAVED
from hvdkit.torch.unwrapped import steps_made
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

log = logging.getLogger("hvdkit.torch")

Optimizers = Iterable[torch.optim.Optimizer]

# How often passes have added to gradients of optimizers that are not wrapped, since the last step
# of any optimizer.
_added = 0
# An optimizer that is not wrapped -> its gradients at the last save; None after a warning.
_unsaved: "weakref.WeakKeyDictionary[Any, list[TensorWeakRef] | None]"
_unsaved = weakref.WeakKeyDictionary()


def _count(_: torch.Tensor) -> None:
    """Hook: a pass has added to a gradient."""
    global _added
    _added += 1


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Hook: an optimizer is about to make a step. Warn if it uses gradients that were not saved."""
    if unsaved := _unsaved.get(optimizer):
        left = {id(reference()) for reference in unsaved}
        uses = any(p.grad is not None and id(p.grad) in left for p in _parameters([optimizer]))
        if uses:
            log.warning("%s", GRADIENTS_NOT_SAVED)
        _unsaved[optimizer] = None if uses else []


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


def _gradients(optimizers: Optimizers) -> Iterator[torch.Tensor]:
    """Yield the gradients of optimizers that are not wrapped, without those that are 0."""
    found = (parameter.grad for parameter in _parameters(optimizers))
    return (gradient for gradient in found if gradient is not None and is_nonzero(gradient))


def _waiting(optimizers: Optimizers) -> int:
    """Return what passes have added for the next step of optimizers that are not wrapped."""
    return _added if _added and any(True for _ in _gradients(optimizers)) else 0


def note_save(optimizers: Optimizers, step: int, warns: bool) -> None:
    """Warn now or at the next step if a checkpoint lacks gradients of this rank.

    Args:
        optimizers: the optimizers in the checkpoint.
        step: its step.
        warns: whether this rank warns of optimizers that are not wrapped.
    """
    waiting = _waiting(optimizers)
    if warns and waiting:
        log.warning(LACKS_WINDOW, step)
    for each in optimizers:
        if isinstance(each, WrappedOptimizer):
            each.reducer.note_save(step)
        elif warns and not waiting and _unsaved.get(each, ()) is not None:
            _unsaved[each] = [TensorWeakRef(gradient) for gradient in _gradients([each])]


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
register_optimizer_step_pre_hook(torch._disable_dynamo(_before_step))
register_optimizer_step_post_hook(torch._disable_dynamo(_after_step))
