"""The libraries of an allreduce benchmark that reduce PyTorch's tensors."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hvdkit.bench.allreduce.cases import Case


class _Tensors:
    """A buffer and its source, both of shape [elements]."""

    def __init__(self) -> None:
        self._source = self._buffer = torch.empty(0)

    def allocate(self, case: Case) -> None:
        """See `Library`."""
        dtype = getattr(torch, case.dtype)
        self._source = torch.empty(case.elements, dtype=dtype)
        self._buffer = self._empty(case.elements, dtype)

    def _empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def write(self, start: int, numbers: np.ndarray) -> None:
        """See `Library`."""
        self._source[start : start + len(numbers)] = torch.from_numpy(numbers)

    def fill(self) -> None:
        """See `Library`."""
        self._buffer.copy_(self._source)

    def read(self, start: int, end: int) -> np.ndarray:
        """See `Library`."""
        found: np.ndarray = self._buffer[start:end].double().numpy()
        return found

    def free(self) -> None:
        """See `Library`."""
        self._source = self._buffer = torch.empty(0)


class TorchDistributed(_Tensors):
    """`torch.distributed.all_reduce` over Gloo, in place. An average is a sum and a division."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        super().__init__()
        torch.set_num_threads(1)
        if "GLOO_SOCKET_IFNAME" not in os.environ and "HOROVOD_GLOO_IFACE" in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["HOROVOD_GLOO_IFACE"]
        # A file works in any network namespace; on several hosts, hvdkit run sets MASTER_ADDR.
        where = "env://" if spec["store"] is None else f"file://{spec['store']}"
        dist.init_process_group(
            "gloo", init_method=where, rank=spec["rank"], world_size=spec["size"]
        )
        self._dist, self._size = dist, spec["size"]
        self._op: Any = None
        self._average = False

    def allocate(self, case: Case) -> None:
        """See `Library`."""
        super().allocate(case)
        self._average = case.op == "average"
        self._op = getattr(self._dist.ReduceOp, "SUM" if self._average else case.op.upper())

    def barrier(self) -> None:
        """See `Library`."""
        self._dist.barrier()

    def allreduce(self) -> None:
        """See `Library`."""
        self._dist.all_reduce(self._buffer, self._op)
        if self._average:
            self._buffer /= self._size

    def close(self) -> None:
        """See `Library`."""
        self._dist.destroy_process_group()


class Horovod(_Tensors):
    """`horovod.torch.allreduce_`, or `allreduce` with `Compression.fp16`."""

    #: The beginning of tensor names. hvdkit's engine does not fuse tensors named `hvdkit.*`.
    prefix = "bench"

    def __init__(self) -> None:
        import horovod.torch as hvd

        super().__init__()
        torch.set_num_threads(1)
        self._hvd: Any = hvd
        self._run: Callable[[], None] = lambda: None

    def allocate(self, case: Case) -> None:
        """See `Library`."""
        super().allocate(case)
        self._run = self._plain(case) if case.wire == "none" else self._encoded(case)

    def _name(self, case: Case) -> str:
        return f"{self.prefix}.{case.dtype}.{case.op}.{case.wire}.{case.elements}"

    def _plain(self, case: Case) -> Callable[[], None]:
        """Return a function that reduces the buffer in place."""
        op = getattr(self._hvd, case.op.capitalize())
        name = self._name(case)

        def run() -> None:
            self._hvd.allreduce_(self._buffer, op=op, name=name)

        return run

    def _encoded(self, case: Case) -> Callable[[], None]:
        """Return a function that reduces the buffer in a wire format."""
        op = getattr(self._hvd, case.op.capitalize())
        name, compression = self._name(case), getattr(self._hvd.Compression, case.wire)

        def run() -> None:
            self._buffer = self._hvd.allreduce(
                self._buffer, op=op, name=name, compression=compression
            )

        return run

    def free(self) -> None:
        """See `Library`."""
        super().free()
        self._run = lambda: None

    def barrier(self) -> None:
        """See `Library`."""
        self._hvd.barrier()

    def allreduce(self) -> None:
        """See `Library`."""
        self._run()

    def close(self) -> None:
        """See `Library`."""
        self._hvd.shutdown()


class Hvdkit(Horovod):
    """hvdkit: `allreduce_` in the memory of buckets, or a bucket reduction in a wire format."""

    prefix = "hvdkit.bench"

    def _empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        from hvdkit.torch import shared_memory

        return shared_memory.empty(elements, dtype)

    def _encoded(self, case: Case) -> Callable[[], None]:
        """Return a function that reduces the buffer like the gradient of one parameter."""
        from hvdkit.reduction.int8 import Int8
        from hvdkit.reduction.plan import Reduction
        from hvdkit.reduction.synchronizer import Synchronizer
        from hvdkit.torch.collectives import TorchCollectives
        from hvdkit.torch.compression import wire_format
        from hvdkit.torch.reduction.backend import TorchBackend
        from hvdkit.torch.reduction.memory import spec

        # hvdkit sends some parameters, such as vectors, as bf16. Here, send every buffer as int8.
        chosen = Int8(as_bf16=lambda *_: False) if case.wire == "int8" else case.wire
        # The gradient is the buffer, so `fill` and `read` use it.
        self._buffer = torch.empty(case.elements, dtype=self._source.dtype)
        parameter = torch.nn.Parameter(torch.empty_like(self._buffer))
        parameter.grad = self._buffer
        collectives = TorchCollectives(self._hvd.global_process_set)
        synchronizer: Synchronizer[Any, Any] = Synchronizer(
            [spec("buffer", parameter)],
            TorchBackend([parameter], collectives),
            collectives,
            Reduction(wire_format(chosen), average=case.op == "average"),
        )

        def run() -> None:
            synchronizer.mark_ready(0)
            synchronizer.synchronize()
            assert parameter.grad is not None
            # With int8, the gradient moves into the bucket at the first reduction.
            self._buffer = parameter.grad

        return run
