"""How PyTorch packs, reduces and unpacks the gradients of a bucket."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from horovod.torch import mpi_ops

from hvdkit.core.bucketing import Bucket, ParameterSpec

# Horovod refuses these on the wire; the type that they travel as instead.
_WIRE_DTYPES = {torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class TorchBuffer:
    """One bucket's memory.

    Attributes:
        views: a view per parameter, in its gradient's shape.
        wire: the whole of it as Horovod reduces it, one-dimensional and real.
    """

    views: tuple[torch.Tensor, ...]
    wire: torch.Tensor


def spec(name: str, parameter: torch.Tensor) -> ParameterSpec:
    """Describe `parameter` to the bucket plan."""
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.element_size(),
        device=str(parameter.device),
    )


class TorchBackend:
    """`hvdkit.core.backend.Backend` for a sequence of parameters.

    Args:
        parameters: in the order of the plan's specs.
        op: `Average` or `Sum`.
        predivide: of `Average`'s division, the factor that is applied before the sum.
        process_set: the ranks to reduce over.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        op: int,
        predivide: float,
        process_set: mpi_ops.ProcessSet,
    ) -> None:
        self._parameters = parameters
        self._op = op
        self._predivide = predivide
        self._process_set = process_set

    def allocate(self, bucket: Bucket) -> TorchBuffer:
        """Zeros on the bucket's device, in the dtype that travels."""
        like = self._parameters[bucket.parameters[0]]
        flat = torch.zeros(
            bucket.elements,
            dtype=_WIRE_DTYPES.get(like.dtype, like.dtype),
            device=like.device,
        )
        views = []
        for i, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            shape = self._parameters[i].shape
            views.append(flat[offset : offset + shape.numel()].view(shape))
        wire = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        return TorchBuffer(tuple(views), wire)

    @torch.no_grad()
    def pack(self, bucket: Bucket, buffer: TorchBuffer) -> None:
        """Copy and cast in one pass, whatever the gradient's strides; sparse ones as dense."""
        for i, view in zip(bucket.parameters, buffer.views, strict=True):
            gradient = self._parameters[i].grad
            if gradient is None:
                view.zero_()
            elif gradient.is_sparse:
                view.copy_(gradient.to_dense())
            else:
                view.copy_(gradient)

    def reduce(self, buffer: TorchBuffer, name: str) -> int:
        """An in-place allreduce of the whole bucket."""
        return int(
            mpi_ops.allreduce_async_(
                buffer.wire,
                name=name,
                op=self._op,
                prescale_factor=1.0 / self._predivide,
                postscale_factor=self._predivide,
                process_set=self._process_set,
            )
        )

    def wait(self, handle: int) -> None:
        """Wait for the allreduce; HorovodInternalError when it failed."""
        mpi_ops.synchronize(handle)

    @torch.no_grad()
    def unpack(self, bucket: Bucket, buffer: TorchBuffer) -> None:
        """Write into the gradients that exist, in place, and make those that do not.

        A parameter that is frozen now and has no gradient keeps none, so that its optimizer
        leaves it alone.
        """
        for i, view in zip(bucket.parameters, buffer.views, strict=True):
            parameter = self._parameters[i]
            if parameter.grad is None:
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter).copy_(view)
            elif parameter.grad.is_sparse:
                parameter.grad = view.to(parameter.dtype).to_sparse(parameter.grad.sparse_dim())
            else:
                parameter.grad.copy_(view)
