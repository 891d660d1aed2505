"""Tensors whose rows are divided among the ranks, such as a large embedding.

A checkpoint stores each of them as one whole tensor. So other tools can read the tensor, and a job
that divides the rows differently can restore it. A save gathers the rows on the first rank, which
holds the whole tensors in memory until they are written. A restore broadcasts the tensors piece by
piece, and each rank keeps only its own rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.agreement.collectives import Collectives
from hvdkit.checkpoint import tree
from hvdkit.checkpoint.coordination import gather
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.items import does_not_fit
from hvdkit.checkpoint.memory import allocate
from hvdkit.checkpoint.state import Discarded, Tensor, TensorSpec, Tree
from hvdkit.checkpoint.step_files import EncodedPart
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.errors import UsageError

#: Bytes that all ranks together send in one gather.
_ROUND_BYTES = 64_000_000

#: One rank's rows: name -> dtype, shape of the whole tensor, first row, number of rows.
Layout = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Shard:
    """This rank's rows of a tensor whose rows are divided among the ranks.

    Attributes:
        tensor: the rows, of shape [rows, ...]; `rows` may be 0. Or a function without arguments
            that returns the rows, for a tensor that is replaced during training. Each save and
            restore calls the function. A restore writes into the returned tensor, so the function
            must not return a copy.
        first: the index of this rank's first row in the whole tensor.
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
        identity: returns a value that is equal for two objects if they have the same memory.

    Raises:
        UsageError: a name or a shard is not valid.
    """

    def __init__(
        self,
        shards: Mapping[str, Shard],
        tensor: Callable[[Any, str], Tensor],
        identity: Callable[[Any], Any] = id,
    ) -> None:
        if not isinstance(shards, Mapping):
            raise UsageError(f"sharded is a {type(shards).__name__}: expected a dict of hvd.Shard")
        self._tensor = tensor
        self._identity = identity
        for name in shards:
            # safetensors reserves the second name.
            if not isinstance(name, str) or name in ("", "__metadata__"):
                raise UsageError(
                    f"sharded has the name {name!r}: expected a string that is not empty and not "
                    f"'__metadata__'"
                )
        # Sorted, because all ranks must gather the tensors in the same order.
        self._shards = {name: _checked(_subject(name), shards[name]) for name in sorted(shards)}
        for name, shard in self._shards.items():
            # The result of a function may not exist yet.
            if not callable(shard.tensor):
                self._rows_of(name)

    def _rows_of(self, name: str) -> _Rows:
        """Return the rows of a shard as they are now.

        Raises:
            UsageError: they do not fit the whole tensor.
        """
        shard, subject = self._shards[name], _subject(name)
        own = self._tensor(self._given(name), subject)
        if not own.spec.shape:
            raise UsageError(f"{subject} has no dimensions: expected a tensor with rows")
        rows = own.spec.shape[0]
        if shard.first + rows > shard.total:
            raise UsageError(
                f"{subject} has {rows} rows, first={shard.first} and total={shard.total}: expected "
                f"first + rows to be at most total"
            )
        return _Rows(own, shard.first, shard.total)

    def _given(self, name: str) -> Any:
        """Return the framework's tensor of a shard.

        Raises:
            UsageError: its function raised an error.
        """
        given = self._shards[name].tensor
        if not callable(given):
            return given
        try:
            return given()
        except Exception as error:
            raise UsageError(
                f"the function of {_subject(name)} raised {type(error).__name__}: {error}; "
                f"expected this rank's rows"
            ) from error

    def _expect_no_copies(self) -> None:
        """Check that the functions return the memory of the model.

        Raises:
            UsageError: a function returns new memory.
        """
        for name, shard in self._shards.items():
            # Keep both results: if the first were freed, the second could get the same address.
            first, second = self._given(name), self._given(name)
            if callable(shard.tensor) and self._identity(first) != self._identity(second):
                raise UsageError(
                    f"the function of {_subject(name)} returns a new copy at each call, so a "
                    f"restore would be lost: expected the tensor that the training uses, without "
                    f"clone(), cpu() or arithmetic"
                )

    def _rows(self) -> dict[str, _Rows]:
        return {name: self._rows_of(name) for name in self._shards}

    def save(self) -> Tree:
        """Return the dtypes and shapes of the whole tensors."""
        return {name: rows.spec for name, rows in self._rows().items()}

    def prepare_gather(self, is_first: bool) -> Gather:
        """Return a `Gather` of the rows as they are now. Not a collective.

        Args:
            is_first: whether this is the first rank, which receives the rows.

        Raises:
            UsageError: the rows do not fit the whole tensor.
            MemoryError: there is not enough memory.
        """
        return Gather(self._rows(), is_first)

    def plan_restore(self, tree: Tree) -> Tree:
        """Return `Tensor`s that store this rank's rows of each tensor.

        Raises:
            UsageError: the checkpoint has other tensors.
        """
        prepared, left = self.plan_partial_restore(tree)
        if left:
            raise does_not_fit("sharded=", left)
        return prepared

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Plan the restore of the tensors that have the same name, shape and dtype.

        Raises:
            UsageError: a function returns a copy, or rows that do not fit the whole tensor.
        """
        self._expect_no_copies()
        own = self._rows()
        left = [
            f"{name} is {_text(rows.spec)} here and {_text(tree.get(name))} in the checkpoint"
            for name, rows in own.items()
            if tree.get(name) != rows.spec
        ]
        left += [
            f"the checkpoint has {name}, which is not in sharded="
            for name in tree
            if name not in own
        ]
        fitting = {name: rows for name, rows in own.items() if tree.get(name) == rows.spec}
        return {name: fitting.get(name, Discarded(spec)) for name, spec in tree.items()}, left

    def restore(self, tree: Tree) -> None:
        """Do nothing: the rows are in the tensors already."""


class Gather:
    """Gathers the rows of all ranks on the first rank.

    The constructor allocates the whole tensors, and copies rows that are not in host memory. Once
    the ranks have agreed to gather, only the network can fail, apart from small buffers.

    Args:
        rows: name -> this rank's rows, in the same order on all ranks.
        is_first: whether this is the first rank.

    Attributes:
        layout: the rows that this rank has.
        part: on the first rank, the part to write, whose content `run` fills; else None.
    """

    def __init__(self, rows: Mapping[str, _Rows], is_first: bool) -> None:
        self._rows = rows
        self._own = {name: each.content() for name, each in rows.items()}
        self.layout: Layout = {
            name: [each.spec.dtype, [*each.spec.shape], each.first, each.count]
            for name, each in rows.items()
        }
        self._wholes: dict[str, np.ndarray] = {}
        self.part: EncodedPart | None = None
        if is_first:
            encoded, specs = tree.encode({n: each.spec for n, each in rows.items()}, "sharded")
            self._wholes = {name: _memory_of_whole(name, each.spec) for name, each in rows.items()}
            self.part = EncodedPart(encoded, {n: (specs[n], self._wholes[n]) for n in specs})

    def run(self, collectives: Collectives, layouts: Sequence[Layout]) -> None:
        """Gather the rows. A collective.

        Args:
            collectives: of the ranks.
            layouts: of each rank, in order; `check_layouts` has accepted them.
        """
        for name, rows in self._rows.items():
            own, row = self._own[name], rows.row_bytes
            step = max(_ROUND_BYTES // len(layouts) // max(row, 1), 1) * row
            longest = max(layout[name][3] for layout in layouts) * row
            for begin in range(0, longest, max(step, 1)):
                piece = own[begin : begin + step].tobytes()
                received = gather(collectives, piece, "hvdkit.checkpoint.shards")
                if name in self._wholes:
                    for layout, content in zip(layouts, received, strict=True):
                        at = layout[name][2] * row + begin
                        self._wholes[name][at : at + len(content)] = np.frombuffer(
                            content, np.uint8
                        )


def _memory_of_whole(name: str, spec: TensorSpec) -> np.ndarray:
    try:
        return allocate(nbytes(spec))
    # NumPy raises ValueError for more bytes than it can address.
    except (MemoryError, ValueError) as error:
        raise CheckpointError(
            f"there is no memory for the whole tensor {_subject(name)}, {_text(spec)}, of "
            f"{nbytes(spec)} bytes: {error}; the first rank holds it until it is written"
        ) from error


def _subject(name: str) -> str:
    return f"sharded[{name!r}]"


def _checked(subject: str, shard: Any) -> Shard:
    """Return the shard with Python's integers.

    Raises:
        UsageError: it is not a shard, or its `first` or `total` is not valid.
    """
    if not isinstance(shard, Shard):
        raise UsageError(f"{subject} is a {type(shard).__name__}: expected a hvd.Shard")
    numbers = {}
    for argument in ("total", "first"):
        value = getattr(shard, argument)
        try:
            if isinstance(value, bool):
                raise TypeError("a bool")
            numbers[argument] = operator.index(value)
            if numbers[argument] < 0:
                raise ValueError("negative")
        except (TypeError, ValueError):
            raise UsageError(
                f"{subject} has {argument}={value!r}: expected a whole number from 0"
            ) from None
    if numbers["first"] > numbers["total"]:
        raise UsageError(
            f"{subject} has first={numbers['first']} and total={numbers['total']}: expected first "
            f"to be at most total"
        )
    return replace(shard, **numbers)


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

    def content(self) -> np.ndarray:
        """Return this rank's rows, without a copy if possible: uint8, row-major."""
        content = self._own.memory()
        if content is None:
            content = allocate(nbytes(self._own.spec))
            self._own.read(content)
        return content

    def read(self, out: np.ndarray) -> None:
        """Raise an error: this rank does not have the whole tensor."""
        raise NotImplementedError("a rank has only its own rows")

    def memory(self) -> None:
        """Return None: no memory holds the whole tensor."""

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Store the bytes of a piece that belong to this rank's rows."""
        begin = self.first * self.row_bytes
        end = begin + self.count * self.row_bytes
        left, right = max(start, begin), min(start + content.size, end)
        if left < right:
            self._own.write(content[left - start : right - start], left - begin)


def check_layouts(ranks: Sequence[int], layouts: Sequence[Layout], consequence: str) -> None:
    """Check that each row of each tensor belongs to exactly one rank.

    Args:
        ranks: the ranks.
        layouts: of each rank, in the same order; the same on every rank.
        consequence: added to an error.

    Raises:
        UsageError: a row is missing or belongs to two ranks, or names, dtypes or shapes differ.
    """
    problem = _layout_problem(ranks, layouts)
    if problem is not None:
        raise UsageError(f"{problem} ({consequence})")


def _layout_problem(ranks: Sequence[int], layouts: Sequence[Layout]) -> str | None:
    for rank, layout in zip(ranks, layouts, strict=True):
        if layout.keys() != layouts[0].keys():
            return (
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
                return (
                    f"sharded[{name!r}] is {own_dtype}{own_shape} on rank {rank}, and "
                    f"{dtype}{shape} on rank {ranks[0]}: expected the same dtype and shape"
                )
            if first != end and count:
                return (
                    f"sharded[{name!r}] of rank {rank} begins at row {first}: expected row {end}, "
                    f"because the rows of the other ranks before it end there"
                )
            end += count
        if end != shape[0]:
            return f"sharded[{name!r}] has {end} rows on all ranks together: expected {shape[0]}"
    return None


def _text(spec: Any) -> str:
    return f"{spec.dtype}{[*spec.shape]}" if isinstance(spec, TensorSpec) else "missing"
