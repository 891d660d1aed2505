"""Read tensor files on the first rank and broadcast them to all ranks, piece by piece.

A piece is a range of a file, at most `chunks.CHUNK_BYTES` long. Its bytes are broadcast as they
are: every rank knows from the outline which tensors they belong to. The first rank reads ahead
during a broadcast. The extra memory is a few pieces on the first rank and one piece on the other
ranks.
"""

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np

from hvdkit.agreement.collectives import Collectives
from hvdkit.checkpoint import tensors, tree
from hvdkit.checkpoint.dtypes import ELEMENT_BYTES
from hvdkit.checkpoint.memory import allocate
from hvdkit.checkpoint.reading import OpenCheckpoint, Outline
from hvdkit.checkpoint.state import Tensor, Tree


@dataclass(frozen=True)
class _Piece:
    """A range of a part's file, and the tensors in it.

    Attributes:
        size: bytes.
        tensors: each tensor, with the begin and end of its bytes in the piece, and the offset of
            these bytes in the tensor.
    """

    size: int
    tensors: list[tuple[Tensor, int, int, int]]

    def write(self, content: np.ndarray) -> None:
        """Write the piece into the tensors.

        Args:
            content: the bytes of the piece, in memory that `allocate` aligned.
        """
        for tensor, begin, end, start in self.tensors:
            part = content[begin:end]
            if begin % ELEMENT_BYTES[tensor.spec.dtype]:
                # Processors and frameworks expect aligned elements.
                part = part.copy()
            tensor.write(part, start)


class Broadcast:
    """Broadcast the tensors of parts.

    Args:
        prepared: name of a part -> its tree, with this rank's tensors as destinations.
        outline: the outline of the step.

    Attributes:
        names: for each tensor, the name of its part and its own name.
    """

    def __init__(self, prepared: Mapping[str, Tree], outline: Outline) -> None:
        self._parts = [part for part in prepared if part in outline.specs]
        self._pieces: list[_Piece] = []
        self.names: list[tuple[str, str]] = []
        for part in self._parts:
            own = _own_tensors(part, prepared[part], outline)
            self.names += [(part, name) for name in own]
            self._pieces += _pieces(own, part, outline)
        # Fail before the first collective if there is not enough memory.
        self._memory = allocate(max((p.size for p in self._pieces), default=0) + 1)

    def read(self, opened: OpenCheckpoint) -> None:
        """Read the tensors in this process, without a collective.

        Raises:
            CheckpointError: a file cannot be read or is damaged.
        """
        with contextlib.closing(_read(opened, self._parts)) as reader:
            for piece, content in zip(self._pieces, reader, strict=True):
                piece.write(content)

    def run(self, collectives: Collectives, opened: OpenCheckpoint | None) -> None:
        """Broadcast the tensors. A collective.

        Args:
            collectives: the collectives of the ranks.
            opened: on the first rank, the step; None on the others.

        Raises:
            Exception: the error of this rank. Other ranks raise nothing, although their tensors
                may be incomplete. So the caller must coordinate the ranks afterwards.
        """
        problem: Exception | None = None
        reader = _read(opened, self._parts) if opened is not None else None
        try:
            for piece in self._pieces:
                memory = self._memory[: piece.size + 1]
                # The last byte is a flag: 1 if the first rank could not read the piece.
                memory[-1] = 0
                if reader is not None:
                    try:
                        memory = next(reader)
                        memory[-1] = 0
                    except Exception as error:
                        problem = error
                        memory[-1] = 1
                collectives.broadcast_into(memory, collectives.ranks[0], "hvdkit.checkpoint.piece")
                if memory[-1]:
                    break
                # A rank that cannot write still takes part in the broadcasts.
                if problem is None:
                    try:
                        piece.write(memory)
                    except Exception as error:
                        problem = error
        finally:
            if reader is not None:
                reader.close()
        if problem is not None:
            raise problem


def _own_tensors(part: str, prepared: Tree, outline: Outline) -> dict[str, Tensor]:
    """Return the tensors of a prepared part by name, in the order of the file."""
    _, own = tree.encode(prepared, part)
    wanted = outline.specs[part]
    found = {name: tensor.spec for name, tensor in own.items()}
    assert found == dict(wanted), f"{part}: plan_restore() returned {found}, expected {wanted}"
    return {name: own[name] for name in wanted}


def _pieces(own: Mapping[str, Tensor], part: str, outline: Outline) -> list[_Piece]:
    """Return the pieces of a part's file."""
    begin = outline.begins[part]
    record = outline.file(part)
    spans = tensors.spans(outline.specs[part])
    places = [(own[name], begin + start, begin + end) for name, (start, end) in spans.items()]
    found = []
    first = 0
    for _, start, stop in record.pieces(begin, record.size):
        piece = _Piece(stop - start, [])
        while first < len(places) and places[first][2] <= start:
            first += 1
        for number in range(first, len(places)):
            tensor, at, end = places[number]
            if at >= stop:
                break
            if at < end:
                left, right = max(at, start), min(end, stop)
                piece.tensors.append((tensor, left - start, right - start, left - at))
        found.append(piece)
    return found


def _read(opened: OpenCheckpoint, parts: list[str]) -> Generator[np.ndarray, None, None]:
    """Yield the pieces of the parts' files, each with one additional byte for the flag."""
    for part in parts:
        for _, memory in opened.pieces(part, padding=1):
            yield memory
