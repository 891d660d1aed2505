"""Tensors from the first rank's disk to every rank, a bucket at a time.

The extra memory is one bucket, whatever the tensors' sizes: small ones share it, and a large one
comes in pieces.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.checkpoint import tree
from hvdkit.checkpoint.reading import OpenCheckpoint, Outline, TensorStream
from hvdkit.checkpoint.state import Tensor, Tree
from hvdkit.core.collectives import Collectives

BUCKET_BYTES = 25_000_000

#: Fills an array of uint8 with a tensor's bytes from a place on.
Source = Callable[[Hashable, np.ndarray, int], None]

# In the bucket every tensor begins where any dtype may.
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Piece:
    """Bytes of a tensor, and where they are in the bucket."""

    key: Hashable
    start: int
    place: int
    nbytes: int


class Transfer:
    """Brings tensors from the first rank to all.

    Args:
        sizes: of the tensors in bytes, in the same order on every rank.
        bucket_bytes: memory to do it in, which is taken now.
    """

    def __init__(self, sizes: Mapping[Hashable, int], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._buckets = list(_buckets(sizes, bucket_bytes))
        self._memory = np.empty(max(map(_end, self._buckets), default=0) + 1, np.uint8)

    def run(
        self,
        collectives: Collectives,
        tensors: Mapping[Hashable, Tensor],
        source: Source | None,
    ) -> None:
        """Do it. A collective.

        Args:
            collectives: of the ranks.
            tensors: where to put them.
            source: on the first rank, where they come from.

        Raises:
            Exception: what went wrong on this rank. On the others nothing is raised, but what they
                have may not be whole: exchange afterwards.
        """
        problem: Exception | None = None
        for pieces in self._buckets:
            bucket = self._memory[: _end(pieces) + 1]
            # The last byte says whether the rest is worth anything.
            bucket[-1] = 0
            if source is not None:
                try:
                    for piece in pieces:
                        source(piece.key, _in(bucket, piece), piece.start)
                except Exception as error:
                    problem = error
                    bucket[-1] = 1
            collectives.broadcast_into(bucket, collectives.ranks[0], "hvdkit.checkpoint.bucket")
            if bucket[-1]:
                break
            # A rank that cannot write still takes the others' turns.
            if problem is None:
                try:
                    for piece in pieces:
                        tensors[piece.key].write(_in(bucket, piece), piece.start)
                except Exception as error:
                    problem = error
        if problem is not None:
            raise problem


def _in(bucket: np.ndarray, piece: _Piece) -> np.ndarray:
    return bucket[piece.place : piece.place + piece.nbytes]


def _end(pieces: list[_Piece]) -> int:
    return pieces[-1].place + pieces[-1].nbytes


def _buckets(sizes: Mapping[Hashable, int], bucket_bytes: int) -> Iterator[list[_Piece]]:
    limit = max(bucket_bytes // _ALIGNMENT, 1) * _ALIGNMENT
    pieces: list[_Piece] = []
    place = 0
    for key, nbytes in sizes.items():
        start = 0
        # An empty tensor is a piece, too: whoever waits for it is told.
        while start < nbytes or not (start or nbytes):
            if pieces and (place >= limit or (start == 0 and place + nbytes > limit)):
                yield pieces
                pieces, place = [], 0
            size = min(nbytes - start, limit - place)
            pieces.append(_Piece(key, start, place, size))
            place += -(-size // _ALIGNMENT) * _ALIGNMENT
            start += size
            if not nbytes:
                break
    if pieces:
        yield pieces


def destinations(part: str, prepared: Tree, outline: Outline) -> dict[Hashable, Tensor]:
    """The tensors of a prepared part by its and their names, in the order of the file."""
    _, tensors = tree.encode(prepared, part)
    wanted = outline.specs.get(part, {})
    found = {name: tensor.spec for name, tensor in tensors.items()}
    assert found == dict(wanted), f"{part}: prepare() gave {found}, and not {wanted}"
    return {(part, name): tensors[name] for name in wanted}


class InTurn:
    """Reads a checkpoint's tensors in the order in which they lie in its files."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._opened = opened
        self._part = ""
        self._stream: TensorStream | None = None

    def __call__(self, key: Any, out: np.ndarray, _start: int) -> None:
        part, _ = key
        if self._stream is None or part != self._part:
            self.close()
            self._part, self._stream = part, self._opened.stream(part)
        self._stream.read_into(out)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._stream is not None:
            self._stream.close()
