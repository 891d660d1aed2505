"""The collectives for code without a framework. Each adapter implements them with its Horovod."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hvdkit.errors import UsageError

#: Internal: if set, a process set of one rank does not skip its collectives. So one GPU suffices to
#: run the code that several ranks run (scripts/check_gpu).
SINGLE_RANK_COLLECTIVES = "HVDKIT_SINGLE_RANK_COLLECTIVES"


class Membership(Protocol):
    """The part of Horovod's `ProcessSet` that this module needs."""

    def included(self) -> bool:
        """Whether this rank belongs to the set."""
        ...

    def size(self) -> int | None:
        """The number of ranks in the set."""
        ...


def is_alone(process_set: Membership) -> bool:
    """Return whether this rank skips the set's collectives: it is not a member, or the only one."""
    if not process_set.included():
        return True
    return process_set.size() == 1 and not os.environ.get(SINGLE_RANK_COLLECTIVES)


def check_member(process_set: Membership) -> None:
    """Check that this rank belongs to the process set.

    Raises:
        UsageError: it does not.
    """
    if not process_set.included():
        raise UsageError(
            "this rank does not belong to process_set: expected a call on ranks of the set only"
        )


def alltoall_in_rounds(
    collectives: "Collectives",
    parts: Sequence[bytes],
    name: str,
    alltoall: Callable[[list[memoryview]], Sequence[bytes]],
    most: int = 1 << 30,
) -> list[bytes]:
    """Implement `Collectives.alltoall` with calls of less than 2 GiB: MPI counts in 32 bits.

    Args:
        collectives: of the ranks.
        parts: see `Collectives.alltoall`.
        name: of the collective.
        alltoall: sends one part to each rank, and returns the parts that it received.
        most: the number of bytes that a rank sends or receives in one call.
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

    Every rank of the set calls the same methods with the same `name` in the same order. A call
    returns the same value on all ranks, except `alltoall`. All methods block, except `start_…`.
    """

    @property
    def alone(self) -> bool:
        """Whether collectives are skipped, because no other rank takes part."""
        ...

    @property
    def rank(self) -> int:
        """This process's global rank."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of the set, in the order of the result of `allgather`."""
        ...

    @property
    def generation(self) -> int:
        """A number that changes on all ranks after `init` and after `join`.

        Agreements of an earlier generation are void.
        """
        ...

    def sum(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise sum over the ranks. A rank that has joined adds zeros."""
        ...

    def max(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise maximum of non-negative values; a rank that has joined adds 0."""
        ...

    def start_sum(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `sum` and return a function that waits for it and returns its result."""
        ...

    def start_max(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `max` and return a function that waits for it and returns its result."""
        ...

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Return the `data` of every rank, of any length."""
        ...

    def alltoall(self, parts: Sequence[bytes], name: str) -> list[bytes]:
        """Send `parts[i]`, of any length, to `ranks[i]`. Return what each rank sent to this one."""
        ...

    def broadcast(self, data: bytes, root_rank: int, name: str) -> bytes:
        """Return the `data` of rank `root_rank`, of any length. Other ranks pass any value."""
        ...

    def broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        """Copy the content of `buffer` on rank `root_rank` into `buffer` on all ranks.

        `buffer` is uint8 of the same length on all ranks, below 2 GiB.
        """
        ...
