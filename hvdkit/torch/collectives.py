"""`hvdkit.agreement.collectives.Collectives` over horovod.torch."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.collectives import ProcessSetCollectives, alltoall_in_rounds
from hvdkit.torch import runtime
from hvdkit.torch.plain_tensors import traffic


class TorchCollectives(ProcessSetCollectives):
    """`hvdkit.agreement.collectives.Collectives` for the ranks of a Horovod process set."""

    def __init__(self, process_set: mpi_ops.ProcessSet) -> None:
        super().__init__(process_set, runtime)

    def sum(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise sum of 64-bit integers."""
        return self.start_sum(values, name)()

    def max(self, values: Sequence[int], name: str) -> list[int]:
        """Return the element-wise maximum of 64-bit integers."""
        return self.start_max(values, name)()

    def start_sum(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `sum` and return a function that waits for it and returns its result."""
        return self._start(values, name, mpi_ops.Sum)

    def start_max(self, values: Sequence[int], name: str) -> Callable[[], list[int]]:
        """Start `max` and return a function that waits for it and returns its result."""
        return self._start(values, name, mpi_ops.Max)

    def allgather(self, data: bytes, name: str) -> list[bytes]:
        """Return every rank's bytes."""
        if self.single_rank:
            return [data]
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        sizes = mpi_ops.allgather(_own(size), name=f"{name}.sizes", process_set=self.process_set)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NO_BYTES
        joined = mpi_ops.allgather(_own(own), name=name, process_set=self.process_set)
        return [part.numpy().tobytes() for part in joined.split(sizes.tolist())]

    def alltoall(self, parts: Sequence[bytes], name: str) -> list[bytes]:
        """Send each rank its bytes. Return the bytes that each rank sent to this one."""
        if self.single_rank:
            return list(parts)

        def send(pieces: list[memoryview]) -> list[bytes]:
            joined = np.frombuffer(b"".join(pieces), np.uint8).copy()
            splits = torch.tensor([len(piece) for piece in pieces], dtype=torch.int32, device="cpu")
            received, sizes = mpi_ops.alltoall(
                _own(torch.from_numpy(joined)), splits, name=name, process_set=self.process_set
            )
            return [part.numpy().tobytes() for part in received.split(sizes.tolist())]

        return alltoall_in_rounds(self, parts, name, send)

    def broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        """Copy the buffer of rank `root_rank` into `buffer`."""
        if not self.single_rank:
            tensor = torch.from_numpy(buffer)
            mpi_ops.broadcast_(_own(tensor), root_rank, name=name, process_set=self.process_set)

    def _start(self, values: Sequence[int], name: str, op: int) -> Callable[[], list[int]]:
        if self.single_rank:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        handle = mpi_ops.allreduce_async_(
            _own(tensor), name=name, op=op, process_set=self.process_set
        )
        return lambda: list(mpi_ops.synchronize(handle).tolist())


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a collective that is not the script's, and does not count as traffic."""
    traffic.bytes -= tensor.nbytes
    return tensor


_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")
