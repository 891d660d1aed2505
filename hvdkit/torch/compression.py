"""PyTorch's values for `compression=`: wire formats, and Horovod's compressors."""

from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compressor, FP16Compressor, NoneCompressor

from hvdkit.reduction.compression import FORMATS, Int8Compressor, TensorByTensor, resolve
from hvdkit.reduction.wire_format import BucketReduction, Scaling, Sum, WireFormat
from hvdkit.torch import runtime
from hvdkit.torch.reduction.memory import TorchMemory

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "Int8Compressor",
    "NoneCompressor",
]


class BF16Compressor(Compressor):
    """Cast floating-point tensors to bfloat16 and back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor as bfloat16, and the dtype that it had."""
        narrow = tensor.dtype in (torch.float32, torch.float64, torch.float16)
        return tensor.to(torch.bfloat16) if narrow else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """Wire formats for gradients, with the names of Horovod.

    In a `DistributedOptimizer`, `fp16` and `bf16` cast whole buckets. `fp16` also scales each
    bucket, and repeats the reduction of a bucket in float32 after an overflow. In a single
    `allreduce`, `fp16` and `bf16` only cast the tensor, as in Horovod. `int8` is for a
    `DistributedOptimizer` only.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor


_BY_COMPRESSOR = {getattr(Compression, name): name for name in FORMATS}


def wire_format(compression: Any) -> WireFormat:
    """Return the wire format for a `compression` argument, see `resolve`."""
    return resolve(compression, _BY_COMPRESSOR, _TensorByTensor, runtime.engine, mpi_ops.rank)


class _TensorByTensor(TensorByTensor):
    def reduce(  # type: ignore[override]
        self, memory: TorchMemory, scaling: Scaling
    ) -> BucketReduction:
        """Compress, reduce and decompress the bucket's only gradient."""
        (gradient,) = memory.gradients()
        wire, context = self._compressor.compress(gradient)
        wire = wire.contiguous()
        yield Sum(wire)
        if scaling.total != 1.0:
            memory.scale(wire, scaling.total)
        memory.set_gradients([self._compressor.decompress(wire, context)])
