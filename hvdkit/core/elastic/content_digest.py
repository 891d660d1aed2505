"""Digests of picklable objects that depend on their content alone.

The bytes of a pickle depend on more than the content. For example, a set of strings has another
order in each process, and a pickle stores an object once that occurs twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Set
from typing import Any

import xxhash

#: Sets of these types can be sorted.
_SORTABLE = (int, str, bytes)


def content_digest(content: Any, plain: Callable[[Any], Any] = lambda _: None) -> bytes:
    """Return a digest of 16 bytes, which is equal for objects of equal content in this process.

    Args:
        content: a picklable object. The order of a dict is a part of its content.
        plain: returns a picklable object with the same content for an object whose pickle is not
            reproducible, such as a tensor; None for other objects.
    """
    try:
        return _digest(content, plain, fast=True)
    except (RecursionError, ValueError):
        # Only a pickle with references can store an object that contains itself.
        return _digest(content, plain, fast=False)


def _digest(content: Any, plain: Callable[[Any], Any], fast: bool) -> bytes:
    file = HashedFile()
    pickler = _Pickler(file, plain)
    # Store an object that occurs twice as often as it occurs.
    pickler.fast = fast
    pickler.dump(content)
    return file.digest()


class HashedFile:
    """A file for writing that keeps a digest of its content."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        """Add data to the digest, and return its size in bytes."""
        self._hash.update(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Return at once, because writes are not buffered. `torch.save` calls this."""

    def digest(self) -> bytes:
        """Return the digest of what was written, 16 bytes."""
        return self._hash.digest()


class _Pickler(pickle.Pickler):
    def __init__(self, file: HashedFile, plain: Callable[[Any], Any]) -> None:
        super().__init__(file, protocol=5)
        self._plain = plain

    def persistent_id(self, obj: Any) -> Any:
        """Return the content of an object whose pickle is not reproducible."""
        if type(obj) in (set, frozenset):
            return type(obj), self._sorted(obj)
        return self._plain(obj)

    def _sorted(self, elements: Set[Any]) -> list[Any]:
        types = set(map(type, elements))
        if len(types) == 1 and types <= set(_SORTABLE):
            return sorted(elements)
        return sorted(content_digest(each, self._plain) for each in elements)
