"""Plan which gradients share a contiguous bucket.

Each collective costs a negotiation, and one large collective cannot start before the end of the
backward pass. Buckets of some tens of MB, in the order in which gradients become ready, are the
compromise (Li et al., PyTorch Distributed, VLDB 2020, section 3.2).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from hvdkit.core.consistency import digest
from hvdkit.errors import UsageError

MB = 1_000_000

#: Bytes of gradients per bucket. The first bucket is smaller, so that communication starts soon
#: after the beginning of the backward pass.
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
        device: the device of the gradient. Parameters with different devices never share a bucket.
            The name is not part of the digest.
        layout: the order of its elements in memory, which a bucket keeps; "" for row-major.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str
    layout: str = ""

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
        offsets: the offset of each gradient in the bucket, in elements.
        elements: length of the bucket, in elements.
        dtype: of all its gradients.
        device: of all its gradients.
        sparse_dims: for a bucket of one sparse gradient, which is gathered instead of summed, the
            number of its sparse dimensions; otherwise 0.
    """

    index: int
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    dtype: str
    device: str
    sparse_dims: int = 0


@dataclass(frozen=True)
class BucketPlan:
    """The layout of the gradients of `specs` in `buckets`; see `plan`."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def bucket_of(self) -> tuple[int, ...]:
        """Parameter index -> index of the bucket that it is in."""
        index_of = {i: bucket.index for bucket in self.buckets for i in bucket.parameters}
        return tuple(index_of[i] for i in range(len(self.specs)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan, hexadecimal."""
        buckets = [
            f"bucket {b.index}: {b.parameters}, sparse {b.sparse_dims}" for b in self.buckets
        ]
        return digest([*describe(self.specs), *buckets]).hex()


def describe(specs: Sequence[ParameterSpec]) -> list[str]:
    """Return one line per parameter, for ranks to compare."""
    return [
        f"gradient {i} is {spec.name!r}, {spec.dtype} {list(spec.shape)}"
        + (f" in memory as {spec.layout}" if spec.layout else "")
        for i, spec in enumerate(specs)
    ]


def describe_devices(specs: Sequence[ParameterSpec]) -> list[str]:
    """Return one line with the device of each parameter, for ranks to compare.

    Devices are numbered by their first use, because ranks use different ones.
    """
    numbers: dict[str, int] = {}
    return [
        f"gradient {i} is on {spec.device.partition(':')[0]} device number "
        f"{numbers.setdefault(spec.device, len(numbers))} of the model"
        for i, spec in enumerate(specs)
    ]


def check(specs: Sequence[ParameterSpec], bucket_bytes: int) -> None:
    """Check the arguments of `plan`.

    Raises:
        UsageError: a name appears twice, or the limit is below 1.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket size is {bucket_bytes} bytes: expected at least 1")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise UsageError(f"two parameters are named {spec.name!r}: names must be unique")
        seen.add(spec.name)


def uncounted(path: str) -> str:
    """Return the path of a variable without the numbers that Keras appends to layer names.

    Keras counts layers over all models, and a rank may have built one model more than others.
    """
    return re.sub(r"_\d+(?=/|$)", "", path)


def unique_names(names: Sequence[str]) -> list[str]:
    """Return `names`, with the index appended to each duplicate."""
    seen: set[str] = set()
    result = []
    for i, name in enumerate(names):
        result.append(f"{name} ({i})" if name in seen else name)
        seen.add(result[-1])
    return result


def even_groups(count: int, groups: int) -> list[list[int]]:
    """Divide the numbers below `count` into consecutive groups of about equal length.

    Raises:
        UsageError: `groups` is negative.
    """
    if groups < 0:
        raise UsageError(f"groups is {groups}: expected 0 or more")
    number = min(groups, count)
    bounds = [count * k // number for k in range(number + 1)] if number else []
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def plan(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    order: Sequence[int] | None = None,
    groups: Sequence[Sequence[int]] = (),
    sparse_dims: Mapping[int, int] | None = None,
) -> BucketPlan:
    """Lay out the gradients of `specs` in buckets.

    All gradients of a bucket have one dtype and one device. A parameter larger than the limit, and
    each sparse parameter, has its own bucket. The first bucket is smaller: `FIRST_BUCKET_BYTES`.

    Args:
        specs: in the order of the forward pass, the same on every rank.
        bucket_bytes: the largest bucket of several parameters.
        order: the indices of the parameters in the order in which their gradients become ready;
            parameters that are missing here are in no bucket. Default: all, reversed, because a
            backward pass reaches the last layer first.
        groups: for each group, the parameters that share one bucket of any size.
        sparse_dims: index of a parameter with sparse gradients -> number of sparse dimensions.

    Raises:
        UsageError: see `check`.
    """
    check(specs, bucket_bytes)
    sparse = sparse_dims or {}
    order = order if order is not None else range(len(specs) - 1, -1, -1)
    group_of = {i: number for number, group in enumerate(groups) for i in group}
    limits = [min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes]

    closed: list[list[int]] = []
    filling: dict[tuple[str, str, int | None], list[int]] = {}
    size: dict[tuple[str, str, int | None], int] = {}
    for i in order:
        if i in sparse:
            closed.append([i])
            continue
        group = group_of.get(i)
        key = (specs[i].dtype, specs[i].device, group)
        members = filling.setdefault(key, [])
        limit = limits[1] if closed else limits[0]
        if group is None and members and size[key] + specs[i].nbytes > limit:
            closed.append(members)
            members = filling[key] = []
        size[key] = specs[i].nbytes + (size[key] if members else 0)
        members.append(i)
    closed.extend(filling.values())
    return BucketPlan(
        tuple(specs),
        tuple(
            _bucket(index, specs, members, sparse.get(members[0], 0))
            for index, members in enumerate(closed)
        ),
    )


def _bucket(
    index: int, specs: Sequence[ParameterSpec], members: Sequence[int], sparse_dims: int
) -> Bucket:
    offsets = []
    elements = 0
    for i in members:
        offsets.append(elements)
        elements += specs[i].elements
    first = specs[members[0]]
    return Bucket(
        index, tuple(members), tuple(offsets), elements, first.dtype, first.device, sparse_dims
    )
