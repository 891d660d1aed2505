"""The interface of wire formats: how one bucket is packed, reduced and unpacked.

A wire format writes the reduction of one bucket as a generator. The generator yields requests, such
as a collective, and receives their results:

    class BFloat16(WireFormat):
        name = "bf16"

        def reduce(self, memory, scaling):
            wire = memory.pack("bfloat16", 1.0)
            yield Sum(wire)
            memory.unpack(wire, scaling.total)

The synchronizer starts the generator when the bucket is full, runs the generators of all buckets
concurrently and combines requests where it can.

Every rank must make the same requests. Decide only by results of requests. Decide by an `AbsMax`
only whether it is finite, because the ranks' sums may differ in the last bit.

TensorFlow runs a generator once, while it traces a graph. Results and `state` are then scalars of
the graph: a format that depends on them computes with `self.ops` and yields a `Cond` instead of
using `if`. docs/synchronizer.md shows a complete format.
"""

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from hvdkit.core.backend import BucketMemory
from hvdkit.core.scalar_ops import PYTHON_OPS, Scalar, ScalarOps


@dataclass(frozen=True)
class Sum:
    """Request: add up a buffer in place over the ranks. The result is the buffer."""

    buffer: Any


@dataclass(frozen=True)
class Gather:
    """Request: gather the rows of a sparse gradient from all ranks. The result is all rows."""

    rows: Any


@dataclass(frozen=True)
class AbsMax:
    """Request: the absolute maximum of a buffer; not finite if an element is not finite.

    On an accelerator one copy to the host serves all buckets.

    Attributes:
        immediate: do not wait for the other buckets, so that the buffer is freed earlier.
    """

    buffer: Any
    immediate: bool = False


@dataclass(frozen=True)
class GlobalMax:
    """Request: the maximum of a value over the ranks. One collective serves all buckets.

    Attributes:
        value: this rank's value, an integer >= 0.
        deferred: the result may arrive as late as the bucket's next reduction. The gradients must
            be final before it.
    """

    value: Scalar
    deferred: bool = False


@dataclass(frozen=True)
class Cond:
    """Request: run one of two reductions. The result is the return value of that reduction.

    Attributes:
        condition: whether to run the first; the same on every rank.
        if_true: starts a reduction, which may make any request but `GlobalMax`.
        if_false: the same; returns as many scalars of the same dtypes.
    """

    condition: Scalar
    if_true: Callable[[], "BucketReduction"]
    if_false: Callable[[], "BucketReduction"]


Request = Sum | Gather | AbsMax | GlobalMax | Cond
BucketReduction = Generator[Request, Any, Any]


def run_conditions(reduction: BucketReduction) -> BucketReduction:
    """Return the same reduction with every `Cond` resolved as soon as it is requested."""
    result = None
    while True:
        try:
            request = reduction.send(result)
        except StopIteration as end:
            return end.value
        if isinstance(request, Cond):
            branch = request.if_true if request.condition else request.if_false
            result = yield from run_conditions(branch())
        else:
            result = yield request


#: Dtypes that round or flush values which are divided before the sum.
NARROW = ("float16", "bfloat16")


@dataclass(frozen=True)
class Scaling:
    """Factors that make the gradient for the optimizer out of a sum over ranks.

    Attributes:
        total: the product of all factors; 1 / (ranks x passes) for a mean.
        predivide: the divisor that the user wants applied before the sum, or None.
        ranks: the number of ranks whose values are added.
    """

    total: float
    predivide: float | None = None
    ranks: int = 1

    def split(self, dtype: str) -> tuple[float, float]:
        """Return the factors before and after the sum, for values of `dtype` on the wire.

        The whole factor comes before the sum, where packing applies it for free. float16 would
        lose small values by that and bfloat16 would round once more: their factor comes after the
        sum, as in Horovod.
        """
        if self.predivide is not None:
            return 1.0 / self.predivide, self.total * self.predivide
        return (1.0, self.total) if dtype in NARROW else (self.total, 1.0)


class WireFormat:
    """An encoding of gradients for the network, and this base class the encoding unchanged.

    Each bucket has its own copy, the bucket codec: attributes that `reduce` sets belong to the
    bucket.

    Attributes:
        name: the name in settings and errors; ranks compare it.
        tensor_by_tensor: whether every parameter has its own bucket.
        state: integers that the codec has learned from the steps before, the same on every rank. A
            graph and a checkpoint keep the state, and no other attribute.
        ops: operations on scalars of a running step.
    """

    name: str
    tensor_by_tensor = False
    state: tuple[Scalar, ...] = ()
    ops: ScalarOps = PYTHON_OPS

    def codec(self, dtype: str) -> "WireFormat":  # noqa: ARG002
        """Return a new codec for a bucket of gradients of `dtype`."""
        return copy.copy(self)

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Pack the bucket, make requests and unpack the result, once per step."""
        before, after = scaling.split(memory.dtype)
        buffer = memory.in_place(before)
        yield Sum(buffer)
        if after != 1.0:
            memory.scale(buffer, after)


class SparseRows(WireFormat):
    """Sparse gradients: every rank receives the rows of all ranks; equal indices add up."""

    name = "sparse rows"

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Gather the rows."""
        memory.set_rows((yield Gather(memory.rows(scaling.total))))
