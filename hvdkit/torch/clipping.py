"""Clipping by the norm of the reduced gradients."""

from collections.abc import Iterable

import torch

from hvdkit.torch.wrapped_optimizer import wrapped


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor | None:
    """Clip a `DistributedOptimizer`'s reduced gradients as `torch.nn.utils` does.

    The norm is that of the mean gradient over all ranks, the same on each of them. PyTorch's own
    function does the same where every rank makes a backward pass in every step; this one also
    serves ranks that skip one. All ranks call it alike.

    Args:
        optimizer: a `DistributedOptimizer`, or several, whose parameters have one norm together.
        max_norm: the largest norm to leave alone.
        norm_type: 2, infinity, or another p of the p-norm.
        error_if_nonfinite: raise RuntimeError, on every rank, if the norm is not finite.
        foreach: see `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before clipping, a tensor without dimensions; None inside a window of
        accumulation, where nothing is done.
    """
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    # All of them first, because each may be a collective.
    reduced = [wrapped(each).reduce() for each in several]
    if not all(reduced):
        return None
    parameters = [p for each in several for group in each.param_groups for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(
        parameters, max_norm, norm_type, error_if_nonfinite, foreach
    )
