"""The parts of an elastic state in host memory: broadcast them, and restore items from them.

A part is the state of one item, as in a checkpoint; see `hvdkit.checkpoint.state`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdkit.checkpoint import memory, tree
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.snapshot import placed
from hvdkit.checkpoint.state import StatefulItem, Tree
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.checkpoint.writing import EncodedPart
from hvdkit.core import objects
from hvdkit.core.collectives import Collectives, broadcast_in_chunks
from hvdkit.errors import UsageError

#: Name of an item -> its state, in host memory.
Parts = Mapping[str, EncodedPart]


class Pickled:
    """A `StatefulItem` of picklable values, which may differ between ranks.

    Only for the memory of a job: unpickling runs code of the content.

    Args:
        get: returns the values by name.
        take: gets a copy of them.
        loads: unpickles them.
    """

    def __init__(
        self,
        get: Callable[[], Mapping[str, Any]],
        take: Callable[[Any], object],
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        self._get = get
        self._take = take
        self._loads = loads

    def save(self) -> Tree:
        """Return the pickled values.

        Raises:
            UsageError: a value cannot be pickled.
        """
        values = self._get()
        try:
            content = objects.dumps(values)
        except Exception as error:
            raise UsageError(_unpicklable(values, error)) from error
        return np.frombuffer(content, np.uint8)

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the tree, an array of bytes."""
        return tree

    def restore(self, tree: Tree) -> None:
        """Unpickle the values, and hand them over."""
        self._take(self._loads(tree.tobytes()))


def _unpicklable(values: Mapping[str, Any], problem: Exception) -> str:
    """Return the text of the error of pickling values."""
    which = "a value"
    for name, value in values.items():
        try:
            objects.dumps(value)
        except Exception:
            which = f"{name} of type {type(value).__name__}"
            break
    return (
        f"{which} cannot be pickled ({problem}): an elastic state keeps picklable objects only. "
        f"Omit it from the state, and make it again at each start"
    )


def restore(parts: Parts, items: Mapping[str, StatefulItem]) -> None:
    """Restore items in their order. Parts without an item, and items without a part, are ignored.

    Raises:
        UsageError: the state of a part does not fit its item. Then nothing was changed.
    """
    prepared: dict[str, Tree] = {}
    for name, item in items.items():
        if name in parts:
            specs = {key: spec for key, (spec, _) in parts[name].tensors.items()}
            prepared[name] = item.plan_restore(tree.decode(parts[name].tree, specs))
    for name, content in prepared.items():
        for key, tensor in tree.encode(content, name)[1].items():
            tensor.write(parts[name].tensors[key][1])
        items[name].restore(content)


def broadcast(collectives: Collectives, parts: Parts, root_rank: int, name: str) -> Parts:
    """Broadcast parts. A collective.

    Args:
        collectives: of the ranks.
        parts: on the root; ignored on the other ranks.
        root_rank: the rank that sends.
        name: the beginning of the names of the collectives.

    Returns:
        The parts of the root, on the other ranks in new memory.
    """
    if collectives.single_rank:
        return parts
    is_root = collectives.rank == root_rank
    outline = {
        part: (each.tree, {key: spec for key, (spec, _) in each.tensors.items()})
        for part, each in (parts if is_root else {}).items()
    }
    sent = collectives.broadcast(pickle.dumps(outline), root_rank, f"{name}.outline")
    outline = pickle.loads(sent)
    places, size = placed(
        {(part, key): spec for part, (_, specs) in outline.items() for key, spec in specs.items()}
    )
    content = memory.allocate(size)
    if is_root:
        for (part, key), place in places.items():
            content[place] = parts[part].tensors[key][1]
    broadcast_in_chunks(collectives, content, root_rank, f"{name}.content")
    if is_root:
        return parts
    return {
        part: EncodedPart(
            encoded, {key: (spec, content[places[part, key]]) for key, spec in specs.items()}
        )
        for part, (encoded, specs) in outline.items()
    }


def read(opened: OpenCheckpoint) -> Parts:
    """Read a step into new memory.

    Raises:
        Damaged: its content differs from its hashes.
        CheckpointError: it cannot be read.
    """
    outline = opened.outline
    parts: dict[str, EncodedPart] = {}
    for part, encoded in outline.trees.items():
        tensors: dict[str, Any] = {}
        if specs := outline.specs.get(part):
            stream = opened.stream(part)
            for key, spec in specs.items():
                tensors[key] = spec, memory.allocate(nbytes(spec))
                stream.read_into(tensors[key][1])
        parts[part] = EncodedPart(encoded, tensors)
    return parts
