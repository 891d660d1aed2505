"""The values of a rank that must be equal on all ranks, and a text about their differences.

An adapter lists the values: `Replicas`. `find_difference` computes a digest of each, and one small
allreduce compares them. If they differ, the ranks find out which tensors and elements differ, and
on which ranks.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import (
    error_text,
    first_difference,
    gather,
    gather_if_different,
    ranks_by_value,
)

# The largest difference that counts as rounding, relative to the largest element of the tensor.
# Ranks on different processors may round a step differently, by about 1e-7. Different initial
# values differ by about 1.
_ROUNDING = 1e-4
# Tensors that an error describes.
_SHOWN = 3


class Access(Protocol):
    """The access of an adapter to its tensors or variables."""

    def digests(self, values: Sequence[Any]) -> Sequence[int]:
        """Return a 64-bit digest of each value."""
        ...

    def read(self, value: Any) -> np.ndarray:
        """Return the bytes of a value as a one-dimensional uint8 array, maybe without a copy."""
        ...

    def write(self, value: Any, data: np.ndarray) -> None:
        """Set a value to the bytes of a result of `read`."""
        ...

    def elements(self, value: Any, data: np.ndarray) -> np.ndarray:
        """Return bytes of a value as elements: float64, int64, complex128 or bool.

        Args:
            value: the value.
            data: all its bytes, or the first ones.
        """
        ...


@dataclass(frozen=True)
class Item:
    """A value that must be equal on all ranks.

    Attributes:
        name: its name, for errors.
        line: a text that must be equal on all ranks, such as the name, dtype and shape.
        value: the value, for `Access`.
        trained: the number of elements, if it is a trained parameter of real floats; otherwise 0.
        written: called after `Access.write`.
    """

    name: str
    line: str
    value: Any
    trained: int = 0
    written: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Replicas:
    """The values and lines of this rank that must be equal on all ranks.

    Attributes:
        access: reads and writes the values.
        items: the values.
        options: further lines of text that must be equal, such as learning rates.
    """

    access: Access
    items: Sequence[Item]
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Difference:
    """A difference between ranks, the same on all of them.

    Attributes:
        text: sentences about it.
        far: whether values differ by more than rounding, or names or options differ.
        ranks_of: the index of an item that differs -> the ranks that differ, after the rank with
            which they were compared. Empty if names or options differ.
        is_known: False if ranks are in `join`, which take part in reductions only.
        repaired: whether all ranks now have the values of the majority.
    """

    text: str
    far: bool = True
    ranks_of: Mapping[int, Sequence[int]] = field(default_factory=dict)
    is_known: bool = True
    repaired: bool = False


def find_difference(
    collectives: Collectives,
    own: Replicas,
    when: str,
    before_repair: Callable[[Mapping[int, Sequence[int]]], None] | None = None,
    begun: bool = True,
) -> Difference | None:
    """Compare the replicas of all ranks; None if they are equal. A collective.

    If they are equal, this costs one small allreduce. Ranks in `join` are not compared.

    Args:
        collectives: the collectives of the ranks.
        own: what this rank has.
        when: when the ranks are compared, for texts.
        before_repair: called with `Difference.ranks_of` before the values of the majority are
            copied to all ranks; None to copy nothing.
        begun: whether this rank expects equal replicas. If no rank does, they count as equal.
    """
    digests = np.array(own.access.digests([item.value for item in own.items]), np.uint64)
    lines = [*own.options, *(item.line for item in own.items)]
    content = hashlib.sha256("\n".join(lines).encode() + digests.tobytes()).digest()
    mine = [lines, digests.tolist(), begun]
    told, unknown = gather_if_different(collectives, content, mine, "hvdkit.replicas")
    text = f"Ranks have different values {when}"
    if unknown:
        return Difference(f"{text}. {unknown}", is_known=False)
    if not any(begun for _, _, begun in told.values()):
        return None
    if difference := first_difference({rank: lines for rank, (lines, _, _) in told.items()}):
        subject = f"the parameters or the optimizer {when}"
        return Difference(f"ranks disagree about {subject}. {difference}")
    splits = _splits({rank: digests for rank, (_, digests, _) in told.items()})
    ranks_of = {split.index: [split.root, *split.others] for split in splits}
    majority = all(2 * len(split.others) < len(told) for split in splits)
    repairs = before_repair is not None and majority
    if before_repair is not None and repairs:
        before_repair(ranks_of)
    versions: list[_Version] = []
    for part in filter(None, (splits[:_SHOWN], splits[_SHOWN:])):
        versions += [_examine(collectives, own, split, repairs) for split in part]
        mine = [socket.gethostname(), versions]
        answers = gather(collectives, mine, "hvdkit.replicas.values")
        of_rank = {rank: [_Version(*v) for v in found] for rank, (_, found) in answers.items()}
        far = any(version.far for found in of_rank.values() for version in found)
        if far and not repairs:
            break  # The first tensors show the difference. A repair needs all of them.
    parts = []
    for k, split in enumerate(splits[:_SHOWN]):
        name = own.items[split.index].name
        parts += [
            f"{name} on rank {rank} (host {answers[rank][0]}) {of_rank[rank][k].text}"
            for rank in split.others[:_SHOWN]
        ]
        if (more := len(split.others) - _SHOWN) > 0:
            parts.append(f"{name} differs on {more} more ranks")
    text += f": {'; '.join(parts)}."
    if (more := len(splits) - _SHOWN) > 0:
        text += f" {more} more tensors differ."
    if not majority:
        text += " No majority of ranks agrees, so either value may be the wrong one."
    failures = {r: v.failure for r, found in of_rank.items() for v in found if v.failure}
    for rank, failure in failures.items():
        text += f" Rank {rank} cannot copy the values of the majority: {failure}."
    return Difference(text, far, ranks_of, repaired=repairs and not failures)


@dataclass(frozen=True)
class _Split:
    """An item of which ranks have different versions.

    Attributes:
        index: its index.
        root: the first rank of the largest group of ranks that have equal versions.
        others: the ranks whose versions differ from that of `root`.
    """

    index: int
    root: int
    others: Sequence[int]


class _Version(NamedTuple):
    """A rank's version of an item, compared with that of `_Split.root`.

    Attributes:
        text: a text about the difference; empty if the versions are equal.
        far: whether it is more than rounding.
        failure: why the value of the majority could not be copied; empty if it was.
    """

    text: str = ""
    far: bool = False
    failure: str = ""


def _splits(digests_of: Mapping[int, Sequence[int]]) -> list[_Split]:
    """Return the items whose digests differ between ranks.

    If several groups of ranks are the largest, take the one with the lowest rank.
    """
    found = []
    for index, digests in enumerate(zip(*digests_of.values(), strict=True)):
        ranks_of = ranks_by_value(dict(zip(digests_of, digests, strict=True)))
        if len(ranks_of) > 1:
            largest = max(ranks_of.values(), key=len)
            others = [rank for rank in digests_of if rank not in largest]
            found.append(_Split(index, largest[0], others))
    return found


def _examine(collectives: Collectives, own: Replicas, split: _Split, repairs: bool) -> _Version:
    """Compare one item with that of `split.root`, and repair it. A collective."""
    item = own.items[split.index]
    data = own.access.read(item.value)
    sent = collectives.broadcast(data.tobytes(), split.root, "hvdkit.replicas.tensor")
    if collectives.rank not in split.others:
        return _Version()
    theirs = np.frombuffer(sent, np.uint8)
    text = f"differs from rank {split.root}"
    try:
        mine, others = (own.access.elements(item.value, each) for each in (data, theirs))
        far, text = _compare(mine, others, split.root)
        if repairs:
            own.access.write(item.value, theirs)
            item.written()
    except Exception as error:
        # Any error: the other ranks wait in the next collective. PyTorch raises a RuntimeError
        # if elements of a tensor share memory.
        return _Version(text, True, error_text(error))
    return _Version(text, far)


def _compare(own: np.ndarray, theirs: np.ndarray, root: int) -> tuple[bool, str]:
    """Return whether values differ by more than rounding, and a text about the difference."""
    if own.size != theirs.size:
        return True, f"has {own.size:,} elements, and {theirs.size:,} on rank {root}"
    equal = (own == theirs) | ((own != own) & (theirs != theirs))
    where = np.flatnonzero(~equal)
    if not where.size:
        return False, f"has other bits than on rank {root} in elements that are zero or NaN"
    first = int(where[0])
    text = (
        f"differs in {where.size:,} of {own.size:,} elements from rank {root}: element {first:,} "
        f"is {own[first]}, and {theirs[first]} on rank {root}"
    )
    if own.dtype.kind not in "fc" or not np.all(
        np.isfinite(own[where]) & np.isfinite(theirs[where])
    ):
        return True, text
    if own.size == 1 and own[0] == np.rint(own[0]) and theirs[0] == np.rint(theirs[0]):
        # A counter, such as Adam's number of steps. A large one hides a difference of 1.
        return True, text
    largest = np.max(np.abs(theirs[np.isfinite(theirs)]), initial=0.0)
    return bool(np.max(np.abs(own[where] - theirs[where])) > _ROUNDING * largest), text
