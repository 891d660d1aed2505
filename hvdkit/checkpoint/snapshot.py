"""The state to write: a copy in host memory, or the tensors' own memory."""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hvdkit.checkpoint import memory, tree
from hvdkit.checkpoint.memory import ALIGNMENT, Allocate
from hvdkit.checkpoint.sharding import Divided
from hvdkit.checkpoint.state import Tensor, TensorSpec, Tree
from hvdkit.checkpoint.step_files import EncodedPart
from hvdkit.checkpoint.tensors import nbytes

_K = TypeVar("_K")
Encoded = Mapping[str, tuple[Any, dict[str, Tensor]]]


def placed(specs: Mapping[_K, TensorSpec]) -> tuple[dict[_K, slice], int]:
    """Return the place of each tensor in a block of memory, and the size of the block in bytes."""
    places: dict[_K, slice] = {}
    end = 0
    for key, spec in specs.items():
        places[key] = slice(end, end + nbytes(spec))
        end += -(-nbytes(spec) // ALIGNMENT) * ALIGNMENT
    return places, end


class SnapshotMemory:
    """Memory for a copy of the state, allocated once: new pages cost more time than the copy.

    Args:
        allocate: the allocator.
    """

    def __init__(self, allocate: Allocate = memory.allocate) -> None:
        self._allocate = allocate
        self._memory = np.empty(0, np.uint8)

    def copy(self, encoded: Encoded) -> dict[str, EncodedPart]:
        """Copy the state, over the previous copy; not the content of `Divided` tensors.

        Args:
            encoded: the result of `encoded`.
        """
        places, end = placed(
            {
                (part, name): tensor.spec
                for part, (_, tensors) in encoded.items()
                for name, tensor in tensors.items()
                if not isinstance(tensor, Divided)
            }
        )
        if len(self._memory) < end:
            # Free the old memory before allocating new memory.
            self._memory = np.empty(0, np.uint8)
            # More than now, for a state that grows a little with each step, such as a list.
            self._memory = self._allocate(end + end // 64)
        parts = {}
        for part, (content, tensors) in encoded.items():
            copies: dict[str, tuple[TensorSpec, Any]] = {}
            for name, tensor in tensors.items():
                if isinstance(tensor, Divided):
                    copies[name] = (tensor.spec, None)
                    continue
                place = self._memory[places[part, name]]
                tensor.read(place)
                copies[name] = (tensor.spec, place)
            parts[part] = EncodedPart(content, copies)
        return parts


def in_place(encoded: Encoded) -> dict[str, EncodedPart]:
    """Return the state without a copy. It must not change until it is written.

    A tensor that is on another device, or is not row-major, is copied when it is written. The
    content of `Divided` tensors is missing.

    Args:
        encoded: the result of `encoded`.

    Raises:
        UsageError: a tensor cannot be saved.
    """
    parts = {}
    for part, (content, tensors) in encoded.items():
        for tensor in tensors.values():
            nbytes(tensor.spec)  # raises now if the tensor cannot be saved
        parts[part] = EncodedPart(
            content,
            {name: (tensor.spec, partial(_content, tensor)) for name, tensor in tensors.items()},
        )
    return parts


def encoded(trees: Mapping[str, Tree]) -> Encoded:
    """Return part -> JSON form and tensors.

    Args:
        trees: part -> the result of its item's `save`.

    Raises:
        UsageError: something in a tree cannot be saved.
    """
    return {part: tree.encode(content, part) for part, content in trees.items()}


def _content(tensor: Tensor) -> np.ndarray:
    content = tensor.memory()
    if content is None:
        content = memory.allocate(nbytes(tensor.spec))
        tensor.read(content)
    return content
