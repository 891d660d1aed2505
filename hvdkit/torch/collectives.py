"""`hvdkit.agreement.collectives.Collectives` over horovod.torch."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.collectives import Collectives
from hvdkit.torch import runtime
from hvdkit.torch.plain_tensors import traffic


class TorchCollectives(Collectives):
    """`hvdkit.agreement.collectives.Collectives` for the ranks of a Horovod process set."""

    def __init__(self, process_set: mpi_ops.ProcessSet) -> None:
        super().__init__(process_set, runtime)

    def _start(self, values: list[int], name: str, op: int) -> Callable[[], list[int]]:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        handle = mpi_ops.allreduce_async_(
            _own(tensor), name=name, op=op, process_set=self.process_set
        )
        return lambda: list(mpi_ops.synchronize(handle).tolist())

    def _allgather(self, data: bytes, name: str) -> list[bytes]:
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        sizes = mpi_ops.allgather(_own(size), name=f"{name}.sizes", process_set=self.process_set)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NO_BYTES
        joined = mpi_ops.allgather(_own(own), name=name, process_set=self.process_set)
        return [part.numpy().tobytes() for part in joined.split(sizes.tolist())]

    def _alltoall(self, parts: Sequence[memoryview], name: str) -> list[bytes]:
        joined = np.frombuffer(b"".join(parts), np.uint8).copy()
        splits = torch.tensor([len(part) for part in parts], dtype=torch.int32, device="cpu")
        received, sizes = mpi_ops.alltoall(
            _own(torch.from_numpy(joined)), splits, name=name, process_set=self.process_set
        )
        return [part.numpy().tobytes() for part in received.split(sizes.tolist())]

    def _broadcast_into(self, buffer: np.ndarray, root_rank: int, name: str) -> None:
        tensor = torch.from_numpy(buffer)
        mpi_ops.broadcast_(_own(tensor), root_rank, name=name, process_set=self.process_set)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a collective that is not the script's, and does not count as traffic."""
    traffic.bytes -= tensor.nbytes
    return tensor


_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")
