"""The collectives that framework-free code needs. An adapter implements them over its Horovod."""

from collections.abc import Sequence
from typing import Protocol


class Collectives(Protocol):
    """Small, blocking collectives of one process set, on host data.

    Every rank of the set calls the same method with the same `name` in the same order; a call
    returns the same value on all of them.
    """

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
