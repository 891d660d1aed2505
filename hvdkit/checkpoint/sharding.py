"""Tensors whose rows are divided among the ranks, such as a large embedding.

A checkpoint stores each of them as one whole tensor. So other tools can read it, and any number of
ranks can restore it with any division. A save gathers the rows on the first rank, which holds the
whole tensors in memory until they are written. A restore broadcasts them piece by piece; each rank
keeps its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.checkpoint import tree
from hvdkit.checkpoint.coordination import gather
from hvdkit.checkpoint.memory import allocate
from hvdkit.checkpoint.state import Discarded, Tensor, TensorSpec, Tree
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.checkpoint.writing import EncodedPart
from hvdkit.core.collectives import Collectives
from hvdkit.errors import UsageError

#: Bytes that all ranks together send in one gather.
_ROUND_BYTES = 64_000_000

#: One rank's rows: name -> dtype, shape of the whole tensor, first row, number of rows.
Layout = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Shard:
    """This rank's rows of a tensor whose rows are divided among the ranks.

    Attributes:
        tensor: the rows, of shape [rows, ...]; `rows` may be 0.
        first: the index of the first of these rows in the whole tensor.
        total: the number of rows of the whole tensor.
    """

    tensor: Any
    first: int
    total: int


class ShardedItem:
    """A `StatefulItem`: shards by name. Every rank saves its own rows.

    Args:
        shards: the shards of this rank.
        tensor: converts a framework's tensor to a `Tensor`; its second argument names the tensor
            in errors.

    Raises:
        UsageError: a value is not a valid shard.
    """

    def __init__(self, shards: Mapping[str, Shard], tensor: Callable[[Any, str], Tensor]) -> None:
        if not isinstance(shards, Mapping):
            raise UsageError(f"sharded is a {type(shards).__name__}: expected a dict of hvd.Shard")
        self._shards: dict[str, _Rows] = {}
        for name, shard in shards.items():
            subject = f"sharded[{name!r}]"
            if not isinstance(shard, Shard):
                raise UsageError(f"{subject} is a {type(shard).__name__}: expected a hvd.Shard")
            own = tensor(shard.tensor, subject)
            if not own.spec.shape:
                raise UsageError(f"{subject} has no dimensions: expected a tensor with rows")
            rows = own.spec.shape[0]
            for argument, value, most in (
                ("total", shard.total, None),
                ("first", shard.first, shard.total),
                ("first + rows", shard.first + rows, shard.total),
            ):
                if not isinstance(value, int) or value < 0 or (most is not None and value > most):
                    raise UsageError(
                        f"{subject} has {rows} rows, first={shard.first!r} and "
                        f"total={shard.total!r}: {argument} is {value!r}, expected a whole number "
                        f"from 0" + (f" to {most}" if most is not None else "")
                    )
            self._shards[name] = _Rows(own, shard.first, shard.total)

    def save(self) -> Tree:
        """Return the dtypes and shapes of the whole tensors."""
        return {name: rows.spec for name, rows in self._shards.items()}

    def layout(self) -> Layout:
        """Return which rows this rank has, as JSON values."""
        return {
            name: [rows.spec.dtype, [*rows.spec.shape], rows.first, rows.count]
            for name, rows in self._shards.items()
        }

    def allocate(self) -> dict[str, np.ndarray]:
        """Return memory for the whole tensors: uint8, by name."""
        return {name: allocate(nbytes(rows.spec)) for name, rows in self._shards.items()}

    def gather(
        self, collectives: Collectives, layouts: Sequence[Layout], wholes: Mapping[str, np.ndarray]
    ) -> EncodedPart | None:
        """Gather the rows on the first rank. A collective.

        Args:
            collectives: of the ranks.
            layouts: of each rank, in order; `check_layouts` has accepted them.
            wholes: on the first rank, the result of `allocate`; empty on the others.

        Returns:
            On the first rank, the part to write; None on the others.
        """
        for name, rows in self._shards.items():
            own = rows.read()
            row = rows.row_bytes
            step = max(_ROUND_BYTES // len(layouts) // max(row, 1), 1) * row
            longest = max(layout[name][3] for layout in layouts) * row
            for begin in range(0, longest, max(step, 1)):
                piece = own[begin : begin + step].tobytes()
                received = gather(collectives, piece, "hvdkit.checkpoint.shards")
                if name in wholes:
                    for layout, content in zip(layouts, received, strict=True):
                        at = layout[name][2] * row + begin
                        wholes[name][at : at + len(content)] = np.frombuffer(content, np.uint8)
        if collectives.rank != collectives.ranks[0]:
            return None
        encoded, specs = tree.encode(self.save(), "sharded")
        return EncodedPart(encoded, {name: (specs[name], wholes[name]) for name in specs})

    def plan_restore(self, tree: Tree) -> Tree:
        """Return `Tensor`s that store this rank's rows of each tensor.

        Raises:
            UsageError: the checkpoint has other tensors.
        """
        prepared, left = self.plan_partial_restore(tree)
        if left:
            raise UsageError(f"the checkpoint does not fit sharded=: {'; '.join(left[:3])}")
        return prepared

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Plan the restore of the tensors that have the same name, shape and dtype."""
        left = [
            f"{name} is {_text(rows.spec)} here and {_text(tree.get(name))} in the checkpoint"
            for name, rows in self._shards.items()
            if tree.get(name) != rows.spec
        ]
        left += [
            f"the checkpoint has {name}, which is not in sharded="
            for name in tree.keys() - self._shards
        ]
        fitting = {name: rows for name, rows in self._shards.items() if tree.get(name) == rows.spec}
        return {name: fitting.get(name, Discarded(spec)) for name, spec in tree.items()}, left

    def restore(self, tree: Tree) -> None:
        """Do nothing: the rows are in the tensors already."""


class _Rows:
    """A `Tensor` that stands for the whole tensor and stores this rank's rows only.

    Attributes:
        spec: of the whole tensor.
        first: the index of this rank's first row.
        count: the number of rows of this rank.
        row_bytes: the size of a row in bytes.
    """

    def __init__(self, own: Tensor, first: int, total: int) -> None:
        self._own = own
        self.count, *others = own.spec.shape
        self.first = first
        self.spec = TensorSpec(own.spec.dtype, (total, *others))
        self.row_bytes = nbytes(TensorSpec(own.spec.dtype, (1, *others)))

    def read(self, out: np.ndarray | None = None) -> np.ndarray:
        """Return this rank's rows: uint8, row-major."""
        content = allocate(nbytes(self._own.spec)) if out is None else out
        self._own.read(content)
        return content

    def memory(self) -> None:
        """Return None: no memory holds the whole tensor."""

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Store the bytes of a piece that belong to this rank's rows."""
        begin = self.first * self.row_bytes
        end = begin + self.count * self.row_bytes
        left, right = max(start, begin), min(start + content.size, end)
        if left < right:
            self._own.write(content[left - start : right - start], left - begin)


def check_layouts(ranks: Sequence[int], layouts: Sequence[Layout]) -> None:
    """Check that each row of each tensor belongs to exactly one rank.

    Args:
        ranks: the ranks.
        layouts: of each rank, in the same order; the same on every rank.

    Raises:
        UsageError: a row is missing or belongs to two ranks, or names, dtypes or shapes differ.
    """
    for rank, layout in zip(ranks, layouts, strict=True):
        if layout.keys() != layouts[0].keys():
            raise UsageError(
                f"rank {rank} has the sharded tensors {', '.join(layout) or 'none'}, and rank "
                f"{ranks[0]} {', '.join(layouts[0]) or 'none'}: expected the same names"
            )
    for name, (dtype, shape, *_) in layouts[0].items():
        end = 0
        for rank, layout in sorted(
            zip(ranks, layouts, strict=True), key=lambda each: tuple(each[1][name][2:])
        ):
            own_dtype, own_shape, first, count = layout[name]
            if (own_dtype, own_shape) != (dtype, shape):
                raise UsageError(
                    f"sharded[{name!r}] is {own_dtype}{own_shape} on rank {rank}, and "
                    f"{dtype}{shape} on rank {ranks[0]}: expected the same dtype and shape"
                )
            if first != end and count:
                raise UsageError(
                    f"sharded[{name!r}] of rank {rank} begins at row {first}: expected row {end}, "
                    f"because the ranks before it end there"
                )
            end += count
        if end != shape[0]:
            raise UsageError(
                f"sharded[{name!r}] has {end} rows on all ranks together: expected {shape[0]}"
            )


def _text(spec: Any) -> str:
    return f"{spec.dtype}{[*spec.shape]}" if isinstance(spec, TensorSpec) else "missing"
