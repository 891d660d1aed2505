"""Convert trees with torch tensors to the trees that a checkpoint holds, and back."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hvdkit.checkpoint.state import SmallTensor, TensorSpec, Tree
from hvdkit.checkpoint.tree import MAX_ARRAY_BYTES
from hvdkit.errors import UsageError
from hvdkit.torch.items.tensors import CPU, Held, TorchTensor, empty, held


def with_tensors(value: Any, subject: str) -> Tree:
    """Return `value` with a `Held` in place of each tensor in it.

    Args:
        value: dicts, lists and tuples that contain tensors.
        subject: its name in errors.
    """
    return mapped(
        value,
        lambda leaf, path: (
            held(leaf, at(subject, path)) if isinstance(leaf, torch.Tensor) else leaf
        ),
    )


def without_tensors(value: Tree) -> Any:
    """Return a tree with the tensor in place of each `Held`."""
    return mapped(value, lambda leaf, _: leaf.tensor if isinstance(leaf, Held) else leaf)


def with_specs(value: Tree) -> Tree:
    """Return a tree with the `TensorSpec` in place of each `Held`."""
    return mapped(value, lambda leaf, _: leaf.spec if isinstance(leaf, Held) else leaf)


def with_small_tensors(value: Any, subject: str) -> Tree:
    """Return `value` with a `SmallTensor` in place of each tensor in it.

    Args:
        value: a tree with tensors on any device.
        subject: its name in errors.

    Raises:
        UsageError: a tensor is too large, or its dtype or layout is not supported.
    """

    def convert(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        where = at(subject, path)
        if leaf.layout == torch.strided and leaf.nbytes > MAX_ARRAY_BYTES:
            raise UsageError(
                f"{where} is a tensor of {leaf.nbytes} bytes: each tensor in the "
                f"state of a rank may have at most {MAX_ARRAY_BYTES} bytes"
            )
        tensor = TorchTensor(leaf, where)
        return SmallTensor(tensor.spec, tensor.content())

    return mapped(value, convert)


def without_small_tensors(value: Tree) -> Any:
    """Reverse `with_small_tensors`, with tensors on the CPU."""

    def convert(leaf: Any, _: Any) -> Any:
        if not isinstance(leaf, SmallTensor):
            return leaf
        tensor = empty(leaf.spec, CPU)
        TorchTensor(tensor).write(np.frombuffer(bytearray(leaf.content), np.uint8))
        return tensor

    return mapped(value, convert)


def on_host(tree: Tree) -> Tree:
    """Return a tree with new memory on the host in place of each `TensorSpec`."""

    def convert(leaf: Any, _: Any) -> Any:
        return TorchTensor(empty(leaf, CPU)) if isinstance(leaf, TensorSpec) else leaf

    return mapped(tree, convert)


def mapped(value: Any, change: Callable[[Any, tuple[Any, ...]], Any], path: Any = ()) -> Any:
    """Return a copy of nested dicts, lists and tuples, with `change(leaf, path)` for each leaf."""
    # Other dicts, such as a defaultdict, are leaves, which encoding refuses.
    if type(value).__name__ in ("dict", "OrderedDict", "Counter") and isinstance(value, dict):
        changed = {key: mapped(item, change, (*path, key)) for key, item in value.items()}
        # Keep a Counter, which MultiStepLR has.
        return changed if type(value).__name__ in ("dict", "OrderedDict") else type(value)(changed)
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change, (*path, i)) for i, item in enumerate(value))
    return change(value, path)


def leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Iterate over path and value of all leaves."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    mapped(value, lambda leaf, path: found.append((path, leaf)))
    return iter(found)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, or in a tree with a `Held` for each, in order."""
    return [leaf for _, leaf in leaves(without_tensors(value)) if isinstance(leaf, torch.Tensor)]


def at(subject: str, path: tuple[Any, ...]) -> str:
    """Return the name in errors of the value at `path`."""
    return subject + "".join(f"[{key!r}]" for key in path)
