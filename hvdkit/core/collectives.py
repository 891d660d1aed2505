"""The collectives that framework-free code needs. An adapter implements them over its Horovod."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Collectives(Protocol):
    """Small, blocking collectives of one process set, on host data.

    Every rank of the set calls the same method with the same `name` in the same order; a call
    returns the same value on all of them.
    """

    @property
    def rank(self) -> int:
        """This process's global rank."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that take part, in the order of `allgather`'s result."""
        ...

    @property
    def generation(self) -> int:
        """Changes, on all ranks alike, when Horovod has been initialised anew or ranks have come
        back from `join`: what they agreed on before is void."""
        ...

    def sum(self, values: Sequence[int], name: str) -> list[int]:
        """The element-wise sum over the ranks. A rank that has called `join` counts as zeros."""
        ...

    def max(self, values: Sequence[int], name: str) -> list[int]:
        """The element-wise maximum of non-negative values over the ranks, `join` as for `sum`."""
        ...

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Every rank's `data`, of any length."""
        ...

    def broadcast(self, data: bytes, root_rank: int, name: str) -> bytes:
        """Rank `root_rank`'s `data`, of any length; what the other ranks pass does not matter."""
        ...

    def broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        """Make `buffer` rank `root_rank`'s, in place: uint8, of one length on all ranks, below
        2 GiB."""
        ...
