"""The libraries of an allreduce benchmark that reduce PyTorch's tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hvdkit.bench import torch_gloo
from hvdkit.bench.allreduce.cases import Case

#: Reduces a buffer, and returns the result, which may be another tensor.
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Tensors:
    """`Buffers` that are tensors of shape [elements].

    Args:
        case: the case.
        reduce: reduces the buffer.
        buffer: the first buffer; default: a new tensor.
    """

    def __init__(self, case: Case, reduce: Reduce, buffer: torch.Tensor | None = None) -> None:
        self._source = torch.empty(case.elements, dtype=getattr(torch, case.dtype))
        self._buffer = torch.empty_like(self._source) if buffer is None else buffer
        self._reduce = reduce

    def write(self, start: int, numbers: np.ndarray) -> None:
        """See `Buffers`."""
        self._source[start : start + len(numbers)] = torch.from_numpy(numbers)

    def fill(self) -> None:
        """See `Buffers`."""
        self._buffer.copy_(self._source)

    def allreduce(self) -> None:
        """See `Buffers`."""
        self._buffer = self._reduce(self._buffer)

    def read(self, start: int, end: int) -> np.ndarray:
        """See `Buffers`."""
        found: np.ndarray = self._buffer[start:end].double().numpy()
        return found


class TorchDistributed:
    """`torch.distributed.all_reduce` over Gloo, in place. An average is a sum and a division."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        torch_gloo.connect(spec)
        self._dist, self._size = dist, spec["size"]

    def buffers(self, case: Case) -> Tensors:
        """See `Library`."""
        average = case.op == "average"
        op = getattr(self._dist.ReduceOp, "SUM" if average else case.op.upper())

        def reduce(buffer: torch.Tensor) -> torch.Tensor:
            self._dist.all_reduce(buffer, op)
            return buffer.div_(self._size) if average else buffer

        return Tensors(case, reduce)

    def barrier(self) -> None:
        """See `Library`."""
        self._dist.barrier()

    def close(self) -> None:
        """See `Library`."""
        self._dist.destroy_process_group()


class Horovod:
    """`horovod.torch.allreduce_`, or `allreduce` with `Compression.fp16`."""

    #: The beginning of tensor names. hvdkit's engine does not fuse tensors named `hvdkit.*`.
    prefix = "bench"

    def __init__(self) -> None:
        import horovod.torch as hvd

        torch.set_num_threads(1)
        self._hvd: Any = hvd

    def buffers(self, case: Case) -> Tensors:
        """See `Library`."""
        settings: dict[str, Any] = {
            "op": getattr(self._hvd, case.op.capitalize()),
            "name": f"{self.prefix}.{case.dtype}.{case.op}.{case.wire}.{case.elements}",
        }
        if case.wire == "none":
            return self._plain(case, lambda buffer: self._hvd.allreduce_(buffer, **settings))
        settings["compression"] = getattr(self._hvd.Compression, case.wire)
        return Tensors(case, lambda buffer: self._hvd.allreduce(buffer, **settings))

    def _plain(self, case: Case, reduce: Reduce) -> Tensors:
        return Tensors(case, reduce)

    def barrier(self) -> None:
        """See `Library`."""
        self._hvd.barrier()

    def close(self) -> None:
        """See `Library`."""
        self._hvd.shutdown()


class Hvdkit(Horovod):
    """hvdkit: `allreduce_` in the memory of buckets, or a bucket reduction in a wire format."""

    prefix = "hvdkit.bench"

    def _plain(self, case: Case, reduce: Reduce) -> Tensors:
        from hvdkit.torch import shared_memory

        buffer = shared_memory.empty(case.elements, getattr(torch, case.dtype))
        return Tensors(case, reduce, buffer)

    def buffers(self, case: Case) -> Tensors:
        """See `Library`. A wire format reduces the buffer like the gradient of one parameter."""
        if case.wire == "none":
            return super().buffers(case)
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
        gradient = torch.empty(case.elements, dtype=getattr(torch, case.dtype))
        parameter = torch.nn.Parameter(torch.empty_like(gradient))
        parameter.grad = gradient
        collectives = TorchCollectives(self._hvd.global_process_set)
        synchronizer: Synchronizer[Any, Any] = Synchronizer(
            [spec("buffer", parameter)],
            TorchBackend([parameter], collectives),
            collectives,
            Reduction(wire_format(chosen), average=case.op == "average"),
        )

        def reduce(_: torch.Tensor) -> torch.Tensor:
            synchronizer.mark_ready(0)
            synchronizer.synchronize()
            assert parameter.grad is not None
            # With int8, the gradient moves into the bucket at the first reduction.
            return parameter.grad

        return Tensors(case, reduce, gradient)
