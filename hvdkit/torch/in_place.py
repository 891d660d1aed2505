"""In-place collectives that autograd knows of.

Horovod's functions write into the memory of a tensor, and autograd does not learn of it. So a
tensor that the forward pass has saved changes without an error, and gradients ignore the
collective. torch.distributed has the same gradients, and warns.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

__all__ = [
    "allreduce_",
    "allreduce_async_",
    "broadcast_",
    "broadcast_async_",
    "grouped_allreduce_",
    "grouped_allreduce_async_",
]


def note_written(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that the content of `tensors` changes, as PyTorch's in-place functions do."""
    for tensor in tensors:
        if not tensor.is_inference():  # such a tensor has no version counter
            # `torch.autograd.graph.increment_version` is younger than the oldest supported torch.
            tensor.detach().as_strided((0,), (1,)).zero_()


def _listed(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _with_gradient(function: Callable[..., Any], differentiable: Callable[..., Any]) -> Any:
    """Return `function`, which writes into its first argument, with the right gradients.

    Args:
        function: the collective.
        differentiable: the same collective with a new result, and the same names of arguments.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        argument, written = next(iter(given.items()))
        tensors = _listed(written)
        # A leaf, such as a parameter, has no history that could change.
        if not torch.is_grad_enabled() or all(t.is_leaf for t in tensors):
            result = function(**given)
            note_written(tensors)  # after the call, which refuses tensors that it cannot write into
            return result
        # Of copies, because the gradient of some operations needs the values before.
        copies = [t.clone() for t in tensors]
        given[argument] = copies[0] if isinstance(written, torch.Tensor) else copies
        for own, result in zip(tensors, _listed(differentiable(**given)), strict=True):
            (own.detach() if own.is_leaf else own).copy_(result)
        return written

    return run


def _without_gradient(function: Callable[..., Any]) -> Any:
    """Return `function`, which begins to write into its first argument."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        handle = function(**given)
        note_written(_listed(next(iter(given.values()))))
        return handle

    return run


allreduce_ = _with_gradient(mpi_ops.allreduce_, mpi_ops.allreduce)
broadcast_ = _with_gradient(mpi_ops.broadcast_, mpi_ops.broadcast)
grouped_allreduce_ = _with_gradient(mpi_ops.grouped_allreduce_, mpi_ops.grouped_allreduce)
allreduce_async_ = _without_gradient(mpi_ops.allreduce_async_)
broadcast_async_ = _without_gradient(mpi_ops.broadcast_async_)
grouped_allreduce_async_ = _without_gradient(mpi_ops.grouped_allreduce_async_)
