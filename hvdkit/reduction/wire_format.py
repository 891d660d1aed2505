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

Every rank must make the same requests. So the requests of a format may depend only on results that
are equal on all ranks: the result of `GlobalMax`, and whether the `AbsMax` of a reduced buffer is
finite. The value of that `AbsMax` may differ between ranks in the last bit, because MPI does not
promise equal sums.

TensorFlow runs a generator once, while it traces a graph. Results and `state` are then scalars of
the graph. A format that depends on them must compute with `self.ops`, and must yield a `Cond`
instead of using `if`. docs/synchronizer.md shows a complete format.

What a format does with tensors is in `torch/reduction/memory.py` and
`tensorflow/reduction/backend.py`. In TensorFlow, a buffer is a `Wire`, which may have a factor and
padding. To add a request: its class here; `_COLLECTIVES`, `_start_request` and `_payload_bytes` of
`synchronizer.py`; `Backend`; and `bucket_reduction.py` of TensorFlow.
"""

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from hvdkit.reduction.backend import BucketMemory
from hvdkit.reduction.bucketing import ParameterSpec
from hvdkit.reduction.scalar_ops import PYTHON_OPS, Scalar, ScalarOps


@dataclass(frozen=True)
class Sum:
    """Request: add up a buffer in place over the ranks. The result is the buffer.

    Attributes:
        factor: a factor for the sum. hvdkit's engine multiplies while it adds, in the same pass.
    """

    buffer: Any
    factor: float = 1.0


@dataclass(frozen=True)
class BlockSum:
    """Request: like `Sum` of a float32 buffer, sent as blocks of 8-bit integers (`Int8`)."""

    buffer: Any
    factor: float = 1.0


@dataclass(frozen=True)
class Gather:
    """Request: gather a tensor, or a pair of tensors, from all ranks. The result is all rows.

    For the rows of sparse gradients and their indices.
    """

    rows: Any


@dataclass(frozen=True)
class AbsMax:
    """Request: the absolute maximum of a buffer; not finite if an element is not finite.

    On an accelerator, the results of all buckets are copied to the host together.

    Attributes:
        immediate: do not wait for the other buckets, so that the buffer is freed earlier.
    """

    buffer: Any
    immediate: bool = False


@dataclass(frozen=True)
class GlobalMax:
    """Request: the maximum of a value over the ranks. All buckets share one collective.

    Attributes:
        value: this rank's value, an integer >= 0.
        deferred: the result may arrive as late as the bucket's next reduction. The bucket must be
            unpacked before this request.
    """

    value: Scalar
    deferred: bool = False


@dataclass(frozen=True)
class Cond:
    """Request: run one of two reductions. The result is the return value of that reduction.

    Attributes:
        condition: whether to run `if_true`; the same on every rank.
        if_true: starts a reduction, which may make any request except `GlobalMax`.
        if_false: like `if_true`. Both must return the same number of scalars, of the same dtypes.
    """

    condition: Scalar
    if_true: Callable[[], "BucketReduction"]
    if_false: Callable[[], "BucketReduction"]


Request = Sum | BlockSum | Gather | AbsMax | GlobalMax | Cond
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


#: Dtypes of real floating-point numbers.
NARROW = ("float16", "bfloat16")
WIDE = ("float64", "float32")


@dataclass(frozen=True)
class Scaling:
    """Factors that turn a sum over ranks into the gradient for the optimizer.

    Attributes:
        total: the product of all factors; 1 / (ranks x passes) for a mean.
        predivide: the divisor to apply before the sum; None for 1.
        ranks: the number of ranks whose values are added.
    """

    total: float
    predivide: float | None = None
    ranks: int = 1

    @property
    def before(self) -> float:
        """The factor before the sum; 1 unless the user has set a divisor, as in Horovod.

        A division before the sum would lose small values in float16, and round once more in
        bfloat16.
        """
        return 1.0 if self.predivide is None else 1.0 / self.predivide

    @property
    def after(self) -> float:
        """The factor after the sum."""
        return self.total / self.before


class WireFormat:
    """An encoding of gradients for the network. This base class sends them unchanged.

    Each bucket has its own copy, the bucket codec: attributes that `reduce` sets belong to the
    bucket.

    Attributes:
        name: the name in settings and errors; ranks compare it.
        tensor_by_tensor: whether every parameter has its own bucket.
        state: integers that the codec has learned in earlier steps, the same on every rank. A
            graph and a checkpoint store the state, but no other attribute.
        ops: operations on scalars of a running step.
    """

    name: str
    tensor_by_tensor = False
    state: tuple[Scalar, ...] = ()
    ops: ScalarOps = PYTHON_OPS

    def kind(self, spec: ParameterSpec) -> str:  # noqa: ARG002
        """Return the kind of a gradient: any text. Gradients of two kinds never share a bucket."""
        return ""

    def codec(self, dtype: str, kind: str = "") -> "WireFormat":  # noqa: ARG002
        """Return a new codec for a bucket of gradients of one `dtype` and one `kind`."""
        return copy.copy(self)

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Pack the bucket, make requests and unpack the result, once per step."""
        yield Sum(memory.in_place(scaling.before), scaling.after)


class SparseRows(WireFormat):
    """Send sparse gradients: every rank receives the rows of all ranks.

    Rows with the same index are added.
    """

    name = "sparse rows"

    def reduce(self, memory: BucketMemory[Any], scaling: Scaling) -> BucketReduction:
        """Gather the rows."""
        memory.set_rows((yield Gather(memory.rows(scaling.total))))
