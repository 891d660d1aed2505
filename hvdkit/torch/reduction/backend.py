"""The collectives on the buckets of gradients in PyTorch."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.reduction.bucketing import Bucket, BucketPlan
from hvdkit.runtime.host_collectives import int8_name
from hvdkit.torch import runtime
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.reduction.block_sums import BlockSum
from hvdkit.torch.reduction.divided_memory import Buffers, DividedMemory
from hvdkit.torch.reduction.memory import TorchMemory


def _refuse_capture(tensor: torch.Tensor) -> None:
    """Raise UsageError while a CUDA graph is captured on the current stream.

    Horovod waits in its own thread for an event that it records on this stream. During a capture
    the event does not happen, and waiting for it ends the process.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a reduction began while a CUDA graph is captured, but Horovod's collectives cannot be "
            "part of a graph. Call backward() and optimizer.step() outside the capture. To run the "
            "model itself as graphs, use torch.cuda.make_graphed_callables or "
            "torch.compile(mode='reduce-overhead')."
        )


def _abs_max(buffer: torch.Tensor) -> torch.Tensor:
    """Return the absolute maximum, a tensor without dimensions; NaN if an element is NaN."""
    if buffer.device.type != "cpu":
        return torch.linalg.vector_norm(buffer, float("inf"))
    if not _has_aminmax(buffer.dtype):
        return buffer.abs().max()
    low, high = torch.aminmax(buffer)  # faster on a CPU
    return torch.maximum(-low, high)


@functools.cache
def _has_aminmax(dtype: torch.dtype) -> bool:
    """Return whether `torch.aminmax` takes this dtype on a CPU: not float16 with torch 2.1."""
    try:
        torch.aminmax(torch.zeros(1, dtype=dtype, device="cpu"))
    except RuntimeError:
        return False
    return True


class TorchBackend:
    """`hvdkit.reduction.backend.Backend` for a sequence of parameters.

    Args:
        parameters: the parameters, in the order of the synchronizer's specs.
        collectives: the collectives of the ranks to reduce over.
        keeps_memory: see `TorchMemory`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        collectives: TorchCollectives,
        keeps_memory: bool = True,
    ) -> None:
        self._parameters = parameters
        self._keeps_memory = keeps_memory
        self._collectives = collectives
        self._buffers = Buffers()
        self._on_accelerator = any(p.device.type != "cpu" for p in parameters)
        #: For each parameter, the largest number of sparse dimensions of its gradients until now.
        self.sparse_seen = [0] * len(parameters)

    def memory(self, bucket: Bucket) -> TorchMemory | DividedMemory:
        """See `Backend`. Buffers are allocated on first use."""
        parameters = [self._parameters[i] for i in bucket.parameters]
        if bucket.sections > 1:
            return DividedMemory(bucket, parameters, self._collectives, self._buffers)
        return TorchMemory(bucket, parameters, self._record_sparse, self._keeps_memory)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for p in self._parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)

    @torch.no_grad()
    def sum(self, buffer: torch.Tensor, name: str, factor: float) -> Any:
        """See `Backend`: an in-place allreduce."""
        if self._collectives.single_rank or not buffer.numel():
            return buffer if factor == 1.0 else buffer.mul_(factor)
        _refuse_capture(buffer)
        return mpi_ops.allreduce_async_(
            buffer,
            name=name,
            op=mpi_ops.Sum,
            postscale_factor=factor,
            process_set=self._collectives.process_set,
        )

    @torch.no_grad()
    def scatter(self, buffer: torch.Tensor, sections: int, name: str, factor: float) -> Any:
        """See `Backend`: an in-place reducescatter."""
        if not buffer.numel():
            return buffer
        _refuse_capture(buffer)
        own = self.section(buffer, sections)
        return mpi_ops._reducescatter_async(
            buffer, own, name, mpi_ops.Sum, self._collectives.process_set, 1.0, factor
        )

    def section(self, buffer: torch.Tensor, sections: int) -> torch.Tensor:
        """See `Backend`."""
        return buffer.view(sections, -1)[self._collectives.place]

    @torch.no_grad()
    def sum_blocks(self, buffer: torch.Tensor, name: str, factor: float) -> Any:
        """See `Backend`. The engine's own sum on the CPU, otherwise `BlockSum`."""
        if self._collectives.single_rank or not buffer.numel():
            return self.sum(buffer, name, factor)
        process_set = self._collectives.process_set
        in_engine = buffer.device.type == "cpu" and process_set.process_set_id == 0
        if in_engine and runtime.host_collectives.sends_int8():
            return self.sum(buffer, int8_name(name), factor)
        _refuse_capture(buffer)
        return BlockSum(buffer, name, factor, process_set)

    def gather(self, rows: tuple[torch.Tensor, torch.Tensor], name: str) -> Any:
        """See `Backend`: one allgather for the indices and one for the values."""
        if self._collectives.single_rank:
            return rows
        indices, values = rows
        _refuse_capture(values)
        # As integers, because stock Horovod has no bfloat16.
        content = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        return (
            mpi_ops.allgather_async(indices, f"{name}.indices", self._collectives.process_set),
            mpi_ops.allgather_async(content, f"{name}.values", self._collectives.process_set),
            values.dtype,
        )

    def is_done(self, handle: Any) -> bool:
        """See `Backend`; False for a handle of several collectives."""
        return isinstance(handle, int) and bool(mpi_ops.poll(handle))

    def wait(self, handle: Any) -> Any:
        """Wait for `sum`, `sum_blocks` or `gather`. Raises HorovodInternalError on failure."""
        if isinstance(handle, int):
            return mpi_ops.synchronize(handle)
        if isinstance(handle, BlockSum):
            return handle.wait()
        if isinstance(handle, tuple) and len(handle) == 3:
            indices, content, dtype = handle
            return mpi_ops.synchronize(indices), mpi_ops.synchronize(content).view(dtype)
        return handle

    @torch.no_grad()
    def abs_max(self, buffers: Sequence[torch.Tensor]) -> list[float]:
        """See `Backend`. One pass over each buffer, and one copy to the host per device."""
        by_device: dict[torch.device, list[int]] = {}
        for k, buffer in enumerate(buffers):
            by_device.setdefault(buffer.device, []).append(k)
        found = [0.0] * len(buffers)
        for members in by_device.values():
            nonempty = [k for k in members if buffers[k].numel()]
            if not nonempty:
                continue
            largest = [_abs_max(buffers[k]) for k in nonempty]
            if len({each.dtype for each in largest}) > 1:
                largest = [each.double() for each in largest]
            for k, value in zip(nonempty, torch.stack(largest).tolist(), strict=True):
                found[k] = value
        return found

    @property
    def batches_abs_max(self) -> bool:
        """True if a parameter is on an accelerator."""
        return self._on_accelerator

    def sparse_dims(self, i: int) -> int:
        """See `Backend`. The most sparse dimensions of this and all earlier gradients."""
        gradient = self._parameters[i].grad
        if gradient is not None and gradient.is_sparse:
            self._record_sparse(i, gradient.sparse_dim())
        return self.sparse_seen[i]

    def _record_sparse(self, i: int, dims: int) -> None:
        self.sparse_seen[i] = max(self.sparse_seen[i], dims)

    def has_sparse_in(self, plan: BucketPlan) -> bool:
        """Return whether a gradient that is or was sparse has a dense bucket in `plan`."""
        if not plan.buckets:
            return False
        for i, p in enumerate(self._parameters):
            if (gradient := p.grad) is not None and gradient.is_sparse:
                self._record_sparse(i, gradient.sparse_dim())
        planned = {i for bucket in plan.buckets if bucket.sparse_dims for i in bucket.parameters}
        return any(dims and i not in planned for i, dims in enumerate(self.sparse_seen))

    @torch.no_grad()
    def make_sparse(self, dims: Sequence[int], plan: BucketPlan) -> bool:
        """Convert each gradient that is sparse on some rank to a sparse one.

        Args:
            dims: for each parameter, its largest number of sparse dimensions on any rank, or 0.
            plan: the buckets.

        Returns:
            Whether such a gradient has a dense bucket in `plan`.
        """
        self.sparse_seen = list(dims)
        for p, sparse_dims in zip(self._parameters, dims, strict=True):
            if sparse_dims and p.grad is not None and not p.grad.is_sparse:
                p.grad = p.grad.to_sparse(sparse_dims)
        return self.has_sparse_in(plan)
