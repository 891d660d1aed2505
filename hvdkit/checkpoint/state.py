"""The state in a checkpoint: trees whose leaves are plain values and tensors.

A tree is what JSON knows (None, bool, int, float, str, lists, dicts with string keys), and besides
it tuples, dicts with other keys that are plain, bytes, complex numbers, infinities and NaN, NumPy
scalars and arrays, `Tensor`s and `SmallTensor`s. Nothing else, and no pickle: what opens a
checkpoint runs no code of it.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Tree = Any


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and the shape of a tensor.

    Attributes:
        dtype: as safetensors calls it, such as `F32` or `BF16`; also `C128` and `C32`.
        shape: its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]


class Tensor(Protocol):
    """A tensor of some framework, where it lives."""

    @property
    def spec(self) -> TensorSpec:
        """Its dtype and shape."""
        ...

    def read(self, out: np.ndarray) -> None:
        """Copy its content, row-major, into `out`, which is uint8 and of its size in bytes."""
        ...

    def memory(self) -> np.ndarray | None:
        """Return its content without a copy: uint8, one dimension, row-major.

        None if the content is not in host memory or not row-major. The result is valid until the
        tensor changes.
        """
        ...

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Put `content`, a piece of what `read` gives, where it begins at byte `start`.

        A tensor comes in one piece or in several, of whole elements, from the first byte to the
        last one after the other. The memory of a piece is aligned for its elements.
        """
        ...


@dataclass(frozen=True)
class SmallTensor:
    """A tensor with its content, which is written into the tree itself.

    Attributes:
        spec: its dtype and shape.
        content: its bytes, row-major; at most `hvdkit.checkpoint.tree.MAX_ARRAY_BYTES`.
    """

    spec: TensorSpec
    content: bytes


class StatefulItem(Protocol):
    """A part of the state that all ranks hold alike, such as a model. Rank 0's is saved."""

    def save(self) -> Tree:
        """The state now. Tensors in it stay where they are; the caller reads them at once."""
        ...

    def plan_restore(self, tree: Tree) -> Tree:
        """Say where a saved state's tensors are to go.

        Changes nothing: `restore` follows only if every rank could make its plan.

        Args:
            tree: as `save` gave it, with a `TensorSpec` in place of each tensor. NumPy arrays
                in it have no content yet.

        Returns:
            The same tree, with a `Tensor` in place of each `TensorSpec`: one of the part's own,
            or a new one, on the right device. NumPy arrays stay, and are filled too.

        Raises:
            UsageError: the state does not fit, naming the first things that differ.
        """
        ...

    def restore(self, tree: Tree) -> None:
        """Take over the state, once what `plan_restore` returned has been filled."""
        ...


@runtime_checkable
class PartialItem(StatefulItem, Protocol):
    """An item that can restore some of its tensors, such as a model with another last layer."""

    def plan_partial_restore(self, tree: Tree) -> tuple[Tree, list[str]]:
        """Prepare the tensors that fit, of a state that does not fit everywhere.

        Returns:
            The tree, with a `Discarded` in place of each tensor that has no use here; and a
            description of each tensor that is not restored, on either side.
        """
        ...


class Discarded:
    """A `Tensor` that nobody keeps.

    Attributes:
        spec: its dtype and shape.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec

    def read(self, out: np.ndarray) -> None:
        """There is no content: fill `out` with zeros."""
        out[:] = 0

    def memory(self) -> None:
        """There is no content."""

    def write(self, content: np.ndarray, start: int = 0) -> None:
        """Ignore the content."""


class RankItem(Protocol):
    """A part that each rank has for itself, such as its random numbers. Every rank's is saved.

    Its tree is small: it has no `Tensor`s, but may have bytes, NumPy arrays and `SmallTensor`s.
    """

    def save(self) -> Tree:
        """This rank's state now."""
        ...

    def restore(self, tree: Tree) -> None:
        """Take over what the same rank of a job of the same size has saved."""
        ...


@runtime_checkable
class CheckedRankItem(RankItem, Protocol):
    """A `RankItem` that may not fit a saved state."""

    def check(self, tree: Tree) -> None:
        """Compare a saved state with this rank's, before anything is restored.

        Raises:
            UsageError: the state does not fit. A restore with `strict=False` restores what fits.
        """
        ...


@runtime_checkable
class RequiredRankItem(CheckedRankItem, Protocol):
    """A `CheckedRankItem` that a job cannot resume without, such as a rank's position in its data.

    A restore that cannot restore it is an error; with `strict=False` it leaves it as it is.

    Attributes:
        required: true.
    """

    required: bool
