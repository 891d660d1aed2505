"""The wire formats that a user selects with `compression=`: none, fp16, bf16 and int8.

The adapters call `resolve` with the argument of a `DistributedOptimizer` or gradient tape. To add a
name, add its class to `FORMATS`, and the name to `Compression` in `compression.py` of the adapters.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hvdkit.engine.describe import Engine
from hvdkit.errors import UsageError
from hvdkit.reduction.backend import BucketMemory
from hvdkit.reduction.bfloat16 import BFloat16, reduce_as
from hvdkit.reduction.float16 import Float16
from hvdkit.reduction.int8 import Int8
from hvdkit.reduction.wire_format import BucketReduction, Scaling, WireFormat


class NoCompression(WireFormat):
    """Send gradients in their own dtype, without a copy.

    Args:
        instead: dtype -> the dtype on the wire, for dtypes that the installed Horovod lacks.
    """

    name = "none"

    def __init__(self, instead: Mapping[str, str] | None = None) -> None:
        self._instead = dict(instead or {})

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Reduce the gradients in place."""
        if memory.dtype in self._instead:
            return reduce_as(self._instead[memory.dtype], memory, scaling)
        return super().reduce(memory, scaling)


#: Name -> wire format. `hvd.Compression` has an attribute for each name.
FORMATS = {f.name: f for f in (NoCompression, Float16, BFloat16, Int8)}


def by_name(name: str) -> WireFormat:
    """Return the format with the name `none`, `fp16`, `bf16` or `int8`.

    Raises:
        UsageError: there is no such format.
    """
    if name not in FORMATS:
        raise UsageError(
            f"compression is {name!r}: expected one of {', '.join(map(repr, FORMATS))}"
        )
    return FORMATS[name]()


class Int8Compressor:
    """`hvd.Compression.int8`: stands for the wire format `hvd.Int8()` in settings.

    It has the methods of Horovod's compressors, but cannot compress a single tensor.
    """

    @staticmethod
    def compress(tensor: Any) -> NoReturn:  # noqa: ARG004
        """Raise UsageError."""
        raise UsageError(
            "Compression.int8 was given for a single tensor, or for op=hvd.Adasum: int8 is for the "
            "gradients of a DistributedOptimizer or DistributedGradientTape with op=hvd.Average or "
            "hvd.Sum. Use Compression.fp16 or Compression.bf16 here"
        )

    decompress = compress


def check_adasum(format_: WireFormat) -> None:
    """Check that gradients can be reduced by Adasum in this format.

    Raises:
        UsageError: the format is `Int8`.
    """
    if isinstance(format_, Int8):
        raise UsageError(
            "compression is int8 and op is hvd.Adasum: Adasum compresses gradients one by one, so "
            "it supports 'none', 'fp16' and 'bf16' only"
        )


class TensorByTensor(WireFormat):
    """Base class of a format that calls a compressor like Horovod's for each gradient.

    Args:
        compressor: an object with `compress(tensor)` and `decompress(tensor, ctx)`.
    """

    tensor_by_tensor = True

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor
        kind = compressor if isinstance(compressor, type) else type(compressor)
        self.name = f"{kind.__module__}.{kind.__qualname__}"


def resolve(
    compression: Any,
    compressors: Mapping[type, str],
    tensor_by_tensor: Callable[[Any], WireFormat],
    engine: Engine,
    rank: Callable[[], int],
) -> WireFormat:
    """Return the wire format for a user's `compression` argument.

    An engine without bfloat16 sends float32 instead of bfloat16. Rank 0 logs a warning if
    `compression` is bf16 or int8.

    Args:
        compression: the name of a format, one of `compressors`, a `WireFormat`, or an object with
            `compress` and `decompress` like Horovod's compressors.
        compressors: Horovod's compressor classes -> the name of the format for each.
        tensor_by_tensor: returns the format for a compressor.
        engine: the installed Horovod.
        rank: returns this process's rank.

    Raises:
        UsageError: `compression` is none of these.
    """
    if isinstance(compression, WireFormat):
        return compression
    kind = compression if isinstance(compression, type) else type(compression)
    name = compressors.get(kind, compression)
    if isinstance(name, str):
        if "bfloat16" in engine.patches:
            return by_name(name)
        if name in (BFloat16.name, Int8.name):
            if rank() == 0:
                _warn_without_bfloat16(engine.version)
            return BFloat16("float32") if name == BFloat16.name else Int8(bf16_wire="float32")
        return NoCompression({"bfloat16": "float32"}) if name == "none" else by_name(name)
    if all(callable(getattr(compression, name, None)) for name in ("compress", "decompress")):
        return tensor_by_tensor(compression)
    raise UsageError(
        f"compression is {compression!r}: expected 'none', 'fp16', 'bf16', 'int8', one of "
        f"hvd.Compression, or a class with compress(tensor) and decompress(tensor, ctx)"
    )


@functools.cache
def _warn_without_bfloat16(version: str) -> None:
    logging.getLogger("hvdkit").warning(
        "Horovod %s has no bfloat16: float32 is sent instead. Run `hvdkit build` for a Horovod "
        "with bfloat16.",
        version,
    )
