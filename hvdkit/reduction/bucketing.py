"""Bucketing: divide the gradients into contiguous buckets, each reduced by one collective.

Each collective costs a negotiation, so many small ones are slow. One large collective cannot start
before the backward pass has ended. Buckets of some tens of MB, in the order in which gradients
become ready, avoid both (Li et al., PyTorch Distributed, VLDB 2020, section 3.2).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from numbers import Real
from typing import Any

from hvdkit.agreement.consistency import digest
from hvdkit.agreement.names import without_model_names
from hvdkit.errors import UsageError

MB = 1_000_000

#: Bytes of gradients per bucket, and of the first bucket to become ready. The first bucket is
#: smaller, so that communication starts soon after the backward pass has begun.
BUCKET_BYTES = 25 * MB
FIRST_BUCKET_BYTES = 1 * MB

# Elements of which a share is a multiple.
_ALIGNED = 16


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter whose gradient is reduced.

    Attributes:
        name: the name, unique within a plan.
        shape: the gradient's shape.
        dtype: the framework's name for the element type, such as `float32`.
        itemsize: bytes per element.
        device: the gradient's device. Parameters with different devices never share a bucket. The
            device's name is not part of the plan's digest.
        layout: the order of the elements in memory; empty for row-major. A bucket keeps this order.
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
        index: the place in the plan; bucket 0 is expected to be ready first.
        parameters: the indices of the parameters in the plan's `specs`.
        offsets: the offset of each parameter in the bucket, in elements; in a divided bucket, in a
            section.
        elements: the length of the bucket, in elements.
        dtype: the element type of all gradients.
        device: the device of all gradients.
        kind: the kind of all gradients, see `WireFormat.kind`.
        sparse_dims: 0 for a dense bucket. Otherwise the bucket has one sparse gradient, which is
            gathered instead of summed, and this is the number of its sparse dimensions.
        sections: 1; or the number of ranks that each gradient is divided among. The bucket then has
            as many sections of equal length, one for each rank. A section has `share` elements of
            each gradient, the last of which may be padding.
    """

    index: int
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    dtype: str
    device: str
    kind: str = ""
    sparse_dims: int = 0
    sections: int = 1


def share(elements: int, ranks: int) -> int:
    """Return the number of elements of a tensor that each rank has, if ranks divide it.

    Rank r has the elements from r x share on, as far as there are any. Shares begin at multiples of
    64 bytes of float32, for the CPU's vector instructions.
    """
    return -(-elements // (ranks * _ALIGNED)) * _ALIGNED


@dataclass(frozen=True)
class BucketPlan:
    """The layout of the gradients of `specs` in `buckets`. `plan` returns one."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def bucket_of(self) -> tuple[int, ...]:
        """Parameter index -> index of its bucket. Each parameter must be in a bucket."""
        bucket_of = {i: bucket.index for bucket in self.buckets for i in bucket.parameters}
        return tuple(bucket_of[i] for i in range(len(self.specs)))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the plan, hexadecimal; equal plans have equal digests."""
        buckets = [
            f"bucket {b.index}: {b.parameters}, sparse {b.sparse_dims}"
            + (f", {b.sections} sections" if b.sections > 1 else "")
            for b in self.buckets
        ]
        return digest([*describe(self.specs), *buckets]).hex()


def describe(specs: Sequence[ParameterSpec]) -> list[str]:
    """Return one line per parameter, for ranks to compare."""
    return [
        f"gradient {i} is {without_model_names(spec.name)!r}, {spec.dtype} {list(spec.shape)}"
        + (f" in memory as {spec.layout}" if spec.layout else "")
        for i, spec in enumerate(specs)
    ]


def describe_devices(specs: Sequence[ParameterSpec]) -> list[str]:
    """Return one line per parameter with its device, for ranks to compare.

    Devices are numbered in the order of their first use, because ranks use different GPUs.
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
        UsageError: a name appears twice, or `bucket_bytes` is not a number >= 1.
    """
    check_bucket_bytes(bucket_bytes)
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise UsageError(f"two parameters are named {spec.name!r}: names must be unique")
        seen.add(spec.name)


def check_bucket_bytes(bucket_bytes: Any) -> None:
    """Check a user's argument `bucket_bytes`.

    Raises:
        UsageError: it is not a number >= 1.
    """
    is_number = isinstance(bucket_bytes, Real) and not isinstance(bucket_bytes, bool)
    if not is_number or not bucket_bytes >= 1:
        raise UsageError(f"bucket_bytes is {bucket_bytes!r}: expected a number of bytes >= 1")


def check_groups(
    groups: Any, members: str, identity: Callable[[Any], int] = id, name: Callable[[Any], Any] = str
) -> None:
    """Check a user's argument `groups`.

    Args:
        groups: the argument.
        members: the plural word for a member of a group, for errors.
        identity: returns the same number for two objects that stand for one parameter.
        name: returns the name of a member, for errors.

    Raises:
        UsageError: `groups` is invalid: expected a number >= 0, or lists in which no member occurs
            twice.
    """
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise UsageError(f"groups is {groups}: expected 0 or more")
        return
    if not isinstance(groups, Sequence) or not all(isinstance(g, list | tuple) for g in groups):
        raise UsageError(
            f"groups is {groups!r}: expected a number of buckets, or a list of lists of {members}"
        )
    seen: set[int] = set()
    for group in groups:
        for member in group:
            if identity(member) in seen:
                raise UsageError(
                    f"groups contains {name(member)!r} twice: expected each of the {members} at "
                    f"most once"
                )
            seen.add(identity(member))


def even_groups(count: int, groups: int) -> list[list[int]]:
    """Divide the numbers below `count` into `groups` ranges of about equal length."""
    groups = min(groups, count)
    return [list(range(count * k // groups, count * (k + 1) // groups)) for k in range(groups)]


def plan(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    order: Sequence[int] | None = None,
    groups: Sequence[Sequence[int]] = (),
    sparse_dims: Mapping[int, int] | None = None,
    kind: Callable[[ParameterSpec], str] = lambda _: "",
    sections: int = 1,
) -> BucketPlan:
    """Assign the gradients of `specs` to buckets.

    A bucket has one dtype, one device and one kind. A parameter larger than `bucket_bytes` has its
    own bucket, and so has each sparse parameter. The first bucket is smaller
    (`FIRST_BUCKET_BYTES`).

    Args:
        specs: the parameters in the order of the forward pass, the same on every rank.
        bucket_bytes: the largest size of a bucket of several parameters.
        order: the parameters in the order in which their gradients become ready. A parameter that
            is not in `order` is in no bucket. Default: all parameters, reversed, because a backward
            pass begins with the last layer.
        groups: sets of parameters. Each set has its own bucket of any size, or several if its
            dtypes, devices or kinds differ.
        sparse_dims: parameters with sparse gradients -> the number of sparse dimensions.
        kind: returns the kind of a parameter's gradient, see `WireFormat.kind`.
        sections: see `Bucket.sections`; a bucket of a sparse gradient is not divided.

    Raises:
        UsageError: see `check`.
    """
    check(specs, bucket_bytes)
    sparse = sparse_dims or {}
    order = order if order is not None else range(len(specs) - 1, -1, -1)
    group_of = {i: number for number, group in enumerate(groups) for i in group}
    limits = [min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes]

    closed: list[list[int]] = []
    kinds = [kind(spec) for spec in specs]
    filling: dict[tuple[str, str, str, int | None], list[int]] = {}
    size: dict[tuple[str, str, str, int | None], int] = {}
    for i in order:
        if i in sparse:
            closed.append([i])
            continue
        group = group_of.get(i)
        key = (specs[i].dtype, specs[i].device, kinds[i], group)
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
            _bucket(index, specs, members, kinds[members[0]], sparse.get(members[0], 0), sections)
            for index, members in enumerate(closed)
        ),
    )


def _bucket(
    index: int,
    specs: Sequence[ParameterSpec],
    members: Sequence[int],
    kind: str,
    sparse_dims: int,
    sections: int,
) -> Bucket:
    sections = 1 if sparse_dims else sections
    offsets = []
    elements = 0
    for i in members:
        offsets.append(elements)
        elements += specs[i].elements if sections == 1 else share(specs[i].elements, sections)
    first = specs[members[0]]
    return Bucket(
        index,
        tuple(members),
        tuple(offsets),
        elements * sections,
        first.dtype,
        first.device,
        kind,
        sparse_dims,
        sections,
    )
