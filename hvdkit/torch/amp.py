"""Loss scaling: gradients are reduced before they are unscaled and looked at.

PyTorch's GradScaler asks whether this rank's gradients are finite. Where one rank overflows and
another does not, one skips the step and the other waits in it for ever. What every rank must look
at is the reduced gradients, which are not finite on all ranks if they are not on one.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from hvdkit.errors import UsageError
from hvdkit.torch.optimizer import _DistributedOptimizer

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

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce the gradients and divide them by the scale."""
        if isinstance(optimizer, _DistributedOptimizer) and not optimizer.reduce():
            self._in_window = True
            return
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, unless the reduced gradients are not finite; `optimizer.stepped` tells."""
        if not isinstance(optimizer, _DistributedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer.stepped = False
        if not optimizer.reduce():
            self._in_window = True
            return None
        self._in_window = False
        result = super().step(optimizer, *args, **kwargs)
        if self.is_enabled():
            checks = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            if any(found.item() for found in checks.values()):
                optimizer.end_step()
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale after a step."""
        if self._in_window:
            self._in_window = False
            return
        super().update(new_scale)


def _reduce_before_unscaling(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def reduced(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, _DistributedOptimizer) and not optimizer.reduce():
            raise UsageError(
                "torch's GradScaler counts every backward pass as a step, which does not go with "
                "accumulation_steps: use hvd.GradScaler"
            )
        return unscale(self, optimizer, *args, **kwargs)

    return reduced


def teach_torchs_grad_scaler() -> None:
    """Let PyTorch's own GradScaler reduce a `DistributedOptimizer`'s gradients, too.

    It reads them in one method, before it asks anything of the optimizer; there is no other
    place to step in.
    """
    original = _TorchGradScaler._unscale_grads_
    if not hasattr(original, "__wrapped__"):
        _TorchGradScaler._unscale_grads_ = _reduce_before_unscaling(original)
