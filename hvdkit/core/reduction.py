"""The settings of a reduction, and the buckets of gradients that all ranks agree on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.core import bucketing
from hvdkit.core.agreement import check_agreement, digest
from hvdkit.core.bucketing import BucketPlan, ParameterSpec
from hvdkit.core.collectives import Collectives
from hvdkit.core.compression import Channel, SparseRows, WireFormat

#: In the place of a number of sparse dimensions: the rank has no gradient.
ABSENT = -1

# Two models alike (a GAN's twins) have equal digests, and both may have buckets in flight. Their
# names must differ, so every plan gets a number when its ranks agree.
_next_number = 0


@dataclass(frozen=True)
class Reduction:
    """The settings of a reduction of gradients; the same on every rank.

    Attributes:
        format: what they travel as.
        average: divide the sum by the number of ranks.
        predivide: of an average's division, what is divided by before the sum; None: as suits
            the format.
        passes: backward passes per step that are added up. A gradient is ready when it has
            arrived that often.
        bucket_bytes: the largest bucket of several gradients.
        groups: see `bucketing.plan`.
        sparse_as_dense: reduce sparse gradients in buckets.
        find_unused: leave parameters without a gradient that no rank has used.
    """

    format: WireFormat
    average: bool = True
    predivide: float | None = None
    passes: int = 1
    bucket_bytes: int = bucketing.BUCKET_BYTES
    groups: Sequence[Sequence[int]] = ()
    sparse_as_dense: bool = False
    find_unused: bool = False

    def describe(self) -> list[str]:
        """One line per setting, for ranks to compare."""
        return [
            f"compression: {self.format.name}",
            f"op: {'average' if self.average else 'sum'}",
            f"gradient_predivide_factor: {self.predivide or 'as suits the format'}",
            f"backward passes per step: {self.passes}",
            f"bucket_bytes: {self.bucket_bytes}",
            f"groups: {[list(group) for group in self.groups]}",
            f"sparse_as_dense: {self.sparse_as_dense}",
            f"find_unused_parameters: {self.find_unused}",
        ]


@dataclass(frozen=True)
class ReductionState:
    """What a checkpoint keeps of how gradients are reduced: without it sums round differently.

    Attributes:
        gradients: tells apart gradients of other names, shapes and dtypes, and other settings.
        order: of the parameters, from which the plan follows.
        channels: each bucket's `Channel.state`.
    """

    gradients: str
    order: tuple[int, ...]
    channels: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class AgreedBuckets:
    """What the ranks have agreed on.

    Attributes:
        plan: the buckets.
        name: what the names of their collectives begin with; like no other plan's.
        channels: the wire format at work, for each bucket.
        gradients: as `ReductionState.gradients`.
        order: of the parameters, from which the plan follows; None: the usual one.
    """

    plan: BucketPlan
    name: str
    channels: Sequence[Channel]
    gradients: str
    order: Sequence[int] | None

    @property
    def state(self) -> ReductionState:
        """What to keep of it, between two steps."""
        return ReductionState(
            self.gradients,
            tuple(self.order or ()),
            tuple(tuple(int(n) for n in channel.state) for channel in self.channels),
        )


def agree_on_buckets(
    collectives: Collectives,
    specs: Sequence[ParameterSpec],
    reduction: Reduction,
    window: int,
    sparse_dims: Sequence[int],
    order: Callable[[], Sequence[int]] | None = None,
    context: Sequence[str] = (),
    resumed: ReductionState | None = None,
) -> AgreedBuckets:
    """Compare what the ranks mean to reduce, and plan it. A collective.

    Args:
        collectives: of the ranks.
        specs: of the gradients.
        reduction: what to do with them.
        window: passes of an accumulation window.
        sparse_dims: for each gradient, its sparse dimensions on this rank, 0 where it is dense, or
            `ABSENT`. A gradient that is absent on all ranks is in no bucket.
        order: asks for the order in which gradients become ready, when the rest agrees; a
            collective, too. Default: see `bucketing.plan`.
        context: further lines that must be the same on every rank, for the errors' sake first.
        resumed: what to go on from, if it is of the same gradients.

    Raises:
        RanksDisagree: on every rank, when they mean different things.
    """
    global _next_number
    settings = [*context, *reduction.describe(), f"accumulation_steps: {window}"]
    described = bucketing.describe(specs)
    gradients = digest([*settings, *described]).hex()
    if resumed is not None and resumed.gradients != gradients:
        resumed = None
    devices = bucketing.describe_devices(specs)
    count = f"{len(specs)} gradients in all"
    lines = [*settings, f"resumes from: {resumed}", *described, count, *devices]
    check_agreement(collectives, lines, "what the optimizer reduces")
    # Ranks may have made different numbers of other optimizers; the largest count is free on all
    # of them.
    number, *dims = collectives.max([_next_number, *sparse_dims], "hvdkit.agreement.number")
    _next_number = number + 1
    if resumed is not None and resumed.order:
        agreed_order: Sequence[int] | None = resumed.order
    else:
        agreed_order = order() if order else None
    absent = {i for i, number_of_dims in enumerate(dims) if number_of_dims == ABSENT}
    ready = agreed_order if agreed_order is not None else range(len(specs) - 1, -1, -1)
    plan = bucketing.plan(
        specs,
        reduction.bucket_bytes,
        order=[i for i in ready if i not in absent],
        groups=[[i] for i in range(len(specs))]
        if reduction.format.tensor_by_tensor
        else reduction.groups,
        sparse_dims={i: count for i, count in enumerate(dims) if count > 0},
    )
    channels = [
        SparseRows() if bucket.sparse_dims else reduction.format.channel(bucket.dtype)
        for bucket in plan.buckets
    ]
    if resumed is not None and len(resumed.channels) == len(channels):
        for channel, state in zip(channels, resumed.channels, strict=True):
            if len(state) == len(channel.state):
                channel.state = state
    # The engine never fuses names with "hvdkit." in them, because buckets are large already.
    prefix = "hvdkit_tensors" if reduction.format.tensor_by_tensor else "hvdkit"
    name = f"{prefix}.{plan.digest[:16]}.{number}"
    return AgreedBuckets(plan, name, channels, gradients, agreed_order)
