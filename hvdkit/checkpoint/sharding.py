"""Tensors that are divided among the ranks, such as a large embedding or FSDP2's parameters.

A checkpoint stores each of them as one whole tensor. So other tools can read the tensor, and a job
that divides it differently, or not at all, can restore it. A save gathers the parts on the first
rank, which holds the whole tensors in memory until they are written. A restore broadcasts the
tensors piece by piece, and each rank keeps only its own part.

The part of a rank is a box: a range of indices in each dimension, or of the elements in row-major
order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import RankMismatchError, name_ranks, ranks_by_value
from hvdkit.checkpoint.coordination import gather
from hvdkit.checkpoint.dtypes import ELEMENT_BYTES
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.items import does_not_fit
from hvdkit.checkpoint.memory import allocate
from hvdkit.checkpoint.state import Discarded, Tensor, TensorSpec, Tree
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.errors import UsageError

#: Bytes that all ranks together send in one gather.
_ROUND_BYTES = 64_000_000

#: One rank's parts, by "PART[NAME]": dtype and shape of the whole tensor (see `Divided.indexed`),
#: first index and length of the part in each dimension, and a digest of its content; None if other
#: ranks have no copies.
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

    def _rows_of(self, name: str) -> Divided:
        """Return the rows of a shard as they are now.

        Raises:
            UsageError: they do not fit the whole tensor.
        """
        shard, subject = self._shards[name], _subject(name)
        own = self._tensor(self._given(name), subject)
        if isinstance(own, Divided):
            raise UsageError(
                f"{subject} is a tensor that the framework divides: expected this rank's rows, a "
                f"plain tensor. Pass the model of the tensor as model="
            )
        if not own.spec.shape:
            raise UsageError(f"{subject} has no dimensions: expected a tensor with rows")
        rows = own.spec.shape[0]
        if shard.first + rows > shard.total:
            raise UsageError(
                f"{subject} has {rows} rows, first={shard.first} and total={shard.total}: expected "
                f"first + rows to be at most total"
            )
        rest = own.spec.shape[1:]
        return Divided(own, (shard.total, *rest), (shard.first, *(0 for _ in rest)))

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

    def _rows(self) -> dict[str, Divided]:
        return {name: self._rows_of(name) for name in self._shards}

    #: Whether every rank saves the item.
    divided = True

    def save(self) -> Tree:
        """Return this rank's parts of the tensors.

        Raises:
            UsageError: the rows do not fit the whole tensor.
        """
        return self._rows()

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
    """Gathers the parts of all ranks on the first rank.

    The constructor allocates the whole tensors, and copies parts that are not in host memory. Once
    the ranks have agreed to gather, only the network can fail, apart from small buffers.

    Args:
        tensors: part -> name -> tensor, in the same order on all ranks.
        is_first: whether this is the first rank.

    Attributes:
        layout: the parts that this rank has.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Any]], is_first: bool) -> None:
        self._own: dict[str, np.ndarray] = {}
        self._wholes: dict[str, tuple[str, str, TensorSpec, np.ndarray]] = {}
        self.layout: dict[str, Sequence[Any]] = {}
        for part, named in tensors.items():
            for name, tensor in named.items():
                if isinstance(tensor, Divided):
                    subject = f"{part}[{name!r}]"
                    own = self._own[subject] = tensor.content()
                    self.layout[subject] = [
                        tensor.spec.dtype,
                        [*tensor.indexed],
                        [*tensor.first],
                        [*tensor.counts],
                        _digest(own) if tensor.has_copies else None,
                    ]
                    if is_first:
                        whole = _memory_of_whole(subject, tensor.spec)
                        self._wholes[subject] = part, name, tensor.spec, whole

    def run(
        self,
        collectives: Collectives,
        layouts: Sequence[Layout],
    ) -> dict[str, dict[str, tuple[TensorSpec, np.ndarray]]]:
        """Gather the parts. A collective.

        Args:
            collectives: of the ranks.
            layouts: of each rank, in order; `check_layouts` has accepted them.

        Returns:
            On the first rank, part -> name -> the spec and the content of each whole tensor.
        """
        own = collectives.ranks.index(collectives.rank)
        for pieces in _rounds(layouts):
            sent = (self._own[p.subject][p.places[own]] for p in pieces)
            data = b"".join(content.tobytes() for content in sent)
            received = gather(collectives, data, "hvdkit.checkpoint.shards")
            for rank, data in enumerate(received):
                content = memoryview(data)
                for piece in pieces if data else ():
                    place = piece.places[rank]
                    length = place.stop - place.start
                    *_, whole = self._wholes[piece.subject]
                    piece.write(layouts[rank][piece.subject], content[:length], whole)
                    content = content[length:]
        found: dict[str, dict[str, tuple[TensorSpec, np.ndarray]]] = {}
        for part, name, spec, memory in self._wholes.values():
            found.setdefault(part, {})[name] = (spec, memory)
        return found


@dataclass(frozen=True)
class _Piece:
    """Some rows of the ranks' parts of a tensor. A row is an index in the first dimension.

    Attributes:
        subject: the name of the tensor in the layouts.
        begin: the first row, counted from the first one of each part.
        places: the bytes in the part of each rank; empty for a rank that sends nothing.
    """

    subject: str
    begin: int
    places: Sequence[slice]

    def write(self, entry: Sequence[Any], content: memoryview[Any], whole: np.ndarray) -> None:
        """Write the bytes of a rank, which has `entry` in its layout, into the whole tensor."""
        if content:
            view = whole.reshape(*(entry[1] or [1]), -1)
            box = [slice(f, f + n) for f, n in zip(*_box(entry), strict=True)]
            rows = view[(*box,)][self.begin :]
            rows = rows[: len(content) // rows[0].size]
            rows[...] = np.frombuffer(content, np.uint8).reshape(rows.shape)


def _rounds(layouts: Sequence[Layout]) -> Iterator[list[_Piece]]:
    """Yield the pieces that are gathered together, the same on all ranks."""
    pieces: list[_Piece] = []
    size = 0
    for subject, (dtype, *_) in layouts[0].items():
        boxes = [_box(layout[subject]) for layout in layouts]
        # Of several copies, the first one is sent.
        counts = [n[0] * (boxes.index((first, n)) == k) for k, (first, n) in enumerate(boxes)]
        rows = [math.prod(n[1:]) * ELEMENT_BYTES[dtype] for _, n in boxes]
        step = max(_ROUND_BYTES // len(layouts) // max(*rows, 1), 1)
        for begin in range(0, max(counts), step):
            places = [
                slice(min(begin, n) * row, min(begin + step, n) * row)
                for n, row in zip(counts, rows, strict=True)
            ]
            length = sum(place.stop - place.start for place in places)
            if pieces and size + length > _ROUND_BYTES:
                yield pieces
                pieces, size = [], 0
            pieces.append(_Piece(subject, begin, places))
            size += length
    if pieces:
        yield pieces


def _digest(content: np.ndarray) -> str:
    return xxhash.xxh64_hexdigest(content.data) if content.size else ""


def _box(entry: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first index and the length in each dimension. A scalar has one dimension."""
    _, shape, first, counts, _ = entry
    return (tuple(first), tuple(counts)) if shape else ((0,), (1,))


def _memory_of_whole(subject: str, spec: TensorSpec) -> np.ndarray:
    try:
        return allocate(nbytes(spec))
    # NumPy raises ValueError for more bytes than it can address.
    except (MemoryError, ValueError) as error:
        raise CheckpointError(
            f"there is no memory for the whole tensor {subject}, {_text(spec)}, of "
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


class Divided:
    """A `Tensor` that stands for a whole tensor, and stores this rank's part only.

    Args:
        own: the part.
        shape: the shape of the whole tensor.
        first: the first index of the part in each dimension.
        has_copies: whether other ranks may have the same part.
        indexed: the shape in which the part is a box: `shape`, or its number of elements.

    Attributes:
        spec: of the whole tensor.
        indexed: see above.
        first: see above.
        counts: the length of the part in each dimension.
        has_copies: see above.
    """

    def __init__(
        self,
        own: Tensor,
        shape: Sequence[int],
        first: Sequence[int],
        has_copies: bool = False,
        indexed: Sequence[int] | None = None,
    ) -> None:
        self._own = own
        self.counts = own.spec.shape
        self.first = tuple(first)
        self.spec = TensorSpec(own.spec.dtype, tuple(shape))
        self.indexed = self.spec.shape if indexed is None else tuple(indexed)
        self.has_copies = has_copies

    def content(self) -> np.ndarray:
        """Return this rank's part, without a copy if possible: uint8, row-major."""
        content = self._own.memory()
        if content is None:
            content = allocate(nbytes(self._own.spec))
            self._own.read(content)
        return content

    def read(self, out: np.ndarray) -> None:
        """Raise an error: this rank does not have the whole tensor."""
        raise NotImplementedError("a rank has only its own part")

    def memory(self) -> None:
        """Return None: no memory holds the whole tensor."""

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Store the bytes of a piece that belong to this rank's part."""
        width = ELEMENT_BYTES[self.spec.dtype]
        box = [*zip(self.indexed, self.first, self.counts, strict=True), (width, 0, width)]
        found = [each for each in _inside(content, start, box) if each.size]
        if found:
            part = found[0] if len(found) == 1 else np.concatenate(found)
            # Aligned for its elements.
            part = part if part.ctypes.data % width == 0 else part.copy()
            self._own.write(part, _before(start, box))


#: Length of the whole tensor, first index and length of the part, in each dimension.
_Box = Sequence[tuple[int, int, int]]


def _inside(content: np.ndarray, start: int, box: _Box) -> Iterator[np.ndarray]:
    """Yield the bytes that are in a box, in order.

    Args:
        content: bytes of the whole tensor, row-major.
        start: the place of the first of them in the tensor.
        box: the box; its last dimension are the bytes of an element.
    """
    (_, first, count), *inner = box
    row = math.prod(length for length, _, _ in inner)
    if not row:
        return
    index, before = divmod(start, row)
    partial = min(row - before, content.size) if before else 0
    whole = (content.size - partial) // row
    if partial:
        if first <= index < first + count:
            yield from _inside(content[:partial], before, inner)
        index += 1
    begin, end = max(first, index), min(first + count, index + whole)
    if begin < end:
        lengths = [length for length, _, _ in inner]
        rows = content[partial : partial + whole * row].reshape(whole, *lengths)
        places = [slice(f, f + n) for _, f, n in inner]
        yield rows[(slice(begin - index, end - index), *places)].reshape(-1)
    rest = content[partial + whole * row :]
    if rest.size and first <= index + whole < first + count:
        yield from _inside(rest, 0, inner)


def _before(start: int, box: _Box) -> int:
    """Return the number of bytes in a box before the byte `start` of the whole tensor."""
    (_, first, count), *inner = box
    row = math.prod(length for length, _, _ in inner)
    index, before = divmod(start, row)
    own = math.prod(n for _, _, n in inner)
    if not first <= index < first + count:
        return own * (0 if index < first else count)
    return own * (index - first) + (_before(before, inner) if inner else 0)


def check_layouts(ranks: Sequence[int], layouts: Sequence[Layout], consequence: str) -> None:
    """Check that the parts of all ranks make up the tensors.

    Args:
        ranks: the ranks.
        layouts: of each rank, in the same order; the same on every rank.
        consequence: added to an error.

    Raises:
        UsageError: an element is missing, a row belongs to two ranks, or names, dtypes or shapes
            differ.
        RankMismatchError: ranks have different values of the same part.
    """
    problem = _layout_problem(ranks, layouts)
    if problem is not None:
        raise UsageError(f"{problem} ({consequence})")
    problem = _copies_problem(ranks, layouts)
    if problem is not None:
        raise RankMismatchError(f"{problem} ({consequence})")


def _layout_problem(ranks: Sequence[int], layouts: Sequence[Layout]) -> str | None:
    for rank, layout in zip(ranks, layouts, strict=True):
        if layout.keys() != layouts[0].keys():
            own = [name for name in layout if name not in layouts[0]]
            lacks = [name for name in layouts[0] if name not in layout]
            return (
                f"rank {rank} has parts of {', '.join(own[:3]) or 'no tensor'} that rank "
                f"{ranks[0]} does not have, and lacks {', '.join(lacks[:3]) or 'none'}: expected "
                f"the same tensors on all ranks"
            )
    for name, (dtype, shape, *_) in layouts[0].items():
        entries = [layout[name] for layout in layouts]
        for rank, (own_dtype, own_shape, *_) in zip(ranks, entries, strict=True):
            if (own_dtype, own_shape) != (dtype, shape):
                return (
                    f"{name} is {own_dtype}{own_shape} on rank {rank}, and {dtype}{shape} on rank "
                    f"{ranks[0]}: expected the same dtype and shape"
                )
        boxes = [_box(entry) for entry in entries]
        if all(entry[4] is not None for entry in entries):
            problem = _parts_problem(boxes, shape)
        else:
            problem = _rows_problem(ranks, boxes, shape)
        if problem:
            return f"{name} {problem}"
    return None


def _parts_problem(boxes: Sequence[tuple[Any, Any]], shape: Sequence[int]) -> str:
    """Return why parts, of which there may be copies, are no whole tensor."""
    parts = sorted({box for box in boxes if math.prod(box[1])})
    elements = sum(math.prod(counts) for _, counts in parts)
    begins, lengths = (np.array([box[k] for box in parts]) for k in (0, 1))
    meets = (begins[:, None] < begins + lengths) & (begins < (begins + lengths)[:, None])
    if elements == math.prod(shape) and meets.all(axis=2).sum() == len(parts):
        return ""
    texts = [f"{list(first)} + {list(counts)}" for first, counts in parts]
    return (
        f"is divided into parts that do not make up its shape {list(shape)} (first index + "
        f"length): {', '.join(texts[:8])}. Expected device meshes of one shape, whose ranks all "
        f"have the checkpointer"
    )


def _rows_problem(
    ranks: Sequence[int], boxes: Sequence[tuple[Any, Any]], shape: Sequence[int]
) -> str:
    """Return why rows, each of which one rank must have, are no whole tensor."""
    end = 0
    for (first, count), rank in sorted(
        ((first[0], counts[0]), rank) for rank, (first, counts) in zip(ranks, boxes, strict=True)
    ):
        if first != end and count:
            return (
                f"of rank {rank} begins at row {first}: expected row {end}, because the rows of "
                f"the other ranks before it end there"
            )
        end += count
    return "" if end == shape[0] else f"has {end} rows on all ranks together: expected {shape[0]}"


def _copies_problem(ranks: Sequence[int], layouts: Sequence[Layout]) -> str | None:
    """Return which tensor has a part that differs between the ranks that have it."""
    for name in layouts[0]:
        entries = {r: layout[name] for r, layout in zip(ranks, layouts, strict=True)}
        for holders in ranks_by_value({r: _box(entry) for r, entry in entries.items()}).values():
            versions = ranks_by_value({r: entries[r][4] for r in holders})
            if len(versions) > 1:
                texts = " and ".join(name_ranks(each) for each in versions.values())
                return (
                    f"{name}: {name_ranks(holders)} have the same part of the tensor, but {texts} "
                    f"have different values. Call hvd.broadcast_parameters(model, root_rank=0) "
                    f"before the first step, and reduce the gradients with hvd.DistributedOptimizer"
                )
    return None


def _text(spec: Any) -> str:
    return f"{spec.dtype}{[*spec.shape]}" if isinstance(spec, TensorSpec) else "missing"
