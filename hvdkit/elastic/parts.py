"""The parts of an elastic state in host memory: restore items from them, also on other ranks.

A part is the state of one item, as in a checkpoint; see `hvdkit.checkpoint.state`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hvdkit.agreement import objects
from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.rank_errors import attempt
from hvdkit.checkpoint import memory, tree
from hvdkit.checkpoint.coordination import exchange
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.snapshot import placed
from hvdkit.checkpoint.state import StatefulItem, TensorSpec, Tree
from hvdkit.checkpoint.step_files import EncodedPart
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.errors import UsageError

#: Name of an item -> its state, in host memory.
Parts = Mapping[str, EncodedPart]
#: The same without the content of tensors: the JSON form, and the specs by name.
_Outline = Mapping[str, tuple[Any, Mapping[str, TensorSpec]]]

# Bytes; a multiple of the alignment of tensors, so that a piece has whole elements.
_PIECE_BYTES = 64 << 20

_ADVICE = (
    "put the same models, optimizers and objects into the state on all ranks, and at each start"
)


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
    plan = _Plan(_outline(parts), items)
    for (part, key), tensor in plan.tensors.items():
        tensor.write(parts[part].tensors[key][1])
    plan.finish()


def restore_everywhere(
    collectives: Collectives,
    parts: Parts,
    items: Mapping[str, StatefulItem],
    root_rank: int,
    name: str,
) -> None:
    """Broadcast parts, and restore items from them, as `restore`. A collective.

    A rank needs memory for a piece of the parts only.

    Args:
        collectives: of the ranks.
        parts: on the root; ignored on the other ranks.
        items: of this rank.
        root_rank: the rank that sends.
        name: the beginning of the names of the collectives.

    Raises:
        UsageError: on all ranks: the state of a part does not fit an item of a rank. Then nothing
            was changed.
        CheckpointError: on all ranks: a rank had another error.
    """
    if collectives.single_rank:
        restore(parts, items)
        return
    is_root = collectives.rank == root_rank
    sent = pickle.dumps(_outline(parts)) if is_root else b""
    outline: _Outline = pickle.loads(collectives.broadcast(sent, root_rank, f"{name}.outline"))
    plan, problem = attempt(_Plan, outline, items)
    exchange(collectives, {}, problem, _ADVICE)
    for piece, segments in _pieces(outline):
        for part, key, inside, start in segments if is_root else ():
            content = parts[part].tensors[key][1]
            assert isinstance(content, np.ndarray)
            piece[inside] = content[start : start + inside.stop - inside.start]
        collectives.broadcast_into(piece, root_rank, f"{name}.content")
        for part, key, inside, start in segments:
            # A rank that cannot write still takes part in the broadcasts.
            if problem is None and (part, key) in plan.tensors:
                _, problem = attempt(plan.tensors[part, key].write, piece[inside], start)
    if problem is None:
        _, problem = attempt(plan.finish)
    exchange(collectives, {}, problem, _ADVICE)


class _Plan:
    """The destinations of the state of parts.

    Attributes:
        tensors: part and name of a tensor -> its destination.

    Raises:
        UsageError: the state of a part does not fit its item.
    """

    def __init__(self, outline: _Outline, items: Mapping[str, StatefulItem]) -> None:
        self._items = items
        self._trees = {
            part: item.plan_restore(tree.decode(*outline[part]))
            for part, item in items.items()
            if part in outline
        }
        self.tensors = {
            (part, key): tensor
            for part, content in self._trees.items()
            for key, tensor in tree.encode(content, part)[1].items()
        }

    def finish(self) -> None:
        """Restore the items, after the tensors were written."""
        for part, content in self._trees.items():
            self._items[part].restore(content)


def _outline(parts: Parts) -> _Outline:
    return {
        part: (each.tree, {key: spec for key, (spec, _) in each.tensors.items()})
        for part, each in parts.items()
    }


def _pieces(
    outline: _Outline,
) -> Iterator[tuple[np.ndarray, list[tuple[str, str, slice, int]]]]:
    """Yield memory for each piece of the content of parts, the same memory for all of them.

    A piece comes with its segments: a part, the name of a tensor, the place in the piece, and the
    first byte of the tensor.
    """
    places, size = placed(
        {(part, key): spec for part, (_, specs) in outline.items() for key, spec in specs.items()}
    )
    content = memory.allocate(min(size, _PIECE_BYTES))
    for begin in range(0, size, _PIECE_BYTES):
        end = min(begin + _PIECE_BYTES, size)
        segments = [
            (part, key, slice(first - begin, last - begin), first - place.start)
            for (part, key), place in places.items()
            if (first := max(place.start, begin)) < (last := min(place.stop, end))
        ]
        yield content[: end - begin], segments


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
