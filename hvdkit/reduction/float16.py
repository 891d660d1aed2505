"""The float16 wire format. Each bucket has a scale, which is adapted to its largest sums."""

from dataclasses import dataclass
from typing import Any

from hvdkit.reduction.backend import BucketMemory
from hvdkit.reduction.scalar_ops import PYTHON_OPS, Scalar, ScalarOps
from hvdkit.reduction.wire_format import (
    NARROW,
    AbsMax,
    BucketReduction,
    Cond,
    GlobalMax,
    Scaling,
    Sum,
    WireFormat,
)
from hvdkit.runtime.counters import counters

#: The scale brings the largest sum below 2^10. The largest float16 number is just below 2^16.
_TARGET_EXPONENT = 10
#: Scales are 2^-100 to 2^100, so that float32 can hold the scaled gradients. A bucket that needs a
#: scale outside of this range is sent in float32.
_EXPONENT_RANGE = 100
#: The scale fits the largest sum of this many steps. Sums larger than 2^20 times the last sum are
#: ignored, because with their scale the last sum would lose too many bits.
_STEPS_REMEMBERED = 8
_SPREAD = 20
#: The most steps in float32 after several overflows in a row.
_STEPS_WIDE = 64
# Added to exponents: `GlobalMax` takes non-negative values, and 0 stands for "only zeros".
_EXPONENT_CODE = 2000


class Float16(WireFormat):
    """Send gradients as float16, scaled so that sums neither overflow nor become subnormal.

    Each bucket is multiplied by a power of two, so that the largest sum of the last 8 steps is
    between 2^9 and 2^10. The sum can become 64 times as large before it overflows. Values down to
    2^-33 times the sum are not lost. The first step is sent in float32 to learn the magnitude.

    If a float16 sum is not finite, the bucket is reduced again in float32 in the same step, and is
    sent in float32 in the next step. A bucket whose sum was all zeros is also sent in float32 in
    the next step. After repeated failures the bucket is sent in float32 for more steps, up to 64.
    This is the loss scaling of Micikevicius et al. (arXiv:1710.03740), for each bucket and only on
    the wire.

    With n ranks, |error of the mean| <= (n + 1) 2^-11 mean|x_i|, and 2^-25 / scale more for each
    of the n hops whose value is a subnormal float16 number.
    """

    name = "fp16"

    def codec(self, dtype: str, kind: str = "") -> WireFormat:  # noqa: ARG002
        """Return a codec with its own scale. Dtypes other than real floats are sent unchanged."""
        return _Codec(dtype) if dtype in ("float64", "float32", *NARROW) else WireFormat()


class _Codec(WireFormat):
    def __init__(self, dtype: str) -> None:
        self._wide = "float64" if dtype == "float64" else "float32"
        self.state = _Scale().values()

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        ops, scale = self.ops, _Scale.of(self.state)
        abs_max, overflowed = yield Cond(
            ops.less(0, scale.known),
            lambda: self._reduce_narrow(memory, scaling, scale.exponent),
            lambda: self._reduce_wide(memory, scaling),
        )
        # If the gradients themselves are not finite, the scale stays: the user's loss scaler
        # handles this step.
        finite = ops.is_finite(abs_max)
        nonzero = ops.logical_and(finite, ops.less(0.0, abs_max))
        # The ranks' sums may differ in the last bit, and near a power of two also in the exponent.
        code = yield GlobalMax(
            ops.where(nonzero, ops.exponent(abs_max) + _EXPONENT_CODE, 0), deferred=True
        )
        updated = scale.updated(code, overflowed, ops).values()
        self.state = tuple(
            ops.where(finite, new, old) for new, old in zip(updated, scale.values(), strict=True)
        )

    def _reduce_narrow(
        self, memory: BucketMemory[Any], scaling: Scaling, exponent: Scalar
    ) -> BucketReduction:
        scale = self.ops.power_of_two(exponent)
        wire = memory.pack("float16", scale)
        yield Sum(wire)
        abs_max = yield AbsMax(wire)

        def unpack() -> BucketReduction:
            yield from ()
            memory.unpack(wire, scaling.total / scale)
            return abs_max / scale, False

        def repeat() -> BucketReduction:
            if self.ops is PYTHON_OPS:  # otherwise a graph is being traced
                counters.overflows += 1
            wide_abs_max, _ = yield from self._reduce_wide(memory, scaling)
            return wide_abs_max, True

        return (yield Cond(self.ops.is_finite(abs_max), unpack, repeat))

    def _reduce_wide(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        wire = memory.pack(self._wide, scaling.total, keep=False)
        yield Sum(wire)
        # Immediate: the memory of `wire` is free before the next bucket allocates its own.
        abs_max = yield AbsMax(wire, immediate=True)
        memory.unpack(wire, 1.0)
        return abs_max / scaling.total, False


@dataclass(frozen=True)
class _Scale:
    """The state that a bucket's scale is computed from.

    Attributes:
        known: 1 if the next step can be sent in float16, otherwise 0.
        exponent: the scale is 2^exponent.
        wide_left: the number of steps that will still be sent in float32.
        wide_next: the number of steps in float32 after the next failure. A failure is an overflow,
            or a float16 sum that is all zeros.
        successes: the number of steps in float16 since the last failure.
        sums: codes of the largest sums of the last steps (exponent + _EXPONENT_CODE); 0 for none.
    """

    known: Scalar = 0
    exponent: Scalar = 0
    wide_left: Scalar = 0
    wide_next: Scalar = 1
    successes: Scalar = 0
    sums: tuple[Scalar, ...] = (0,) * _STEPS_REMEMBERED

    @classmethod
    def of(cls, values: tuple[Scalar, ...]) -> "_Scale":
        """Return the state from a result of `values`."""
        known, exponent, wide_left, wide_next, successes, *sums = values
        return cls(known, exponent, wide_left, wide_next, successes, tuple(sums))

    def values(self) -> tuple[Scalar, ...]:
        """Return all values in one tuple."""
        *others, sums = (getattr(self, name) for name in self.__dataclass_fields__)
        return (*others, *sums)

    def updated(self, code: Scalar, overflowed: Scalar, ops: ScalarOps) -> "_Scale":
        """Return the state after a step.

        Args:
            code: the code of the largest sum; 0 if the sum was all zeros.
            overflowed: whether the sum did not fit into float16.
            ops: operations on these scalars.
        """
        nonzero = ops.less(0, code)
        narrow = ops.less(0, self.known)
        fits = ops.logical_and(nonzero, ops.logical_not(overflowed))
        succeeded = ops.logical_and(narrow, fits)
        failed = ops.logical_and(narrow, ops.logical_not(fits))

        wide_left = ops.where(narrow, self.wide_left, self.wide_left - 1)
        wide_left = ops.where(failed, self.wide_next, wide_left)
        successes = ops.where(narrow, ops.where(succeeded, self.successes + 1, 0), self.successes)
        # Each failure doubles the next number of steps in float32, until float16 works again.
        doubled = ops.minimum(2 * self.wide_next, _STEPS_WIDE)
        wide_next = ops.where(failed, doubled, self.wide_next)
        recovered = ops.logical_and(
            succeeded, ops.logical_not(ops.less(successes, _STEPS_REMEMBERED))
        )
        wide_next = ops.where(recovered, 1, wide_next)

        sums = tuple(
            ops.where(nonzero, new, old)
            for new, old in zip((*self.sums[1:], code), self.sums, strict=True)
        )
        comparable = [ops.where(ops.less(code + _SPREAD, each), 0, each) for each in sums]
        exponent = _TARGET_EXPONENT + _EXPONENT_CODE - ops.largest(comparable)
        in_range = ops.logical_and(
            ops.less(-_EXPONENT_RANGE - 1, exponent), ops.less(exponent, _EXPONENT_RANGE + 1)
        )
        waited = ops.logical_not(ops.less(0, wide_left))
        known = ops.logical_and(ops.logical_and(nonzero, waited), in_range)
        return _Scale(
            ops.where(known, 1, 0),
            ops.where(known, exponent, 0),
            wide_left,
            wide_next,
            successes,
            sums,
        )
