"""Find out who refers to a gradient, or to the memory of a bucket, beside hvdkit.

A script or an optimizer may keep `p.grad`, or a view of it. Then the memory belongs to the holder.
The answers are counts of references. Where PyTorch has no such count, as in older versions on a
CPU, the answer is that somebody holds the memory. This is always safe, but costs time.
"""

import sys
from typing import Any

import torch

_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


def _references_to_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many objects use the storage of a tensor, and how many use its Python object."""
    storage = tensor.untyped_storage()
    return _storage_uses(storage._cdata), sys.getrefcount(storage)


def _references_to_gradient(parameter: torch.Tensor) -> tuple[int, int, int, int]:
    gradient: Any = parameter.grad
    return (
        sys.getrefcount(gradient),
        gradient._use_count(),
        *_references_to_memory(gradient),
    )


def _alone() -> tuple[tuple[int, int], tuple[int, int, int, int]] | None:
    """Return the counts of a tensor and of a gradient that nobody else refers to."""
    tensor = torch.empty(1, device="cpu")
    parameter = torch.nn.Parameter(tensor.clone())
    parameter.grad = tensor.clone()
    try:
        return _references_to_memory(tensor), _references_to_gradient(parameter)
    except (AttributeError, TypeError):
        return None


_ALONE = _alone()


def tensors_in(memory: torch.Tensor) -> int | None:
    """Return how many other tensors use the memory of a tensor; None if this is not known."""
    if _ALONE is None:
        return None
    (uses, objects), _ = _ALONE
    uses_now, objects_now = _references_to_memory(memory)
    return uses_now - uses if objects_now == objects else None


def is_held(parameter: torch.Tensor) -> bool:
    """Return whether anything beside `parameter.grad`, a dense tensor, refers to this gradient.

    The caller must not refer to the gradient itself.
    """
    return _ALONE is None or _references_to_gradient(parameter) != _ALONE[1]
