"""A rank of an allreduce benchmark."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from hvdkit.bench.allreduce import values
from hvdkit.bench.allreduce.cases import Case
from hvdkit.bench.allreduce.variants import MPI4PY, RING, TORCH, Variant
from hvdkit.bench.worker import Workload, init_checked


class Buffers(Protocol):
    """The memory of a case, and its reduction."""

    def write(self, start: int, numbers: np.ndarray) -> None:
        """Write float64 numbers to the source of `fill`, from position `start` on."""
        ...

    def fill(self) -> None:
        """Copy the source into the buffer."""
        ...

    def allreduce(self) -> None:
        """Reduce the buffer, and wait until the result is in it."""
        ...

    def read(self, start: int, end: int) -> np.ndarray:
        """Return elements of the buffer as float64."""
        ...


class Library(Protocol):
    """An implementation of allreduce."""

    def buffers(self, case: Case) -> Buffers:
        """Return the memory for a case."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


def build(spec: Mapping[str, Any]) -> Workload:
    """Return the work of this rank."""
    variant = Variant(*spec["variant"])
    library: Library
    if variant.library in (MPI4PY, RING):
        from hvdkit.bench.allreduce.mpi_libraries import Mpi4py

        library = Mpi4py(ring=variant.library == RING)
    else:
        from hvdkit.bench.allreduce import torch_libraries

        if variant.library == TORCH:
            library = torch_libraries.TorchDistributed(spec)
        elif variant.calls_hvdkit:
            import hvdkit.torch as hvd

            init_checked(spec, hvd)
            library = torch_libraries.Hvdkit()
        else:
            import horovod.torch as horovod

            init_checked(spec, horovod)
            library = torch_libraries.Horovod()
    return AllreduceRank(library, spec["rank"], spec["size"])


class AllreduceRank:
    """A `worker.Workload`: reduce buffers, measure each call, and check the results."""

    def __init__(self, library: Library, rank: int, size: int) -> None:
        self._library = library
        self._rank, self._size = rank, size
        self._current: tuple[Case, Buffers] | None = None

    def facts(self) -> dict[str, Any]:
        """Return nothing: the runner needs no facts."""
        return {}

    def answer(self, command: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Execute `allocate`, `call`, `check` or `free`."""
        if command == "allocate":
            case = Case(**message["case"])
            self._current = case, self._filled(case)
            return {}
        if command == "free":
            self._current = None
            return {}
        assert self._current is not None
        case, buffers = self._current
        if command == "call":
            return {"seconds": [self._call(buffers) for _ in range(message["count"])]}
        assert command == "check"
        wrong, _ = values.wrong_elements(case, self._size, buffers.read)
        return {"wrong": wrong}

    def _filled(self, case: Case) -> Buffers:
        buffers = self._library.buffers(case)
        for start, numbers in values.periods(self._rank, case.elements):
            buffers.write(start, numbers)
        return buffers

    def _call(self, buffers: Buffers) -> float:
        # A new sum in each call: sums of sums would overflow.
        buffers.fill()
        self._library.barrier()
        began = time.perf_counter()
        buffers.allreduce()
        return time.perf_counter() - began

    def close(self) -> None:
        """Leave the job."""
        self._library.close()
