"""The bfloat16 wire format."""

from typing import Any

from hvdkit.reduction.backend import BucketMemory
from hvdkit.reduction.wire_format import NARROW, WIDE, BucketReduction, Scaling, Sum, WireFormat


class BFloat16(WireFormat):
    """Send gradients as bfloat16: half the bytes of float32, its range, 8 bits of precision.

    Args:
        wire: another dtype on the wire, where the installed Horovod lacks bfloat16.
    """

    name = "bf16"

    def __init__(self, wire: str = "bfloat16") -> None:
        self._wire = wire

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Cast the gradients and reduce them."""
        if memory.dtype == self._wire or memory.dtype not in (*WIDE, *NARROW):
            return super().reduce(memory, scaling)
        return reduce_as(self._wire, memory, scaling)


def reduce_as(wire_dtype: str, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
    """Reduce a bucket in another dtype."""
    wire = memory.pack(wire_dtype, scaling.before)
    yield Sum(wire)
    memory.unpack(wire, scaling.after)
