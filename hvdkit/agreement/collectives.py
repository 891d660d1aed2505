"""Small collectives on data in host memory, through which the ranks compare and coordinate.

`Collectives` is the interface. Each adapter implements it with its framework's Horovod.
"""

import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdkit.errors import UsageError

#: Internal: if set, a process set of one rank does not skip its collectives. scripts/check_gpu sets
#: it to run the code of several ranks on one GPU.
SINGLE_RANK_COLLECTIVES = "HVDKIT_SINGLE_RANK_COLLECTIVES"

# The most bytes in one collective, because MPI counts bytes in 32 bits.
_CHUNK_BYTES = 1 << 30

# The bytes in the first collective of `broadcast`, with the size. A collective of this size takes
# as long as one of 8 bytes.
_SMALL_BYTES = 1 << 12


def is_single_rank(process_set: Any) -> bool:
    """Return whether this rank skips collectives: it is the set's only rank, or not in the set."""
    if not process_set.included():
        return True
    return process_set.size() == 1 and not os.environ.get(SINGLE_RANK_COLLECTIVES)


def check_process_set(process_set: Any) -> None:
    """Check a user's argument `process_set`.

    Raises:
        UsageError: `process_set` is not a process set.
    """
    if not callable(getattr(process_set, "included", None)):
        raise UsageError(
            f"process_set is {process_set!r}: expected a hvd.ProcessSet, or hvd.global_process_set"
        )


def check_member(process_set: Any) -> None:
    """Check that this rank belongs to the set.

    Raises:
        UsageError: this rank is not in the set.
    """
    if not process_set.included():
        raise UsageError(
            f"this rank does not belong to process_set {process_set}: expected a call on ranks of "
            f"the set only"
        )


def check_root(root_rank: Any, ranks: Sequence[int]) -> None:
    """Check a user's argument `root_rank`.

    Raises:
        UsageError: `root_rank` is not one of the ranks.
    """
    is_number = isinstance(root_rank, numbers.Integral) and not isinstance(root_rank, bool)
    if not is_number or root_rank not in ranks:
        raise UsageError(f"root_rank is {root_rank!r}: expected one of {list(ranks)}")


class Collectives(ABC):
    """Small collectives of one process set, on host data.

    Every rank of the set calls the same method with the same `name` in the same order. Except
    `alltoall`, a call returns the same value on all ranks. All methods block, except those that
    begin with `start`. A rank that is alone in the set, or not in it, skips all collectives.

    An adapter implements the methods that begin with an underscore. They are called if there are
    several ranks.

    Args:
        process_set: the process set.
        runtime: the module `runtime` of the adapter.

    Raises:
        UsageError: `process_set` is not a process set.
    """

    def __init__(self, process_set: Any, runtime: Any) -> None:
        check_process_set(process_set)
        self.process_set = process_set
        self._runtime = runtime

    @property
    def single_rank(self) -> bool:
        """Whether this rank skips collectives, see `is_single_rank`."""
        return is_single_rank(self.process_set)

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return int(self._runtime.mpi_ops.rank())

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first one, which logs and writes files."""
        return self.rank == self.ranks[0]

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks that take part, in the order of `allgather`'s result."""
        return [self.rank] if self.single_rank else list(self.process_set.ranks)

    @property
    def place(self) -> int:
        """The place of this rank in `ranks`."""
        return self.ranks.index(self.rank)

    @property
    def generation(self) -> int:
        """A number that `init` and the return from `join` increase, on all ranks.

        A new generation needs new consistency checks, because ranks may have changed.
        """
        return int(self._runtime.generation())

    def describe(self, name: str, text: str) -> None:
        """Set the text for the collective `name` in verdicts on hangs. Not a collective."""
        self._runtime.recorder.describe(name, text)

    def sum(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise sum over the ranks. A rank in `join` contributes zeros."""
        return self.start_sum(values, name)()

    def max(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise maximum of values >= 0. A rank in `join` contributes zeros."""
        return self.start_max(values, name)()

    def start_sum(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `sum`. Return a function that waits for the sum and returns it."""
        return self._start_unless_alone(values, name, self._runtime.mpi_ops.Sum)

    def start_max(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `max`. Return a function that waits for the maximum and returns it."""
        return self._start_unless_alone(values, name, self._runtime.mpi_ops.Max)

    def _start_unless_alone(
        self, values: Sequence[int], name: str, op: int
    ) -> Callable[[], list[int]]:
        own = list(values)
        return (lambda: own) if self.single_rank else self._start(own, name, op)

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Return every rank's `data`, of any length."""
        return [data] if self.single_rank else self._allgather(data, name)

    def alltoall(self, parts: Sequence[bytes], name: str) -> list[bytes]:
        """Send `parts[i]`, of any length, to `ranks[i]`. Return what each rank sent to this one."""
        if self.single_rank:
            return list(parts)
        return alltoall_in_rounds(self, parts, name, lambda pieces: self._alltoall(pieces, name))

    def broadcast(self, data: bytes, root_rank: int, name: str) -> bytes:
        """Return the `data` of `root_rank`, of any length. The `data` of other ranks is ignored.

        About 4 KB take one collective, more bytes take further ones.
        """
        if self.single_rank:
            return data
        size = len(data) if self.rank == root_rank else 0
        buffer = np.zeros(max(_SMALL_BYTES, 8 + size), np.uint8)
        buffer[:8].view(np.int64)[0] = size
        buffer[8 : 8 + size] = np.frombuffer(data, np.uint8, size)
        self.broadcast_into(buffer[:_SMALL_BYTES], root_rank, name)
        end = 8 + int(buffer[:8].view(np.int64)[0])
        if end > len(buffer):
            buffer = np.concatenate([buffer, np.empty(end - len(buffer), np.uint8)])
        broadcast_in_chunks(self, buffer[_SMALL_BYTES:end], root_rank, f"{name}.rest")
        return buffer[8:end].tobytes()

    def broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        """Copy the buffer of `root_rank` into `buffer`.

        The buffer is uint8, has the same length on all ranks, and is smaller than 2 GiB.
        """
        if not self.single_rank:
            self._broadcast_into(buffer, root_rank, name)

    @abstractmethod
    def _start(self, values: list[int], name: str, op: int) -> Callable[[], list[int]]:
        """Start to reduce 64-bit integers. Return a function that returns the result."""

    @abstractmethod
    def _allgather(self, data: bytes, name: str) -> list[bytes]:
        """See `allgather`."""

    @abstractmethod
    def _alltoall(self, parts: Sequence[memoryview], name: str) -> list[bytes]:
        """See `alltoall`. All parts together are smaller than 2 GiB."""

    @abstractmethod
    def _broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        """See `broadcast_into`."""


def alltoall_in_rounds(
    collectives: Collectives,
    parts: Sequence[bytes],
    name: str,
    alltoall: Callable[[list[memoryview]], Sequence[bytes]],
    max_bytes: int = _CHUNK_BYTES,
) -> list[bytes]:
    """Implement `Collectives.alltoall` in rounds of less than 2 GiB, because MPI counts in 32 bits.

    Args:
        collectives: the collectives of the ranks.
        parts: see `Collectives.alltoall`.
        name: the name of the collective.
        alltoall: sends each rank its part, and returns the parts that each rank sent to this one.
        max_bytes: the most bytes that a rank sends or receives in one round.
    """
    step = max(max_bytes // len(parts), 1)
    longest = max(len(part) for part in parts)
    (rounds,) = collectives.max([-(-longest // step)], f"{name}.rounds")
    received = [bytearray() for _ in parts]
    for number in range(rounds):
        chunk = slice(number * step, (number + 1) * step)
        pieces = alltoall([memoryview(part)[chunk] for part in parts])
        for whole, piece in zip(received, pieces, strict=True):
            whole += piece
    return [bytes(whole) for whole in received]


def broadcast_in_chunks(
    collectives: Collectives, buffer: np.ndarray, root_rank: int, name: str
) -> None:
    """Broadcast a buffer of any size with `Collectives.broadcast_into`.

    Args:
        collectives: the collectives of the ranks.
        buffer: uint8, of the same length on all ranks.
        root_rank: the rank that sends.
        name: the name of the collectives.
    """
    for start in range(0, len(buffer), _CHUNK_BYTES):
        collectives.broadcast_into(buffer[start : start + _CHUNK_BYTES], root_rank, name)
