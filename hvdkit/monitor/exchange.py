"""Exchange the values of all ranks with one sum of integers.

`encode` makes the integers of a rank, and `decode` reads the values of every rank from the sum.

Each rank has a slot for each metric, with the bits of a float64. The slots of other ranks are
zeros, so the sum of the integers has the bits of every rank, also those of NaN and infinity. A rank
in `join` contributes only zeros, and so counts as absent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.agreement.collectives import Collectives

# The first slots of a rank, before those of its metrics: 1 (the rank takes part), whether it has a
# metric without a slot, and `step`, `steps` and `samples` of its `Contribution`.
_HEADER = 5


@dataclass(frozen=True)
class Contribution:
    """The part of one rank in a report.

    Attributes:
        step: the number of steps of the run.
        steps: the number of steps since the last report.
        samples: the number of samples in these steps.
        values: metric -> value.
    """

    step: int
    steps: int
    samples: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Decoded:
    """The sum of the contributions of all ranks.

    Attributes:
        present: rank -> step, steps, samples, of the ranks that are not in `join`.
        values: metric -> rank -> value.
    """

    present: Mapping[int, tuple[int, int, int]]
    values: Mapping[str, Mapping[int, float]]


def encode(own: Contribution, names: Sequence[str], place: int, ranks: int) -> list[int]:
    """Return the integers of this rank.

    Args:
        own: this rank's part.
        names: the metrics that have a slot, the same on all ranks.
        place: the index of this rank in `Collectives.ranks`.
        ranks: the number of ranks.
    """
    width = _HEADER + len(names)
    slots = [0] * (ranks * width)
    values = [own.values.get(name, 0.0) for name in names]
    bits = np.array(values, np.float64).view(np.int64).tolist()
    # Zeros stand for an absent metric, so 0.0 is sent as -0.0.
    negative_zero = -(1 << 63)
    encoded = [
        (number or negative_zero) if name in own.values else 0
        for name, number in zip(names, bits, strict=True)
    ]
    unknown = int(not own.values.keys() <= set(names))
    header = [1, unknown, own.step, own.steps, own.samples]
    slots[place * width : (place + 1) * width] = [*header, *encoded]
    return slots


def is_complete(summed: Sequence[int], names: Sequence[str]) -> bool:
    """Return whether every metric of all ranks had a slot. The arguments are those of `decode`."""
    return not any(summed[1 :: _HEADER + len(names)])


def decode(summed: Sequence[int], names: Sequence[str], ranks: Sequence[int]) -> Decoded:
    """Return the contributions of all ranks.

    Args:
        summed: the sums of the integers of `encode`.
        names: as for `encode`.
        ranks: the global ranks, in the order of their places.
    """
    slots = np.array(summed, np.int64).reshape(len(ranks), _HEADER + len(names))
    present = {
        rank: (int(row[2]), int(row[3]), int(row[4]))
        for rank, row in zip(ranks, slots, strict=True)
        if row[0]
    }
    bits = slots[:, _HEADER:]
    # Adding 0.0 makes 0.0 of -0.0.
    floats = np.ascontiguousarray(bits).view(np.float64) + 0.0
    values = {}
    for k, name in enumerate(names):
        having = {rank: float(floats[i, k]) for i, rank in enumerate(ranks) if bits[i, k]}
        if having:
            values[name] = having
    return Decoded(present, values)


# Bytes of names that a rank sends in one sum, more than the longest name needs.
_NAME_BYTES = 1024


def exchange_names(collectives: Collectives, own: Sequence[str], name: str) -> list[str]:
    """Return the names of all ranks, sorted. A collective, of sums only.

    Args:
        collectives: the collectives of the ranks.
        own: this rank's names, of at most 100 characters.
        name: the name of the collective.
    """
    ranks = list(collectives.ranks)
    place = ranks.index(collectives.rank)
    found: set[str] = set()
    left = list(own)
    while True:
        content = b""
        sent = 0
        while sent < len(left):
            longer = json.dumps(left[: sent + 1], ensure_ascii=False).encode()
            if len(longer) > _NAME_BYTES:
                break
            content, sent = longer, sent + 1
        left = left[sent:]
        slots = np.zeros((len(ranks), _NAME_BYTES // 8), np.int64)
        slots[place] = np.frombuffer(content.ljust(_NAME_BYTES, b"\0"), np.int64)
        *summed, more = collectives.sum([*slots.ravel().tolist(), int(bool(left))], name)
        for row in np.array(summed, np.int64).reshape(slots.shape):
            text = row.tobytes().rstrip(b"\0")
            found.update(json.loads(text) if text else ())
        if not more:
            return sorted(found)
