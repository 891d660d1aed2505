"""Wire formats: what a bucket of gradients travels as.

A format is written as the reduction of one bucket, a generator that asks for collectives and is
sent their results:

    def travel(self, memory, division):
        wire = memory.pack("bfloat16", 1.0)
        yield Sum(wire)
        memory.unpack(wire, division.total)

The synchronizer starts a bucket's reduction when the bucket is full, runs those of all buckets side
by side and batches what can be batched. Every rank must make the same requests: decide only by what
a request has answered, and by a `Peak` only whether it is finite, because ranks may hold sums that
differ in the last bit. docs/synchronizer.md shows how to add a format.

TensorFlow runs the generators once, while it traces a graph. What only a running step can
know, an answer or the `state`, is a symbol there: a format that decides by such a thing asks for a
`Choose`, and computes with `self.numbers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from hvdkit.core.backend import BucketMemory
from hvdkit.core.numbers import PYTHON, Number, Numbers, select
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
    buckets that ask at once.

    Attributes:
        value: this rank's.
        deferred: the answer is only needed in the bucket's next reduction. The gradients are
            final before it arrives.
    """

    value: Number
    deferred: bool = False


@dataclass(frozen=True)
class Choose:
    """Go on with one of two journeys, and answer what it returns.

    Attributes:
        condition: not 0 for the first; the same on every rank.
        first: makes a journey. It may ask for anything but `Largest`.
        second: the same; returns as many numbers as the first.
    """

    condition: Number
    first: Callable[[], "Travel"]
    second: Callable[[], "Travel"]


Request = Sum | Gather | Peak | Largest | Choose
Travel = Generator[Request, Any, Any]


def decided(travel: Travel) -> Travel:
    """The same journey, with every `Choose` taken as soon as it is asked for."""
    answer = None
    while True:
        try:
            request = travel.send(answer)
        except StopIteration as end:
            return end.value
        if isinstance(request, Choose):
            chosen = request.first if request.condition else request.second
            answer = yield from decided(chosen())
        else:
            answer = yield request


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
    """A wire format at work on one bucket.

    Attributes:
        state: what it has learned from step to step, as whole numbers, the same on every rank. A
            graph and a checkpoint keep this, and nothing else that a channel may remember.
        numbers: how to compute with what only a running step knows.
    """

    state: tuple[Number, ...] = ()
    numbers: Numbers = PYTHON

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


def chosen(
    compression: Any,
    compressors: Mapping[type, str],
    tensor_by_tensor: Callable[[Any], WireFormat],
    bfloat16: bool = True,
) -> WireFormat:
    """The wire format that a user's `compression` means.

    Args:
        compression: a format's name, one of `compressors`, a `WireFormat`, or an object with
            `compress` and `decompress` as Horovod's compressors have.
        compressors: Horovod's classes that stand for a format -> its name.
        tensor_by_tensor: makes a format of a compressor.
        bfloat16: whether Horovod knows it; if not, float32 travels in its place.

    Raises:
        UsageError: it is none of these.
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
        self.state = _ScaleState().numbers()

    def travel(self, memory: BucketMemory[Any], division: Division) -> Travel:
        state = _ScaleState.of(self.state)
        peak, overflowed = yield Choose(
            state.known,
            lambda: self._narrow(memory, division, state.exponent),
            lambda: self._widely(memory, division),
        )
        # An infinity that came in with the gradients is the loss scaler's to deal with.
        finite = self.numbers.is_finite(peak)
        some = finite * self.numbers.less(0.0, peak)
        # The ranks' sums may differ in the last bit, and with it at a power of two.
        exponent = some * (self.numbers.exponent(peak) + _EXPONENT_CODE)
        code = yield Largest(exponent, deferred=True)
        after = state.after(code, overflowed, self.numbers).numbers()
        self.state = tuple(
            select(finite, new, old) for new, old in zip(after, state.numbers(), strict=True)
        )

    def _narrow(self, memory: BucketMemory[Any], division: Division, exponent: Number) -> Travel:
        scale = self.numbers.power_of_two(exponent)
        wire = memory.pack("float16", scale)
        yield Sum(wire)
        peak = yield Peak(wire)

        def fits() -> Travel:
            memory.unpack(wire, division.total / scale)
            return peak / scale, 0
            yield

        def overflowed() -> Travel:
            peak, _ = yield from self._widely(memory, division)
            return peak, 1

        return (yield Choose(self.numbers.is_finite(peak), fits, overflowed))

    def _widely(self, memory: BucketMemory[Any], division: Division) -> Travel:
        wire = memory.pack(self._wide, division.total, keep=False)
        yield Sum(wire)
        # At once, so that this memory is given back before the next bucket needs as much.
        peak = yield Peak(wire, at_once=True)
        memory.unpack(wire, 1.0)
        return peak / division.total, 0


@dataclass(frozen=True)
class _ScaleState:
    """What a bucket's scale follows from.

    Attributes:
        known: 1 when the next step can travel in float16.
        exponent: of the scale, a power of two.
        wide_left: steps in the wide dtype that are still to come.
        wide_next: how many of them the next overflow brings.
        well: how many steps in float16 have gone well since the last overflow.
        sums: codes of the largest sums of the last steps; 0 where there was none.
    """

    known: Number = 0
    exponent: Number = 0
    wide_left: Number = 0
    wide_next: Number = 1
    well: Number = 0
    sums: tuple[Number, ...] = (0,) * _STEPS_REMEMBERED

    @classmethod
    def of(cls, numbers: tuple[Number, ...]) -> "_ScaleState":
        """What `numbers` gave."""
        known, exponent, wide_left, wide_next, well, *sums = numbers
        return cls(known, exponent, wide_left, wide_next, well, tuple(sums))

    def numbers(self) -> tuple[Number, ...]:
        """Everything, in one row."""
        return (
            self.known,
            self.exponent,
            self.wide_left,
            self.wide_next,
            self.well,
            *self.sums,
        )

    def after(self, code: Number, overflowed: Number, numbers: Numbers) -> "_ScaleState":
        """The state after a step.

        Args:
            code: of the largest sum.
            overflowed: 1 when it did not fit.
            numbers: to compute with.
        """
        some = numbers.less(0, code)
        shifted = (*self.sums[1:], code)
        sums = tuple(select(some, new, old) for new, old in zip(shifted, self.sums, strict=True))
        # Too large or too small for the scale, perhaps for this one time; where it goes on,
        # float16 is not tried as often.
        failed = self.known * (1 - (1 - overflowed) * some)
        good = self.known - failed
        wide_left = select(failed, self.wide_next, self.wide_left - (1 - self.known))
        well = good * (self.well + good) + (1 - self.known) * self.well
        twice = numbers.least(2 * self.wide_next, _STEPS_WIDE)
        wide_next = select(failed, twice, self.wide_next)
        forgiven = good * (1 - numbers.less(well, _STEPS_REMEMBERED))
        wide_next = select(forgiven, 1, wide_next)
        comparable = [select(numbers.less(code + _SPREAD, known), 0, known) for known in sums]
        wanted = _TARGET_EXPONENT + _EXPONENT_CODE - numbers.largest(comparable)
        in_range = numbers.less(-_EXPONENT_RANGE - 1, wanted) * numbers.less(
            wanted, _EXPONENT_RANGE + 1
        )
        known = some * (1 - numbers.less(0, wide_left)) * in_range
        return _ScaleState(known, known * wanted, wide_left, wide_next, well, sums)
