"""What `compression=` may be in TensorFlow: wire formats, and Horovod's compressors."""

import functools
import logging
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compressor, FP16Compressor, NoneCompressor

from hvdkit.core import compression as formats
from hvdkit.core.compression import Channel, Division, Sum, Travel, WireFormat
from hvdkit.tensorflow import runtime
from hvdkit.tensorflow.backend import GraphMemory, Wire

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

log = logging.getLogger("hvdkit.tensorflow")


class BF16Compressor(Compressor):
    """Casts floating-point tensors to bfloat16 and back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, tf.DType]:
        """The tensor as bfloat16, and its dtype."""
        narrow = tensor.dtype in (tf.float32, tf.float64, tf.float16)
        return tf.cast(tensor, tf.bfloat16) if narrow else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: tf.DType) -> Any:
        """The tensor in the dtype that it had."""
        return tf.cast(tensor, ctx)


class Compression:
    """What gradients may travel as.

    For a `DistributedGradientTape` or a `DistributedOptimizer`, `fp16` and `bf16` stand for the
    formats of the same name, which cast whole buckets; `fp16` scales them and repeats in float32
    what overflowed. For a single `allreduce` they are plain casts, as in Horovod.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


_BY_COMPRESSOR = {NoneCompressor: "none", FP16Compressor: "fp16", BF16Compressor: "bf16"}


def wire_format(compression: Any) -> WireFormat:
    """The wire format that a user's `compression` means, see `hvdkit.core.compression.chosen`."""
    bfloat16 = "bfloat16" in runtime.engine.fixes
    chosen = formats.chosen(compression, _BY_COMPRESSOR, _TensorByTensor, bfloat16)
    if isinstance(chosen, formats.BFloat16) and not bfloat16:
        _say_that_bfloat16_is_missing()
    return chosen


@functools.cache
def _say_that_bfloat16_is_missing() -> None:
    if mpi_ops.rank() == 0:
        log.warning(
            "Horovod %s does not know bfloat16: gradients travel as float32. `hvdkit build` makes "
            "one that does.",
            runtime.engine.version,
        )


class _TensorByTensor(WireFormat):
    """A Horovod compressor; it sees the gradients one at a time, as Horovod's tape does."""

    tensor_by_tensor = True

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor
        kind = compressor if isinstance(compressor, type) else type(compressor)
        self.name = f"{kind.__module__}.{kind.__qualname__}"

    def channel(self, dtype: str) -> Channel:  # noqa: ARG002
        return _CompressorChannel(self._compressor)


class _CompressorChannel(Channel):
    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor

    def travel(self, memory: GraphMemory, division: Division) -> Travel:  # type: ignore[override]
        (gradient,) = memory.gradients()
        compressed, context = self._compressor.compress(gradient)
        wire = Wire(compressed)
        yield Sum(wire)
        reduced = tf.cast(self._compressor.decompress(wire.tensor, context), gradient.dtype)
        if division.total != 1.0:
            # Not on the wire, whose elements need not be numbers that can be divided.
            reduced *= tf.constant(division.total, gradient.dtype)
        memory.put_gradients([reduced])
