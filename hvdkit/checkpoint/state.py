"""The state in a checkpoint: trees whose leaves are plain values and tensors.

A tree holds the values of JSON (None, bool, int, float, str, lists, dicts with string keys). It
also holds tuples, dicts with other plain keys, bytes, complex numbers, infinities and NaN, NumPy
scalars and arrays, `Tensor`s and `SmallTensor`s. It holds nothing else, in particular no pickle, so
opening a checkpoint never runs code from it.

A stateful item is an object whose state a checkpoint holds. A part is the saved state of one item:
a tree, and one file for its tensors.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Tree = Any


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and the shape of a tensor.

    Attributes:
        dtype: safetensors' name, such as `F32` or `BF16`; or `C128` or `C32`, which safetensors
            does not have.
        shape: its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]


class Tensor(Protocol):
    """A framework's tensor, in its own memory."""

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""
        ...

    def read(self, out: np.ndarray) -> None:
        """Copy the content, row-major, into `out`: uint8, of the tensor's size in bytes."""
        ...

    def memory(self) -> np.ndarray | None:
        """Return the content without a copy: uint8, one dimension, row-major.

        None if the content is not in host memory or not row-major. The result is valid until the
        tensor changes.
        """
        ...

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Write `content` into the tensor, beginning at byte `start`.

        The bytes are those that `read` copies. A tensor is written in one or several pieces of
        whole elements, in order. The memory of a piece is aligned for its elements.
        """
        ...


@dataclass(frozen=True)
class SmallTensor:
    """A tensor whose content is stored in the tree itself.

    Attributes:
        spec: its dtype and shape.
        content: its bytes, row-major; at most `hvdkit.checkpoint.tree.MAX_ARRAY_BYTES`.
    """

    spec: TensorSpec
    content: bytes


class StatefulItem(Protocol):
    """An item whose state is the same on all ranks, such as a model. Rank 0's state is saved."""

    def save(self) -> Tree:
        """Return the current state. Tensors are not copied: the caller reads them at once."""
        ...

    def plan_restore(self, tree: Tree) -> Tree:
        """Return the destinations for a saved state's tensors.

        This changes nothing. `restore` is called only if every rank could make its plan.

        Args:
            tree: the result of `save`, with a `TensorSpec` in place of each tensor. NumPy arrays
                are not filled yet.

        Returns:
            The same tree, with a `Tensor` in place of each `TensorSpec`: one of the item's own
            tensors or a new one, on the right device. NumPy arrays stay and are filled later.

        Raises:
            UsageError: the state does not fit. The message has the first differences.
        """
        ...

    def restore(self, tree: Tree) -> None:
        """Load the state: the tree that `plan_restore` returned, now filled."""
        ...


@runtime_checkable
class ComparedItem(StatefulItem, Protocol):
    """An item whose structure each save compares between the ranks, such as a model.

    A restore sends the first rank's state to all ranks, so it must fit the item of every rank.
    """

    def signature(self) -> list[str]:
        """Return a text for each part of the structure, such as a tensor's name, dtype and shape.

        Raises:
            UsageError: the item has a state that cannot be saved.
        """
        ...


@runtime_checkable
class OptionalItem(StatefulItem, Protocol):
    """An item that checkpoints of earlier versions may lack.

    Attributes:
        optional: whether a restore continues without the item, with a warning.
    """

    @property
    def optional(self) -> bool: ...


@runtime_checkable
class DividedItem(StatefulItem, Protocol):
    """An item that may have tensors of which each rank has a part: see `sharding.Divided`.

    Attributes:
        divided: whether it has some now. Every rank then calls `save`.
    """

    @property
    def divided(self) -> bool: ...


def is_divided(item: StatefulItem) -> bool:
    """Return whether an item has tensors of which each rank has a part."""
    return isinstance(item, DividedItem) and item.divided


@runtime_checkable
class PartialItem(StatefulItem, Protocol):
    """An item that can restore some of its tensors, such as a model with another last layer."""

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Return destinations for the tensors that fit.

        Returns:
            A pair: the tree, with a `Discarded` for each saved tensor that does not fit; and a
            description of each tensor, in the checkpoint or in the item, that is not restored.
        """
        ...


@runtime_checkable
class DependentItem(StatefulItem, Protocol):
    """An item whose partial restore depends on other items, such as an optimizer on its models."""

    def plan_dependent_restore(
        self, tree: Tree, wanted: Collection[str], planned: Collection[str]
    ) -> tuple[Tree, list[str]]:
        """Return destinations for the tensors that fit, after all other items have planned.

        Args:
            tree: the saved state.
            wanted: the names of the parts to restore.
            planned: the names of the parts that fit, at least partly, and will be restored.

        Returns:
            As `PartialItem.plan_partial_restore`.
        """
        ...


class Discarded:
    """A `Tensor` whose content is ignored.

    Attributes:
        spec: its dtype and shape.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec

    def read(self, out: np.ndarray) -> None:
        """Fill `out` with zeros."""
        out[:] = 0

    def memory(self) -> None:
        """Return None: there is no content."""

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Ignore the content."""


class RankItem(Protocol):
    """An item with a state of its own on each rank, such as random number generators.

    Every rank's state is saved. Its tree is small: no `Tensor`s, but bytes, NumPy arrays and
    `SmallTensor`s.
    """

    def save(self) -> Tree:
        """Return this rank's current state."""
        ...

    def restore(self, tree: Tree) -> None:
        """Load the state that the same rank saved, in a job with the same number of ranks."""
        ...


@runtime_checkable
class DifferingRankItem(RankItem, Protocol):
    """A `RankItem` with values that another item saves too, as those of the first rank.

    So each rank's values are saved only where ranks differ.
    """

    def digests(self) -> Mapping[str, int]:
        """Return a digest of each value that may be equal on all ranks, by name."""
        ...

    def select(self, differing: Collection[str]) -> None:
        """Set the names of `digests` that differ between ranks, for the next `save`."""
        ...


@runtime_checkable
class CheckedRankItem(RankItem, Protocol):
    """A `RankItem` that can check whether a saved state fits."""

    def check(self, tree: Tree) -> None:
        """Check a saved state before anything is restored.

        Raises:
            UsageError: the state does not fit. With `strict=False`, `restore` is called
                nevertheless and must load only what fits; a `RequiredRankItem` is not restored.
        """
        ...


@runtime_checkable
class RequiredRankItem(CheckedRankItem, Protocol):
    """A `CheckedRankItem` that a job needs to resume, such as a rank's position in its data.

    If the item cannot be restored, the whole restore fails. With `strict=False`, the restore
    continues without the item.

    Attributes:
        required: always true.
    """

    required: bool
