"""Which gradients travel together: parameters are planned into contiguous buckets.

Many small collectives cost a negotiation each; one big one cannot start before the backward pass
has ended. Buckets of some tens of MB, in the order in which gradients become ready, are between
the two (Li et al., PyTorch Distributed, VLDB 2020, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from hvdkit.core.agreement import digest
from hvdkit.errors import UsageError

MB = 1_000_000

#: Bytes of gradients per bucket, and of the first bucket to become ready. The first is smaller, so
#: that the network is in use soon after the backward pass has begun.
BUCKET_BYTES = 25 * MB
FIRST_BUCKET_BYTES = 1 * MB


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter whose gradient is to be reduced.

    Attributes:
        name: unique among the parameters of one plan.
        shape: of the gradient.
        dtype: the framework's name for the element type, such as `float32`.
        itemsize: bytes per element.
        device: where the gradient lives. Only equality counts: two parameters with different
            devices never share a bucket, and what the device is called does not enter the digest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the gradient in bytes."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced by one collective.

    Attributes:
        index: its place in the plan; 0 is expected to be ready first.
        parameters: the indices of its parameters in the plan's `specs`.
        offsets: where each begins in the bucket, in elements.
        elements: length of the bucket, in elements.
        dtype: of all its gradients.
        device: of all its gradients.
    """

    index: int
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    dtype: str
    device: str


@dataclass(frozen=True)
class BucketPlan:
    """How the gradients of `specs` are laid out in `buckets`. `plan` makes one."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def bucket_of(self) -> tuple[int, ...]:
        """Parameter index -> index of the bucket that it is in."""
        home = {i: bucket.index for bucket in self.buckets for i in bucket.parameters}
        return tuple(home[i] for i in range(len(self.specs)))

    @cached_property
    def description(self) -> tuple[str, ...]:
        """One line per parameter, then one per bucket; what differs first tells most."""
        return (
            *(
                f"parameter {i} is {spec.name!r}, {spec.dtype} {list(spec.shape)}"
                for i, spec in enumerate(self.specs)
            ),
            *(f"bucket {b.index} holds parameters {list(b.parameters)}" for b in self.buckets),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `description`, hexadecimal."""
        return digest(self.description).hex()


def plan(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> BucketPlan:
    """Lay out the gradients of `specs` in buckets.

    Parameters are taken in reverse order, because a backward pass reaches the last layer first.
    A bucket holds one dtype and one device; a parameter larger than the limit has one for itself.

    Args:
        specs: in the order of the forward pass, the same on every rank.
        bucket_bytes: no bucket of several parameters is larger.
        first_bucket_bytes: the same, for the first bucket of each dtype and device.

    Raises:
        UsageError: a name appears twice, or a limit is below 1.
    """
    if min(bucket_bytes, first_bucket_bytes) < 1:
        raise UsageError(
            f"bucket sizes are {bucket_bytes} and {first_bucket_bytes} bytes: expected at least 1"
        )
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise UsageError(f"two parameters are named {spec.name!r}: names must be unique")
        seen.add(spec.name)

    closed: list[list[int]] = []
    filling: dict[tuple[str, str], list[int]] = {}
    size: dict[tuple[str, str], int] = {}
    limit: dict[tuple[str, str], int] = {}
    for i in reversed(range(len(specs))):
        key = (specs[i].dtype, specs[i].device)
        if key in filling and size[key] + specs[i].nbytes > limit[key]:
            closed.append(filling.pop(key))
            limit[key] = bucket_bytes
        limit.setdefault(key, first_bucket_bytes)
        size[key] = specs[i].nbytes + (size[key] if key in filling else 0)
        filling.setdefault(key, []).append(i)
    closed.extend(filling.values())
    return BucketPlan(
        tuple(specs), tuple(_bucket(index, specs, members) for index, members in enumerate(closed))
    )


def _bucket(index: int, specs: Sequence[ParameterSpec], members: Sequence[int]) -> Bucket:
    offsets = []
    elements = 0
    for i in members:
        offsets.append(elements)
        elements += specs[i].elements
    first = specs[members[0]]
    return Bucket(index, tuple(members), tuple(offsets), elements, first.dtype, first.device)
