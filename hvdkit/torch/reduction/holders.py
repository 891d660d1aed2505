"""Find out who refers to a gradient, or to the memory of a bucket, beside hvdkit.

A script or an optimizer may keep `p.grad`, or a view of it. Then the memory belongs to the holder.
The answers are counts of references. Where PyTorch has no such count, as in older versions on a
CPU, the answer is that the memory is held. This is always safe, but costs time.

The functions take many tensors and loop in C, because they run for each gradient of each step.
"""

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch

_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)
_tensor_uses: Any = getattr(torch.Tensor, "_use_count", None)
#: Returns the address of the content of a tensor or storage.
address = operator.attrgetter("_cdata")
_version = operator.attrgetter("_version")


def _references_to_memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many objects use the storage of a tensor, and how many use its Python object."""
    storage = tensor.untyped_storage()
    return _storage_uses(storage._cdata), sys.getrefcount(storage)


def _references_to_tensors(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return how many references there are to each Python object, and to its content."""
    return list(zip(map(sys.getrefcount, tensors), map(_tensor_uses, tensors), strict=True))


def _references_to_gradients(gradients: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the same numbers, and those for the storage of each tensor."""
    storages = list(map(torch.Tensor.untyped_storage, gradients))
    return list(
        zip(
            map(sys.getrefcount, gradients),
            map(_tensor_uses, gradients),
            map(sys.getrefcount, storages),
            map(_storage_uses, map(address, storages)),
            strict=True,
        )
    )


def _alone() -> tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]] | None:
    """Return the counts of memory, of a tensor and of a gradient that have no other reference."""
    tensor = torch.empty(1, device="cpu")
    parameter = torch.nn.Parameter(tensor.clone())
    parameter.grad = tensor.clone()
    try:
        return (
            _references_to_memory(tensor),
            _references_to_tensors([tensor.clone()])[0],
            _references_to_gradients([parameter.grad])[0],
        )
    except (AttributeError, TypeError):
        return None


_ALONE = _alone()


def tensors_in(memory: torch.Tensor, views: Sequence[torch.Tensor]) -> int | None:
    """Return how many other tensors use the memory of a tensor; None if this is not known.

    Args:
        memory: the tensor.
        views: tensors in its memory. They count only if anything beside this sequence uses them.
    """
    if _ALONE is None:
        return None
    (uses, objects), view, _ = _ALONE
    uses_now, objects_now = _references_to_memory(memory)
    if objects_now != objects:
        return None
    return uses_now - uses - _references_to_tensors(views).count(view)


def held(gradients: Sequence[torch.Tensor]) -> list[bool]:
    """Return whether anything beside `parameter.grad` and this sequence refers to each gradient.

    Args:
        gradients: dense gradients. The caller must not refer to them otherwise.
    """
    if _ALONE is None:
        return [True] * len(gradients)
    alone = _ALONE[2]
    return [references != alone for references in _references_to_gradients(gradients)]


def version_of(tensor: torch.Tensor) -> int:
    """Return PyTorch's count of the changes of a tensor; 0 for a tensor of the inference mode."""
    return versions([tensor])[0]


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return PyTorch's counts of the changes of tensors; 0 for those of the inference mode."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if each.is_inference() else each._version for each in tensors]
