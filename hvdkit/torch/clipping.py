"""Clip gradients by the norm of the reduced gradients."""

from collections.abc import Iterable

import torch

from hvdkit.torch.reduction.last_stages import clip, norm_of
from hvdkit.torch.wrapped_optimizer import wrapped


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001
) -> torch.Tensor | None:
    """Clip a `DistributedOptimizer`'s reduced gradients like `torch.nn.utils.clip_grad_norm_`.

    The norm is that of the mean gradient over all ranks, so it is the same on each of them.
    PyTorch's function is sufficient if every rank makes a backward pass in every step. This
    function also supports ranks that skip a pass, and sparse gradients. Every rank calls it.

    Args:
        optimizer: a `DistributedOptimizer`, or several; the norm is that of all their parameters.
        max_norm: the largest norm that is not clipped.
        norm_type: 2, infinity, or another p of the p-norm.
        error_if_nonfinite: raise RuntimeError, on every rank, if the norm is not finite.
        foreach: for compatibility with PyTorch; ignored.

    Returns:
        The norm before clipping, a tensor without dimensions. None inside an accumulation window,
        where the function does nothing.
    """
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    # Reduce the gradients of all optimizers on every rank: each reduction may be a collective.
    reduced = [wrapped(each).reduce() for each in several]
    if not all(reduced):
        return None
    parameters = [p for each in several for p in wrapped(each).reducer.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = norm_of(gradients, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the norm of the gradients is non-finite, {norm}: they are not clipped")
    clip(gradients, max_norm, norm)
    if norm_type == 2.0:
        for each in several:
            wrapped(each).grad_norm = norm
    return norm
