"""The settings of a reduction, and the plan of its buckets, which is the same on all ranks.

The synchronizer and the adapter for TensorFlow call `plan_buckets` before the first reduction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import Any

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import check_consistency, digest
from hvdkit.errors import UsageError
from hvdkit.reduction import bucketing
from hvdkit.reduction.bucketing import Bucket, BucketPlan, ParameterSpec
from hvdkit.reduction.wire_format import SparseRows, WireFormat
from hvdkit.runtime import loaded_modules
from hvdkit.runtime.counters import counters

#: Stands for a number of sparse dimensions if the rank has no gradient.
ABSENT = -1

# Two equal models have equal digests, and both may have buckets in flight. The names of their
# collectives must differ, so every plan gets a number when its ranks agree.
_next_number = 0


@dataclass(frozen=True)
class Reduction:
    """The settings of a reduction of gradients; the same on every rank.

    Attributes:
        format: the wire format.
        average: divide the sum by the number of ranks.
        predivide: the number to divide by before the sum; the rest of the average's divisor is
            applied after the sum. None lets the wire format decide.
        passes: the user's `backward_passes_per_step`.
        bucket_bytes: the largest size of a bucket of several gradients, in bytes.
        groups: see `bucketing.plan`.
        sparse_as_dense: reduce sparse gradients in buckets.
        find_unused: leave a parameter without a gradient if no rank has used it.
        sections: the number of ranks that each reduced gradient is divided among; 1 if each rank
            gets all of it.

    Raises:
        UsageError: `bucket_bytes` is not a number >= 1.
    """

    format: WireFormat
    average: bool = True
    predivide: float | None = None
    passes: int = 1
    bucket_bytes: int = bucketing.BUCKET_BYTES
    groups: Sequence[Sequence[int]] = ()
    sparse_as_dense: bool = False
    find_unused: bool = False
    sections: int = 1

    def __post_init__(self) -> None:
        bucketing.check_bucket_bytes(self.bucket_bytes)

    def describe(self) -> list[str]:
        """Return one line per setting, for ranks to compare."""
        return [
            f"compression: {self.format.name}",
            f"op: {'average' if self.average else 'sum'}",
            f"gradient_predivide_factor: {self.predivide or 'chosen by the format'}",
            f"backward passes per step: {self.passes}",
            f"bucket_bytes: {self.bucket_bytes}",
            f"groups: {[list(group) for group in self.groups]}",
            f"sparse_as_dense: {self.sparse_as_dense}",
            f"find_unused_parameters: {self.find_unused}",
        ]


def predivide(factor: Any, average: bool) -> float | None:
    """Return `Reduction.predivide` for a user's argument `gradient_predivide_factor`.

    Args:
        factor: the argument; 1.0, the default, lets the wire format decide.
        average: whether the gradients are averaged.

    Raises:
        UsageError: the factor is not a finite number above 0, or the gradients are not averaged.
    """
    if not isinstance(factor, Real) or not 0 < float(factor) < inf:
        raise UsageError(
            f"gradient_predivide_factor is {factor!r}: expected a finite number above 0"
        )
    if factor == 1.0:
        return None
    if not average:
        raise UsageError(
            f"gradient_predivide_factor is {factor}, and op is not hvd.Average. The factor splits "
            f"the division of an average: pass op=hvd.Average, or omit the factor"
        )
    return float(factor)


@dataclass(frozen=True)
class ReductionState:
    """The state of a reduction that a checkpoint needs to resume with bit-identical sums.

    Attributes:
        gradients: a digest of the settings and of the gradients' names, shapes and dtypes.
        order: the order of the parameters, which determines the plan.
        codecs: the `WireFormat.state` of each bucket's codec.
    """

    gradients: str
    order: tuple[int, ...]
    codecs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlannedBuckets:
    """The buckets that the ranks have agreed on.

    Attributes:
        plan: the buckets.
        name: the prefix of their collectives' names, unique to this plan.
        codecs: each bucket's copy of the wire format.
        gradients: see `ReductionState.gradients`.
        order: see `ReductionState.order`; None for the default order.
    """

    plan: BucketPlan
    name: str
    codecs: Sequence[WireFormat]
    gradients: str
    order: Sequence[int] | None

    @property
    def state(self) -> ReductionState:
        """The state to keep in a checkpoint, between two steps."""
        return ReductionState(
            self.gradients,
            tuple(self.order or ()),
            tuple(tuple(int(n) for n in codec.state) for codec in self.codecs),
        )


def plan_buckets(
    collectives: Collectives,
    specs: Sequence[ParameterSpec],
    reduction: Reduction,
    window: int,
    sparse_dims: Sequence[int],
    order: Callable[[], Sequence[int]] | None = None,
    context: Sequence[str] = (),
    resumed: ReductionState | None = None,
) -> PlannedBuckets:
    """Compare the gradients and settings of all ranks, and plan the buckets. A collective.

    Args:
        collectives: the collectives of the ranks.
        specs: the gradients.
        reduction: the settings.
        window: passes per accumulation window; 1 if the gradients of passes are not averaged.
        sparse_dims: for each gradient, the number of its sparse dimensions on this rank, 0 for a
            dense gradient, or `ABSENT`. A gradient that is absent on all ranks is in no bucket.
        order: a collective that returns the order in which gradients become ready. Called after
            the other settings have been compared. Default: see `bucketing.plan`.
        context: further lines that must be the same on every rank; errors show them first.
        resumed: the state to restore; ignored if it is a state of other gradients.

    Raises:
        RankMismatchError: on every rank, if gradients or settings differ.
    """
    global _next_number
    settings = [*context, *reduction.describe(), f"accumulation_steps: {window}"]
    kinds = [reduction.format.kind(spec) for spec in specs]
    described = [
        f"{line}, sent as {kind}" if kind else line
        for line, kind in zip(bucketing.describe(specs), kinds, strict=True)
    ]
    gradients = digest([*settings, *described]).hex()
    if resumed is not None and resumed.gradients != gradients:
        resumed = None
    devices = bucketing.describe_devices(specs)
    count = f"{len(specs)} gradients in all"
    lines = [*settings, f"resumes from: {resumed}", *described, count, *devices]
    check_consistency(collectives, lines, "what the optimizer reduces")
    # Tell the agent again which modules are loaded, for the spares: models and optimizers may
    # have loaded more since `init`.
    loaded_modules.report(collectives.rank)
    # Ranks may have made different numbers of plans. No rank has used the largest number yet.
    number, *dims = collectives.max([_next_number, *sparse_dims], "hvdkit.agreement.number")
    _next_number = number + 1
    if resumed is not None and resumed.order:
        common_order: Sequence[int] | None = resumed.order
    else:
        common_order = order() if order else None
    absent = {i for i, number_of_dims in enumerate(dims) if number_of_dims == ABSENT}
    ready = common_order if common_order is not None else range(len(specs) - 1, -1, -1)
    plan = bucketing.plan(
        specs,
        reduction.bucket_bytes,
        # A single rank has nothing to send.
        order=[] if collectives.single_rank else [i for i in ready if i not in absent],
        groups=[[i] for i in range(len(specs))]
        if reduction.format.tensor_by_tensor
        else reduction.groups,
        sparse_dims={i: count for i, count in enumerate(dims) if count > 0},
        kind=reduction.format.kind,
        sections=reduction.sections,
    )
    counters.wire_formats.add(reduction.format.name)
    codecs = [
        SparseRows() if bucket.sparse_dims else reduction.format.codec(bucket.dtype, bucket.kind)
        for bucket in plan.buckets
    ]
    if resumed is not None and len(resumed.codecs) == len(codecs):
        for codec, state in zip(codecs, resumed.codecs, strict=True):
            if len(state) == len(codec.state):
                codec.state = state
    # The engine never fuses names that begin with "hvdkit.", because buckets are large already.
    prefix = "hvdkit_tensors" if reduction.format.tensor_by_tensor else "hvdkit"
    name = f"{prefix}.{plan.digest[:16]}.{number}"
    for bucket in plan.buckets:
        collectives.describe(f"{name}.{bucket.index}", _label(bucket, plan, specs))
    return PlannedBuckets(plan, name, codecs, gradients, common_order)


def _label(bucket: Bucket, plan: BucketPlan, specs: Sequence[ParameterSpec]) -> str:
    """Return a text for a bucket, which names its first and last gradient."""
    names = [specs[i].name for i in bucket.parameters]
    size = sum(specs[i].nbytes for i in bucket.parameters)
    text = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size:,} bytes"
    shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"bucket {bucket.index + 1} of {len(plan.buckets)} ({shown}; {text})"
