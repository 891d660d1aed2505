"""The libraries of an allreduce benchmark that use mpi4py."""

import itertools
from typing import Any

import numpy as np

from hvdkit.bench.allreduce.cases import Case

_FUNCTIONS = {"sum": np.add, "average": np.add, "min": np.minimum, "max": np.maximum}


class Mpi4py:
    """A `Library` on MPI_COMM_WORLD.

    Args:
        ring: whether a textbook ring in Python reduces the buffers, not `Comm.Allreduce`.
    """

    def __init__(self, ring: bool) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._kind = _Ring if ring else _Arrays

    def buffers(self, case: Case) -> "_Arrays":
        """See `Library`."""
        return self._kind(self._mpi, case)

    def barrier(self) -> None:
        """See `Library`."""
        self._mpi.COMM_WORLD.Barrier()

    def close(self) -> None:
        """See `Library`. mpi4py calls MPI_Finalize at the end of the process."""


class _Arrays:
    """`Comm.Allreduce` of a NumPy array, in place. An average is a sum and a division."""

    def __init__(self, mpi: Any, case: Case) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD
        self._size = self._comm.Get_size()
        self._op = case.op
        # A case with bfloat16, which NumPy lacks, is not measured with mpi4py.
        self._source = np.empty(case.elements, np.dtype(case.dtype))
        self._buffer = np.empty_like(self._source)

    def write(self, start: int, numbers: np.ndarray) -> None:
        """See `Buffers`."""
        self._source[start : start + len(numbers)] = numbers

    def fill(self) -> None:
        """See `Buffers`."""
        self._buffer[:] = self._source

    def allreduce(self) -> None:
        """See `Buffers`."""
        name = "SUM" if self._op == "average" else self._op.upper()
        self._comm.Allreduce(self._mpi.IN_PLACE, self._buffer, op=getattr(self._mpi, name))
        self._divide()

    def _divide(self) -> None:
        if self._op == "average":
            np.divide(self._buffer, self._size, out=self._buffer)

    def read(self, start: int, end: int) -> np.ndarray:
        """See `Buffers`."""
        return self._buffer[start:end].astype(np.float64)


class _Ring(_Arrays):
    """A textbook ring: n-1 steps of reduce-scatter, then n-1 of allgather, with `Sendrecv`.

    See Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
    2009.
    """

    def __init__(self, mpi: Any, case: Case) -> None:
        super().__init__(mpi, case)
        bounds = [case.elements * part // self._size for part in range(self._size + 1)]
        self._chunks = [slice(*pair) for pair in itertools.pairwise(bounds)]
        longest = max(chunk.stop - chunk.start for chunk in self._chunks)
        self._received = np.empty(longest, self._source.dtype)

    def allreduce(self) -> None:
        """See `Buffers`."""
        size, rank = self._size, self._comm.Get_rank()
        after, before = (rank + 1) % size, (rank - 1) % size
        add = _FUNCTIONS[self._op]
        for step in range(size - 1):
            sent = self._buffer[self._chunks[(rank - step) % size]]
            mine = self._buffer[self._chunks[(rank - step - 1) % size]]
            received = self._received[: len(mine)]
            self._comm.Sendrecv(sent, after, recvbuf=received, source=before)
            add(mine, received, out=mine)
        for step in range(size - 1):
            sent = self._buffer[self._chunks[(rank + 1 - step) % size]]
            mine = self._buffer[self._chunks[(rank - step) % size]]
            self._comm.Sendrecv(sent, after, recvbuf=mine, source=before)
        self._divide()
