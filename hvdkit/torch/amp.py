"""Loss scaling: all ranks make a step, or all skip it.

A GradScaler skips a step if gradients are not finite. If a gradient is not finite on one rank, the
reduced gradient is not finite on any rank, so all ranks skip the step. Gradients are reduced when
`backward()` returns. A rank that made no backward pass takes part in the reduction before its
GradScaler checks the gradients.

Gradients are reduced before they are unscaled, so all ranks need the same scale. A rank in
`hvd.join()` does not update its scale, so the ranks compare the states of their scalers after it.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from hvdkit.agreement.consistency import check_consistency
from hvdkit.errors import UsageError
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer

_TorchGradScaler: Any
if hasattr(torch.amp, "GradScaler"):
    _TorchGradScaler = torch.amp.GradScaler
else:

    class _CudaGradScaler(torch.cuda.amp.GradScaler):
        """The GradScaler of torch before 2.3, with the arguments of `torch.amp.GradScaler`."""

        def __init__(self, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
            if torch.device(device).type != "cuda":
                raise UsageError(
                    f"hvd.GradScaler({device!r}) needs torch 2.3 or newer, and this is torch "
                    f"{torch.__version__}: upgrade torch. A GradScaler of this torch is for CUDA"
                )
            super().__init__(*args, **kwargs)

    _TorchGradScaler = _CudaGradScaler

_SCALE_ADVICE = (
    "Gradients are reduced before they are unscaled, so all ranks need the same scale. After "
    "hvd.join(), copy the state of the last rank: scaler.load_state_dict(hvd.broadcast_object("
    "scaler.state_dict(), root_rank=last)). Make the scaler with the same arguments on all ranks."
)


class _Comparison(NamedTuple):
    """The last comparison of the ranks' scalers for an optimizer.

    Attributes:
        scaler: the scaler that has unscaled the gradients of the optimizer.
        generation: the generation of the collectives.
    """

    scaler: "weakref.ref[Any]"
    generation: int


# Optimizer -> the last comparison.
_comparisons: "weakref.WeakKeyDictionary[WrappedOptimizer, _Comparison]" = (
    weakref.WeakKeyDictionary()
)


def loss_scale(optimizers: Iterable[WrappedOptimizer]) -> float | None:
    """Return the scale of the GradScaler that unscales the gradients of these optimizers.

    It waits for the device. None unless there is exactly one such scaler.
    """
    known = (_comparisons[each].scaler() for each in optimizers if each in _comparisons)
    found = {scaler for scaler in known if scaler is not None}
    return float(found.pop().get_scale()) if len(found) == 1 else None


class GradScaler(_TorchGradScaler):
    """`torch.amp.GradScaler` for a `DistributedOptimizer`: reduce, unscale, check, clip, step.

    All ranks have the same gradients, so they make or skip the same steps and have the same scale.
    With `accumulation_steps`, all methods may be called after every pass.

    Example:
        scaler = hvd.GradScaler("cuda")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only if you clip
        hvd.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Since the last update: for each optimizer, whether it made a step, or is in its window.
        self._stepped: list[bool] = []

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the reduced gradients by the scale. Does nothing inside an accumulation window."""
        if isinstance(optimizer, WrappedOptimizer) and not optimizer.reduce():
            self._stepped.append(False)
            return
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make a step if the reduced gradients are finite; see `optimizer.stepped`."""
        if not isinstance(optimizer, WrappedOptimizer):
            self._stepped.append(True)
            return super().step(optimizer, *args, **kwargs)
        optimizer.reset_stepped()
        if not optimizer.reduce():
            self._stepped.append(False)
            return optimizer.step()  # counts the call
        self._stepped.append(True)
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale after a step. Does nothing inside an accumulation window.

        Raises:
            UsageError: one optimizer has made a step, and another is inside its accumulation
                window. The passes of this window would have different scales.
        """
        in_window, stepped = False in self._stepped, True in self._stepped
        self._stepped.clear()
        if in_window and stepped:
            raise UsageError(
                "GradScaler.update() was called after a step of one optimizer, while another "
                "optimizer was inside its accumulation window. The scale must not change inside a "
                "window: use a GradScaler for each optimizer"
            )
        if not in_window:
            super().update(new_scale)


def _reduce_before_unscaling(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def reduced(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if isinstance(optimizer, WrappedOptimizer):
            norm = optimizer.reducer.settings.max_grad_norm
            if norm is not None:
                raise UsageError(
                    f"max_grad_norm is {norm}, and a GradScaler unscales the gradients after "
                    f"backward() has clipped them. Omit max_grad_norm. "
                    f"Call scaler.unscale_(optimizer), then hvd.clip_grad_norm_(optimizer, ...)"
                )
            if not optimizer.reduce():
                raise UsageError(
                    "torch's GradScaler does not support accumulation_steps, because it counts "
                    "every backward pass as a step: use hvd.GradScaler"
                )
            # The scaler may skip the step without calling the optimizer.
            optimizer.reset_stepped()
            _compare_scalers(self, optimizer)
            if optimizer.shards is not None:
                return optimizer.shards.unscale(lambda: unscale(self, optimizer, *args, **kwargs))
        return unscale(self, optimizer, *args, **kwargs)

    return reduced


def _compare_scalers(scaler: Any, optimizer: WrappedOptimizer) -> None:
    """Compare the scales and how they change, unless the ranks are known to have the same.

    A collective when the scaler unscales these gradients for the first time, or for the first time
    after `hvd.init()` or `hvd.join()`. Later, all ranks update their scales alike.

    Raises:
        RankMismatchError: on every rank, if the ranks differ.
    """
    collectives = optimizer.reducer.collectives
    own = _Comparison(weakref.ref(scaler), collectives.generation)
    if _comparisons.get(optimizer) != own:
        state = scaler.state_dict()
        lines = [f"{key} is {state[key]}" for key in state if isinstance(state[key], int | float)]
        check_consistency(collectives, lines, "the state of a GradScaler", _SCALE_ADVICE)
        _comparisons[optimizer] = own


def _note_skipped_step(maybe_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(maybe_step)
    def noted(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, WrappedOptimizer):
            return maybe_step(self, optimizer, *args, **kwargs)
        # `on_nonfinite="skip"` skips steps, too.
        ended = optimizer.hvdkit_steps + optimizer.hvdkit_skipped_steps
        result = maybe_step(self, optimizer, *args, **kwargs)
        if optimizer.hvdkit_steps + optimizer.hvdkit_skipped_steps == ended:
            optimizer.hvdkit_skipped_steps += 1
            optimizer.end_step()
        return result

    return noted


def patch_torch_grad_scaler() -> None:
    """Patch PyTorch's GradScaler to reduce the gradients of a `DistributedOptimizer`.

    The scaler reads gradients in a private method before it calls the optimizer's step. In another
    private method, it makes or skips the step. This function replaces both methods.
    """
    for name, patched in (
        ("_unscale_grads_", _reduce_before_unscaling),
        ("_maybe_opt_step", _note_skipped_step),
    ):
        original = getattr(_TorchGradScaler, name)
        if not hasattr(original, "__wrapped__"):
            setattr(_TorchGradScaler, name, patched(original))
