"""Files divided into chunks, each with a hash that a reader compares."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from hvdkit.checkpoint.errors import Damaged
from hvdkit.checkpoint.memory import allocate

#: Bytes of a chunk; the last chunk of a file may be shorter.
CHUNK_BYTES = 16_000_000

#: Bytes to read or write and hash at once: few enough for the processor's cache.
CACHED_BYTES = 1_000_000

#: Fills an array of uint8 with the bytes of a file, starting at an offset.
ReadInto = Callable[[np.ndarray, int], None]


@dataclass(frozen=True)
class FileRecord:
    """The size and the hashes of one file of a step.

    Attributes:
        size: bytes.
        hashes: xxh3_128 of each chunk, 32 hexadecimal digits. An empty file has one chunk.
        chunk_bytes: the size of each chunk except the last.
    """

    size: int
    hashes: tuple[str, ...]
    chunk_bytes: int

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes; expected 1 or more")
        expected = max(-(-self.size // self.chunk_bytes), 1)
        if len(self.hashes) != expected:
            raise ValueError(
                f"{len(self.hashes)} hashes for {self.size} bytes; expected {expected}"
            )

    def chunk(self, number: int) -> tuple[int, int]:
        """Return the offsets where a chunk begins and ends in the file."""
        return (
            number * self.chunk_bytes,
            min((number + 1) * self.chunk_bytes, self.size),
        )

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Return the pieces to read for the bytes from `begin` to `end`.

        A piece is a whole chunk, or a part of a chunk that is larger than `CHUNK_BYTES`, as older
        versions of hvdkit wrote.

        Returns:
            An iterator: the number of the chunk, and the offsets where the piece begins and ends.
        """
        if begin >= self.size > 0:
            return
        step = self.chunk_bytes
        for number in range(begin // step, max(-(-end // step), begin // step + 1)):
            first, last = self.chunk(number)
            for start in range(first, max(last, first + 1), CHUNK_BYTES):
                yield number, start, min(start + CHUNK_BYTES, last)


class ChunkHasher:
    """Hashes a file while it is written."""

    def __init__(self) -> None:
        self._size = 0
        self._hash = xxhash.xxh3_128()
        self._hashes: list[str] = []

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        while data:
            piece = data[: CHUNK_BYTES - self._size % CHUNK_BYTES]
            self._hash.update(piece)
            self._size += len(piece)
            if self._size % CHUNK_BYTES == 0:
                self._end_chunk()
            data = data[len(piece) :]

    def record(self) -> FileRecord:
        """Return the record of the file. Call it once, after the last `update`."""
        if self._size % CHUNK_BYTES or not self._hashes:
            self._end_chunk()
        return FileRecord(self._size, tuple(self._hashes), CHUNK_BYTES)

    def _end_chunk(self) -> None:
        self._hashes.append(self._hash.hexdigest())
        self._hash = xxhash.xxh3_128()


class ChunkedFile:
    """Reads a file and compares each chunk with its hash.

    Args:
        name: of the file, for errors.
        record: its size and hashes.
        read_into: reads the file. Several threads call it if `readers` is more than 1.
        readers: the number of threads with which `pieces` reads ahead; 0: no reading ahead.
    """

    def __init__(
        self, name: str, record: FileRecord, read_into: ReadInto, readers: int = 0
    ) -> None:
        self._name = name
        self._record = record
        self._read_into = read_into
        self._readers = readers

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._record.size

    def read(self, out: np.ndarray, offset: int) -> None:
        """Fill `out` (uint8) with the bytes from `offset` on, after checking their chunks.

        Raises:
            Damaged: one of these chunks is not what was written.
            CheckpointError: the file cannot be read now; it may be intact.
        """
        end = offset + out.size
        if not out.size:
            return
        for begin, content in self.pieces(offset, end):
            start, stop = max(offset, begin), min(end, begin + content.size)
            if start < stop:
                out[start - offset : stop - offset] = content[start - begin : stop - begin]

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read all of the file and check each chunk.

        Args:
            progress: called with the number of bytes read since the previous call.

        Raises:
            Damaged: a chunk differs from its hash.
            CheckpointError: the file cannot be read now; it may be intact.
        """
        for _, content in self.pieces():
            if progress:
                progress(content.size)

    def pieces(
        self, begin: int = 0, end: int | None = None, *, padding: int = 0
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Read the pieces of `FileRecord.pieces`, and compare each chunk with its hash.

        A chunk of several pieces is compared before its last piece is returned.

        Args:
            begin: the offset of a byte in the first chunk to read.
            end: the offset at which to stop; None: at the end of the file.
            padding: bytes of memory after each piece, for the caller to use.

        Returns:
            An iterator: the offset of a piece in the file, and its content (uint8) with the
            padding, valid until the next piece is requested.

        Raises:
            Damaged: a chunk differs from its hash.
            CheckpointError: the file cannot be read now; it may be intact.
        """
        places = list(self._record.pieces(begin, self._record.size if end is None else end))
        longest = max((stop - start for _, start, stop in places), default=0)
        # One piece is in use while the others are read.
        buffers = [allocate(longest + padding) for _ in range(min(self._readers + 1, len(places)))]
        running = xxhash.xxh3_128()
        for place, buffer, hashed in self._loaded(places, buffers):
            number, start, stop = place
            first, last = self._record.chunk(number)
            if hashed is None:
                running.update(buffer[: stop - start].data)
                hashed = running.hexdigest() if stop == last else None
            if stop == last:
                running = xxhash.xxh3_128()
                if hashed != self._record.hashes[number]:
                    raise Damaged(
                        self._name,
                        f"its content is not what was written: the hash of bytes {first} to "
                        f"{last} differs",
                    )
            yield start, buffer[: stop - start + padding]

    def _loaded(
        self, places: list[tuple[int, int, int]], buffers: list[np.ndarray]
    ) -> Iterator[tuple[tuple[int, int, int], np.ndarray, str | None]]:
        """Read the pieces, with `readers` threads ahead of their use."""
        if len(buffers) < 2:
            for place, buffer in zip(places, itertools.cycle(buffers), strict=False):
                yield place, *self._load(place, buffer)
            return
        with ThreadPoolExecutor(self._readers, "hvdkit-checkpoint-read") as pool:
            waiting = iter(zip(places, itertools.cycle(buffers), strict=False))
            coming = deque(
                (place, pool.submit(self._load, place, buffer))
                for place, buffer in itertools.islice(waiting, self._readers)
            )
            try:
                while coming:
                    place, future = coming.popleft()
                    loaded = future.result()
                    # The buffer of the piece before this one is free.
                    coming.extend(
                        (later, pool.submit(self._load, later, buffer))
                        for later, buffer in itertools.islice(waiting, 1)
                    )
                    yield place, *loaded
            finally:
                for _, future in coming:
                    future.cancel()

    def _load(
        self, place: tuple[int, int, int], buffer: np.ndarray
    ) -> tuple[np.ndarray, str | None]:
        """Read one piece. Return the buffer, and the hash if the piece is a whole chunk."""
        number, start, stop = place
        content = buffer[: stop - start]
        state = xxhash.xxh3_128() if (start, stop) == self._record.chunk(number) else None
        for at in range(0, content.size, CACHED_BYTES):
            part = content[at : at + CACHED_BYTES]
            self._read_into(part, start + at)
            if state is not None:
                state.update(part.data)
        return buffer, None if state is None else state.hexdigest()
