"""A rank of an allreduce benchmark."""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from hvdkit.bench.allreduce import values
from hvdkit.bench.allreduce.cases import Case
from hvdkit.bench.allreduce.variants import MPI4PY, RING, TORCH, Variant
from hvdkit.bench.worker import Workload, init_checked


class Library(Protocol):
    """An implementation of allreduce, and a buffer for it."""

    def allocate(self, case: Case) -> None:
        """Make a buffer for `case`."""
        ...

    def write(self, start: int, numbers: np.ndarray) -> None:
        """Write float64 numbers to the source of `fill`, from position `start` on."""
        ...

    def fill(self) -> None:
        """Copy the source into the buffer."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def allreduce(self) -> None:
        """Reduce the buffer, and wait until the result is in it."""
        ...

    def read(self, start: int, end: int) -> np.ndarray:
        """Return elements of the buffer as float64."""
        ...

    def free(self) -> None:
        """Free the buffer."""
        ...

    def close(self) -> None:
        """Leave the job."""
        ...


def build(spec: Mapping[str, Any]) -> Workload:
    """Return the work of this rank."""
    variant = Variant(*spec["variant"])
    library: Library
    if variant.library in (MPI4PY, RING):
        from hvdkit.bench.allreduce.mpi_libraries import Mpi4pyAllreduce, SendrecvRing

        library = Mpi4pyAllreduce() if variant.library == MPI4PY else SendrecvRing()
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
        self._case: Case | None = None

    def facts(self) -> dict[str, Any]:
        """Return nothing: the runner needs no facts."""
        return {}

    def answer(self, command: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Execute `allocate`, `call`, `check` or `free`."""
        if command == "allocate":
            self._allocate(Case(**message["case"]))
            return {}
        if command == "call":
            return {"seconds": [self._call() for _ in range(message["count"])]}
        assert self._case is not None
        if command == "check":
            wrong, _ = values.wrong_elements(self._case, self._size, self._library.read)
            return {"wrong": wrong}
        assert command == "free"
        self._library.free()
        self._case = None
        return {}

    def _allocate(self, case: Case) -> None:
        self._case = case
        self._library.allocate(case)
        for start, numbers in values.periods(self._rank, case.elements):
            self._library.write(start, numbers)

    def _call(self) -> float:
        # A new sum in each call: sums of sums would overflow.
        self._library.fill()
        self._library.barrier()
        began = time.perf_counter()
        self._library.allreduce()
        return time.perf_counter() - began

    def close(self) -> None:
        """Leave the job."""
        self._library.close()
