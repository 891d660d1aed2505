"""A copy of the state in host memory, to be written while the state goes on changing."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdkit.checkpoint import tree
from hvdkit.checkpoint.state import Tensor, Tree
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.checkpoint.writing import EncodedPart

_ALIGNMENT = 64


class SnapshotMemory:
    """Memory for one copy, which is allocated once: fresh pages cost more than the copy itself."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def copy(self, trees: Mapping[str, Tree]) -> dict[str, EncodedPart]:
        """Copy the state, over the copy before it.

        Args:
            trees: of the parts, as their `capture` gives them.

        Raises:
            UsageError: something in a tree cannot be saved.
        """
        encoded: dict[str, tuple[Any, dict[str, Tensor]]] = {
            part: tree.encode(content, part) for part, content in trees.items()
        }
        places: dict[tuple[str, str], slice] = {}
        end = 0
        for part, (_, tensors) in encoded.items():
            for name, tensor in tensors.items():
                places[part, name] = slice(end, end + nbytes(tensor.spec))
                end += -(-nbytes(tensor.spec) // _ALIGNMENT) * _ALIGNMENT
        if len(self._memory) < end:
            # The old memory goes before the new one comes.
            self._memory = np.empty(0, np.uint8)
            self._memory = np.empty(end, np.uint8)
        parts = {}
        for part, (content, tensors) in encoded.items():
            copies = {}
            for name, tensor in tensors.items():
                memory = self._memory[places[part, name]]
                tensor.read(memory)
                copies[name] = (tensor.spec, memory)
            parts[part] = EncodedPart(content, copies, tree.version(tensors.values()))
        return parts
