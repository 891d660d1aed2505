"""The files of one step in an object store, for reading."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.objects.bucket import Bucket

#: Objects of at most this size are read and written in one piece.
SMALL_BYTES = 1_000_000
# Bytes of a request, and the number of requests at the same time in a sequential read.
_BLOCK_BYTES = 8_000_000
_BLOCKS_AT_ONCE = 4

# How often to read again after a reply that is too short.
_SHORT_READS = 3


def object_name(step: str, file: str) -> str:
    """Return the name of the object of a step's file."""
    return f"steps/{step}/{file}"


class ObjectFiles:
    """`StepFiles` of a step. Sequential reads read ahead; small files are read once."""

    # One thread suffices, because it sends several requests at the same time.
    readers = 1

    def __init__(self, bucket: Bucket, name: str, sizes: Mapping[str, int] | None = None) -> None:
        """Args:
        bucket: where the step is.
        name: of the step.
        sizes: the known sizes of its files in bytes.
        """
        self._bucket = bucket
        self._name = name
        self._known = dict(sizes or {})
        self._sizes: dict[str, int] = {}
        self._small: dict[str, bytes] = {}
        self._window = ("", 0, b"")

    def open(self, name: str) -> int:
        """Return the size of the file `name` in bytes."""
        size = self._known.get(name)
        if size is None:
            size = self._bucket.size(object_name(self._name, name))
        if size is None:
            raise Damaged(name, "it is missing")
        self._sizes[name] = size
        return size

    def read_into(self, name: str, out: np.ndarray, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on."""
        size = self._sizes[name]
        if offset + out.size > size:
            raise Damaged(
                name, f"it ends at byte {size}, {offset + out.size - size} bytes too early"
            )
        done = 0
        while done < out.size:
            begin, content = self._read(name, offset + done, out.size - done, size)
            piece = content[offset + done - begin :][: out.size - done]
            out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)

    def close(self) -> None:
        """Free the memory of the bytes that were read."""
        self._small = {}
        self._window = ("", 0, b"")

    def _read(self, name: str, offset: int, wanted: int, size: int) -> tuple[int, memoryview]:
        """Return bytes around `offset`, and the offset where they begin."""
        if size <= SMALL_BYTES:
            if name not in self._small:
                self._small[name] = self._fetch(name, 0, size)
            return 0, memoryview(self._small[name])
        file, begin, content = self._window
        end = begin + len(content)
        if file != name or not begin <= offset < end:
            ahead = _BLOCKS_AT_ONCE * _BLOCK_BYTES if file == name and offset == end else wanted
            begin, end = offset, min(size, offset + max(ahead, wanted, SMALL_BYTES))
            # Free the old window before the new one is read.
            self._window = ("", 0, b"")
            content = self._fetch(name, begin, end)
            self._window = (name, begin, content)
        return begin, memoryview(content)

    def _fetch(self, name: str, begin: int, end: int) -> bytes:
        ranges = [(at, min(end, at + _BLOCK_BYTES)) for at in range(begin, end, _BLOCK_BYTES)]
        for _ in range(_SHORT_READS):
            found = self._bucket.read_ranges(object_name(self._name, name), ranges)
            if found is None:
                raise Damaged(name, "it is missing")
            content = b"".join(found)
            if len(content) == end - begin:
                break
        else:
            raise Damaged(
                name,
                f"{end - begin} bytes were requested from byte {begin} on, {len(content)} read",
            )
        return content
