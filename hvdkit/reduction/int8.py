"""The int8 wire format: one byte per number, with a scale for each block of 256 numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdkit.reduction.backend import BucketMemory
from hvdkit.reduction.bfloat16 import BFloat16
from hvdkit.reduction.bucketing import ParameterSpec
from hvdkit.reduction.wire_format import (
    NARROW,
    WIDE,
    BlockSum,
    BucketReduction,
    Scaling,
    WireFormat,
)

#: Numbers per block. `hvdkit/engine/sources/int8_blocks.h` has the same number.
BLOCK = 256

#: A block's bytes: its scale, as float32, and a code of one byte for each number.
BLOCK_BYTES = 4 + BLOCK

#: Gradients with fewer elements are sent as bfloat16 by default.
SMALL = 4096


def is_small_or_vector(name: str, shape: tuple[int, ...]) -> bool:  # noqa: ARG001
    """Return whether a gradient has at most one dimension, or fewer than 4,096 elements.

    Biases and the parameters of normalization layers have one dimension. They are a small part of
    the bytes, and training is sensitive to them.
    """
    elements = 1
    for length in shape:
        elements *= length
    return len(shape) < 2 or elements < SMALL


def payload_bytes(numbers: Any) -> Any:
    """Return the size of encoded blocks in bytes: a byte for each number, and 4 for each scale.

    Args:
        numbers: the number of float32 values to encode: an integer, or an integer tensor.
    """
    return numbers + 4 * -(-numbers // BLOCK)


@dataclass(frozen=True)
class Int8(WireFormat):
    """Send gradients between hosts as int8: a quarter of the bytes of float32.

    A block of 256 numbers has a float32 scale, which is its largest magnitude divided by 127. Each
    number is sent as the quotient number / scale, rounded to the nearest integer. The sums are
    computed in float32, and sent to all ranks in the same way. All ranks get the same bits. Ranks
    of one host add in float32 if they share memory.

    |error of the mean| <= 2 m / 254 for each element, plus the rounding of float32. m is the
    largest magnitude in the element's block on any rank. A block with a number that is not finite
    is NaN on all ranks.

    Example:
        hvd.DistributedOptimizer(optimizer, compression=hvd.Int8())

    Args:
        as_bf16: returns for a parameter's name and shape whether to send its gradient as bfloat16
            instead. Default: `is_small_or_vector`. It must return the same on all ranks.
        bf16_wire: the dtype on the wire instead of bfloat16, for an engine without bfloat16.
    """

    as_bf16: Callable[[str, tuple[int, ...]], bool] = is_small_or_vector
    bf16_wire: str = "bfloat16"

    name = "int8"

    def kind(self, spec: ParameterSpec) -> str:
        """Return `int8` or `bf16`; "" for a dtype that is not a real float, and is not encoded."""
        if spec.dtype not in (*WIDE, *NARROW):
            return ""
        return "bf16" if self.as_bf16(spec.name, spec.shape) else "int8"

    def codec(self, dtype: str, kind: str = "") -> WireFormat:  # noqa: ARG002
        """Return the codec for gradients of one kind."""
        return _Blocks() if kind == "int8" else BFloat16(self.bf16_wire)


class _Blocks(WireFormat):
    name = "int8 blocks"

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Add up the bucket in blocks."""
        if memory.dtype == "float32":
            yield BlockSum(memory.in_place(scaling.before), scaling.after)
        else:
            buffer = memory.pack("float32", scaling.before)
            yield BlockSum(buffer)
            memory.unpack(buffer, scaling.after)
