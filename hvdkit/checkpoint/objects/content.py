"""The content of an object: several pieces of memory that are read like one."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class Content:
    """Bytes in several pieces of memory. Only slices are copied.

    Args:
        pieces: in the order of the content.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [piece.cast("B") for piece in pieces if piece.nbytes]
        self._ends: list[int] = []
        end = 0
        for piece in self._pieces:
            end += len(piece)
            self._ends.append(end)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: slice) -> bytes:
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError(f"the slice has a step of {step}: expected 1")
        found = []
        at = bisect.bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[at] - len(self._pieces[at])
            end = min(stop, self._ends[at])
            found.append(self._pieces[at][start - begin : end - begin])
            start, at = end, at + 1
        return b"".join(found)
