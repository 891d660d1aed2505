"""TensorFlow's values for `compression=`: wire formats, and Horovod's compressors."""

from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compressor, FP16Compressor, NoneCompressor

from hvdkit.reduction.compression import FORMATS, Int8Compressor, TensorByTensor, resolve
from hvdkit.reduction.wire_format import BucketReduction, Scaling, Sum, WireFormat
from hvdkit.tensorflow import runtime
from hvdkit.tensorflow.reduction.backend import GraphMemory, Wire

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
    def compress(tensor: Any) -> tuple[Any, tf.DType]:
        """Return the tensor as bfloat16, and the dtype that it had."""
        narrow = tensor.dtype in (tf.float32, tf.float64, tf.float16)
        return tf.cast(tensor, tf.bfloat16) if narrow else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: tf.DType) -> Any:
        """Return the tensor in the dtype that it had."""
        return tf.cast(tensor, ctx)


class Compression:
    """Wire formats for gradients, with the names of Horovod.

    In a `DistributedGradientTape` or a `DistributedOptimizer`, `fp16` and `bf16` cast whole
    buckets. `fp16` also scales each bucket and repeats it in float32 after an overflow. In a single
    `allreduce` they cast only, as in Horovod.
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
        self, memory: GraphMemory, scaling: Scaling
    ) -> BucketReduction:
        """Compress, reduce and decompress the bucket's only gradient."""
        (gradient,) = memory.gradients()
        compressed, context = self._compressor.compress(gradient)
        wire = Wire(compressed)
        yield Sum(wire)
        reduced = tf.cast(self._compressor.decompress(wire.tensor, context), gradient.dtype)
        if scaling.total != 1.0:
            # After decompression, because compressed elements may be codes and not numbers.
            reduced *= tf.constant(scaling.total, gradient.dtype)
        memory.set_gradients([reduced])
