"""The collectives that framework-free code needs. An adapter implements them over its Horovod."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hvdkit.errors import UsageError

#: Internal: when set, a process set of one rank does not skip its collectives. With it one GPU is
#: enough to run everything that several ranks run (scripts/check_gpu).
SINGLE_RANK_COLLECTIVES = "HVDKIT_SINGLE_RANK_COLLECTIVES"


class Membership(Protocol):
    """The part of Horovod's `ProcessSet` that tells whether there is anything to communicate."""

    def included(self) -> bool:
        """Whether this rank belongs to the set."""
        ...

    def size(self) -> int | None:
        """The number of ranks in the set."""
        ...


def is_alone(process_set: Membership) -> bool:
    """Return whether this rank skips the set's collectives: it is outside, or the only member."""
    if not process_set.included():
        return True
    return process_set.size() == 1 and not os.environ.get(SINGLE_RANK_COLLECTIVES)


def check_member(process_set: Membership) -> None:
    """Raise if this rank does not belong to the set: for what only its ranks do together.

    Raises:
        UsageError: it does not.
    """
    if not process_set.included():
        raise UsageError(
            "this rank does not belong to process_set: expected to be called on the ranks of the "
            "set alone"
        )


def alltoall_in_rounds(
    collectives: "Collectives",
    parts: Sequence[bytes],
    name: str,
    alltoall: Callable[[list[memoryview]], Sequence[bytes]],
    most: int = 1 << 30,
) -> list[bytes]:
    """Implement `Collectives.alltoall` with one that takes less than 2 GiB: MPI counts in 32 bits.

    Args:
        collectives: of the ranks.
        parts: as `Collectives.alltoall` takes them.
        name: of the collective.
        alltoall: sends to each rank its part, and returns what each has sent.
        most: bytes that a rank sends or receives in one round.
    """
    step = max(most // len(parts), 1)
    longest = max(len(part) for part in parts)
    (rounds,) = collectives.max([-(-longest // step)], f"{name}.rounds")
    received = [bytearray() for _ in parts]
    for number in range(rounds):
        place = slice(number * step, (number + 1) * step)
        pieces = alltoall([memoryview(part)[place] for part in parts])
        for whole, piece in zip(received, pieces, strict=True):
            whole += piece
    return [bytes(whole) for whole in received]


class Collectives(Protocol):
    """Small collectives of one process set, on host data.

    Every rank of the set calls the same method with the same `name` in the same order; a call
    returns the same value on all of them. All methods block, except those that begin with `start`.
    """

    @property
    def alone(self) -> bool:
        """Whether collectives are skipped: no other rank takes part."""
        ...

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

    def start_sum(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `sum` and return a function that waits for it and returns its result."""
        ...

    def start_max(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `max` and return a function that waits for it and returns its result."""
        ...

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Every rank's `data`, of any length."""
        ...

    def alltoall(self, parts: Sequence[bytes], name: str) -> list[bytes]:
        """Send `parts[i]`, of any length, to `ranks[i]`. Return what each rank sent to this one."""
        ...

    def broadcast(self, data: bytes, root_rank: int, name: str) -> bytes:
        """Rank `root_rank`'s `data`, of any length; what the other ranks pass does not matter."""
        ...

    def broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        """Make `buffer` rank `root_rank`'s, in place: uint8, of one length on all ranks, below
        2 GiB."""
        ...
