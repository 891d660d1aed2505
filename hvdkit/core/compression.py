"""The wire formats that `compression=` names: none, fp16 and bf16."""

from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.core.backend import BucketMemory
from hvdkit.core.float16 import Float16
from hvdkit.core.wire_format import NARROW, BucketReduction, Scaling, Sum, WireFormat
from hvdkit.errors import UsageError

_WIDE = ("float64", "float32")


class NoCompression(WireFormat):
    """Send gradients in their own dtype, from the memory that they are in.

    Args:
        instead: dtype -> the dtype on the wire, for dtypes that the installed Horovod lacks.
    """

    name = "none"

    def __init__(self, instead: Mapping[str, str] | None = None) -> None:
        self._instead = dict(instead or {})

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Reduce the gradients in place."""
        if memory.dtype in self._instead:
            return _reduce_as(self._instead[memory.dtype], memory, scaling)
        return super().reduce(memory, scaling)


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
        if memory.dtype == self._wire or memory.dtype not in (*_WIDE, *NARROW):
            return super().reduce(memory, scaling)
        return _reduce_as(self._wire, memory, scaling)


def _reduce_as(wire_dtype: str, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
    before = 1.0 / scaling.predivide if scaling.predivide is not None else 1.0
    wire = memory.pack(wire_dtype, before)
    yield Sum(wire)
    memory.unpack(wire, scaling.total / before)


def by_name(name: str) -> WireFormat:
    """Return the format with the name `none`, `fp16` or `bf16`.

    Raises:
        UsageError: there is no such format.
    """
    formats = {f.name: f for f in (NoCompression, Float16, BFloat16)}
    if name not in formats:
        raise UsageError(
            f"compression is {name!r}: expected one of {', '.join(map(repr, formats))}"
        )
    return formats[name]()


def resolve(
    compression: Any,
    compressors: Mapping[type, str],
    tensor_by_tensor: Callable[[Any], WireFormat],
    bfloat16: bool = True,
) -> WireFormat:
    """Return the wire format for a user's `compression` argument.

    Args:
        compression: the name of a format, one of `compressors`, a `WireFormat`, or an object with
            `compress` and `decompress` like Horovod's compressors.
        compressors: Horovod's compressor classes -> the name of the format for each.
        tensor_by_tensor: returns the format for a compressor.
        bfloat16: whether the installed Horovod has bfloat16; if not, float32 replaces it.

    Raises:
        UsageError: `compression` is none of these.
    """
    if isinstance(compression, WireFormat):
        return compression
    kind = compression if isinstance(compression, type) else type(compression)
    name = compressors.get(kind, compression)
    if isinstance(name, str):
        if bfloat16:
            return by_name(name)
        instead: Mapping[str, WireFormat] = {
            BFloat16.name: BFloat16(wire="float32"),
            NoCompression.name: NoCompression(instead={"bfloat16": "float32"}),
        }
        return instead.get(name) or by_name(name)
    if all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        return tensor_by_tensor(compression)
    raise UsageError(
        f"compression is {compression!r}: expected 'none', 'fp16', 'bf16', one of hvd.Compression, "
        f"or a class with compress(tensor) and decompress(tensor, ctx)"
    )
