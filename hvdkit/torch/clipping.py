"""Clipping by the norm of the reduced gradients."""

from typing import Any

import torch

from hvdkit.torch.optimizer import distributed


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor | None:
    """Reduce a `DistributedOptimizer`'s gradients, then clip them as `torch.nn.utils` does.

    The norm is that of the mean gradient over all ranks, the same on each of them; `step()` does
    not reduce again. A collective.

    Args:
        optimizer: a `DistributedOptimizer`; its parameters' norms are taken together.
        max_norm: the largest norm to leave alone.
        norm_type: 2, infinity, or another p of the p-norm.
        error_if_nonfinite: raise RuntimeError, on every rank, if the norm is not finite.
        foreach: see `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before clipping, a tensor without dimensions; None inside a window of
        accumulation, where nothing is done.
    """
    if not distributed(optimizer).reduce():
        return None
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(
        parameters, max_norm, norm_type, error_if_nonfinite, foreach
    )
