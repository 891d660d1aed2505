"""Loss scaling: all ranks take a step, or all skip it.

A GradScaler skips a step whose gradients are not finite. Reduced gradients are not finite on all
ranks if they are not on one, so all ranks skip alike. They are reduced when `backward()` returns;
what is left to do here is to let a rank that made no backward pass take part before it looks.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from hvdkit.errors import UsageError
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

# torch.amp's came with torch 2.3, for any device.
_TorchGradScaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler


class GradScaler(_TorchGradScaler):
    """`torch.amp.GradScaler` for a `DistributedOptimizer`: reduce, unscale, check, clip, step.

    All ranks see the same gradients, so all take or skip the same step and hold the same scale.
    With `accumulation_steps`, all of its methods may be called after every pass.

    Example:
        scaler = hvd.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only if you clip
        hvd.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    """

    _in_window = False
    _stepped = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the reduced gradients by the scale."""
        if isinstance(optimizer, WrappedOptimizer) and not optimizer.reduce():
            self._in_window = True
            return
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make a step if the reduced gradients are finite; see `optimizer.stepped`."""
        if not isinstance(optimizer, WrappedOptimizer):
            self._stepped = True
            return super().step(optimizer, *args, **kwargs)
        optimizer.reset_stepped()
        if not optimizer.reduce():
            self._in_window = True
            return None
        self._stepped = True
        steps = optimizer.steps
        result = super().step(optimizer, *args, **kwargs)
        if optimizer.steps == steps:
            optimizer.end_step()
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale after a step. Does nothing inside an accumulation window.

        Raises:
            UsageError: one optimizer has stepped, and another is inside a window, whose gradients
                would have different scales.
        """
        in_window, stepped = self._in_window, self._stepped
        self._in_window = self._stepped = False
        if in_window and stepped:
            raise UsageError(
                "one GradScaler serves an optimizer that has stepped and one inside its "
                "accumulation window, in which the scale must not change: use a GradScaler for "
                "each of them"
            )
        if not in_window:
            super().update(new_scale)


def _reduce_before_unscaling(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def reduced(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, WrappedOptimizer):
            if not optimizer.reduce():
                raise UsageError(
                    "torch's GradScaler counts every backward pass as a step, which does not go "
                    "with accumulation_steps: use hvd.GradScaler"
                )
            # The scaler may skip the step without telling the optimizer.
            optimizer.reset_stepped()
        return unscale(self, optimizer, *args, **kwargs)

    return reduced


def teach_torchs_grad_scaler() -> None:
    """Patch PyTorch's GradScaler to reduce the gradients of a `DistributedOptimizer`.

    It reads them in one method, before it asks anything of the optimizer; there is no other
    place to step in.
    """
    original = _TorchGradScaler._unscale_grads_
    if not hasattr(original, "__wrapped__"):
        _TorchGradScaler._unscale_grads_ = _reduce_before_unscaling(original)
