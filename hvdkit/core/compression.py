"""Wire formats: what a bucket of gradients travels as.

A format is written as one bucket's journey, a generator that asks for collectives and is sent
their results:

    def travel(self, memory, division):
        wire = memory.pack("bfloat16", 1.0)
        yield Sum(wire)
        memory.unpack(wire, division.total)

The synchronizer starts the journey when the bucket is full, runs those of all buckets side by side
and batches what can be batched. Every rank must take the same turns: decide only by what a request
has answered, and by a `Peak` only whether it is finite, because ranks may hold sums that differ in
the last bit. docs/synchronizer.md shows how to add a format.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from hvdkit.core.backend import BucketMemory
from hvdkit.errors import UsageError


@dataclass(frozen=True)
class Sum:
    """Add up a buffer in place over the ranks. Answers the buffer."""

    buffer: Any


@dataclass(frozen=True)
class Gather:
    """Collect the rows of sparse gradients from the ranks. Answers all rows."""

    rows: Any


@dataclass(frozen=True)
class Peak:
    """Answers the largest magnitude in a reduced buffer, not finite if anything in it is not.

    On an accelerator all buckets are asked at once, which is one transfer to the host, unless the
    answer is wanted `at_once`.
    """

    buffer: Any
    at_once: bool = False


@dataclass(frozen=True)
class Largest:
    """Answers the largest of the ranks' values, which are not negative. One collective for all
    buckets that ask at once."""

    value: int


Request = Sum | Gather | Peak | Largest
Travel = Generator[Request, Any, None]


@dataclass(frozen=True)
class Division:
    """How a sum over ranks becomes the gradient that the optimizer sees.

    Attributes:
        total: what the sum is multiplied by in all, 1 / (ranks x passes) for a mean.
        predivide: the divisor that the user wants applied before the sum, or None.
        ranks: how many ranks' values are added.
    """

    total: float
    predivide: float | None = None
    ranks: int = 1

    def split(self, dtype: str) -> tuple[float, float]:
        """The factors before and after the sum, for a wire of `dtype`.

        All before it, which can be done while packing; float16 would lose small values by that,
        and bfloat16 a rounding, so theirs come after it, as Horovod's do.
        """
        if self.predivide is not None:
            return 1.0 / self.predivide, self.total * self.predivide
        return (1.0, self.total) if dtype in _NARROW else (self.total, 1.0)


class Channel(ABC):
    """A wire format at work on one bucket. It may keep what it learns from step to step."""

    @abstractmethod
    def travel(self, memory: BucketMemory[Any], division: Division) -> Travel:
        """One step of the bucket: pack, ask for collectives, unpack."""


class WireFormat(ABC):
    """What gradients travel as.

    Attributes:
        name: how settings and errors call it; ranks compare it.
        tensor_by_tensor: whether every parameter has a bucket of its own.
    """

    name: str
    tensor_by_tensor = False

    @abstractmethod
    def channel(self, dtype: str) -> Channel:
        """A new channel, for a bucket of gradients of `dtype`."""


_NARROW = ("float16", "bfloat16")
_COMPRESSIBLE = ("float64", "float32", *_NARROW)


class NoCompression(WireFormat):
    """Gradients travel as they are, in the memory that they live in.

    Args:
        instead: dtype -> the one to use on the wire, for dtypes that Horovod does not know.
    """

    name = "none"

    def __init__(self, instead: Mapping[str, str] | None = None) -> None:
        self._instead = dict(instead or {})

    def channel(self, dtype: str) -> Channel:
        return _Cast(self._instead[dtype]) if dtype in self._instead else _InPlace()


class BFloat16(WireFormat):
    """Gradients travel as bfloat16: half the bytes of float32, its range, 8 bits of precision.

    Args:
        wire: another dtype to use, where Horovod does not know bfloat16.
    """

    name = "bf16"

    def __init__(self, wire: str = "bfloat16") -> None:
        self._wire = wire

    def channel(self, dtype: str) -> Channel:
        if dtype == self._wire or dtype not in _COMPRESSIBLE:
            return _InPlace()
        return _Cast(self._wire)


class Float16(WireFormat):
    """Gradients travel as float16, scaled so that sums do not overflow nor small values flush.

    Each bucket is multiplied by a power of two, chosen such that the largest sum of the last steps
    lands between 2^9 and 2^10: it may grow 64 times before it overflows, and what is 2^-33 of it
    still counts. The first step travels in float32, to learn the magnitude. A bucket whose sum is
    not finite nevertheless is reduced again in float32 in the same step, and travels in float32 in
    the next one; so does one that has come to nothing but zeros. Where either goes on, it travels
    in float32 for more steps, up to 64. This is Micikevicius et al.'s loss scaling
    (arXiv:1710.03740), for each bucket and on the wire only.

    With n ranks, |error of the mean| <= (n + 1) 2^-11 mean|x_i|, and 2^-25 / scale more for each
    of the n hops that falls among float16's subnormal numbers.
    """

    name = "fp16"

    def channel(self, dtype: str) -> Channel:
        return _ScaledFloat16(dtype) if dtype in _COMPRESSIBLE else _InPlace()


def by_name(name: str) -> WireFormat:
    """The format called `none`, `fp16` or `bf16`.

    Raises:
        UsageError: there is no such format.
    """
    formats = {f.name: f for f in (NoCompression, Float16, BFloat16)}
    if name not in formats:
        raise UsageError(
            f"compression is {name!r}: expected one of {', '.join(map(repr, formats))}"
        )
    return formats[name]()


class _InPlace(Channel):
    def travel(self, memory: BucketMemory[Any], division: Division) -> Travel:
        before, after = division.split(memory.dtype)
        buffer = memory.home(before)
        yield Sum(buffer)
        if after != 1.0:
            memory.scale(buffer, after)


class _Cast(Channel):
    def __init__(self, wire: str) -> None:
        self._wire = wire

    def travel(self, memory: BucketMemory[Any], division: Division) -> Travel:
        before = 1.0 / division.predivide if division.predivide is not None else 1.0
        wire = memory.pack(self._wire, before)
        yield Sum(wire)
        memory.unpack(wire, division.total / before)


class SparseRows(Channel):
    """Sparse gradients: every rank gets all rows, which add up where they coincide."""

    def travel(self, memory: BucketMemory[Any], division: Division) -> Travel:
        memory.put_rows((yield Gather(memory.rows(division.total))))


#: The largest sum is brought below 2^this; float16 ends at 2^16.
_TARGET_EXPONENT = 10
#: Powers of two that a float32 gradient can be multiplied by. What needs more is not scaled but
#: travels in the wide dtype.
_EXPONENT_RANGE = 100
#: The scale suits the largest sum of this many steps, as far as it is not more than 2^20 above
#: the last one, which would otherwise lose too many bits.
_STEPS_REMEMBERED = 8
_SPREAD = 20
#: The most steps in the wide dtype after one of several overflows in a row.
_STEPS_WIDE = 64
# `Largest` takes non-negative numbers, and 0 stands for "nothing but zeros".
_EXPONENT_CODE = 2000


class _ScaledFloat16(Channel):
    def __init__(self, dtype: str) -> None:
        self._wide = "float64" if dtype == "float64" else "float32"
        # Of the scale. None: to be learned from a step in the wide dtype.
        self._exponent: int | None = None
        self._sums: deque[int] = deque(maxlen=_STEPS_REMEMBERED)
        # Steps in the wide dtype: how many are left, how many the next overflow brings; and how
        # many in float16 have gone well since the last one.
        self._wide_left = 0
        self._wide_next = 1
        self._well = 0

    def travel(self, memory: BucketMemory[Any], division: Division) -> Travel:
        exponent = self._exponent
        peak = math.inf
        if exponent is not None:
            wire = memory.pack("float16", 2.0**exponent)
            yield Sum(wire)
            peak = (yield Peak(wire)) * 2.0**-exponent
            if math.isfinite(peak):
                memory.unpack(wire, division.total * 2.0**-exponent)
        overflowed = not math.isfinite(peak)
        if overflowed:
            peak = yield from self._travel_wide(memory, division)
            if not math.isfinite(peak):
                # An infinity that came in with the gradients: the loss scaler's to deal with.
                return
        # The ranks' sums may differ in the last bit, and with it at a power of two.
        code = yield Largest(_code(peak))
        if code:
            self._sums.append(code)
        if exponent is None:
            self._wide_left -= 1
        elif overflowed or not code:
            # Too large or too small for the scale, perhaps for this one time; where it goes on,
            # float16 is not tried as often.
            self._wide_left = self._wide_next
            self._wide_next = min(2 * self._wide_next, _STEPS_WIDE)
            self._well = 0
        else:
            self._well += 1
            if self._well == _STEPS_REMEMBERED:
                self._wide_next = 1
        if not code or self._wide_left > 0:
            self._exponent = None
        else:
            largest = max(known for known in self._sums if known <= code + _SPREAD)
            wanted = _TARGET_EXPONENT - (largest - _EXPONENT_CODE)
            self._exponent = wanted if abs(wanted) <= _EXPONENT_RANGE else None

    def _travel_wide(
        self, memory: BucketMemory[Any], division: Division
    ) -> Generator[Request, Any, float]:
        wire = memory.pack(self._wide, division.total, keep=False)
        yield Sum(wire)
        # At once, so that this memory is given back before the next bucket needs as much.
        peak: float = yield Peak(wire, at_once=True)
        memory.unpack(wire, 1.0)
        return peak / division.total


def _code(peak: float) -> int:
    """The exponent of the power of two above `peak`, as `Largest` takes it."""
    return math.frexp(peak)[1] + _EXPONENT_CODE if peak else 0
