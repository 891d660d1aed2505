"""Compare the values of variables between ranks.

Mean gradients keep equal models equal, and different ones different: a forgotten broadcast trains
one model per rank without any error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from hvdkit.core.agreement import RanksDisagree, are_equal, texts_by_rank
from hvdkit.core.collectives import Collectives

# Relative to the largest element of a variable. Ranks on processors of different kinds may round a
# step differently, by about 1e-7; other initial values differ by about 1.
_TOLERANCE = 1e-4
# Elements of a variable that an error shows.
_SHOWN = 3

#: Before which reductions of a loop variables are compared, counted from 0. Not before the first,
#: because Horovod's scripts broadcast after it. Where they differ, once more before the later ones,
#: and only the last is an error: a loop may reduce several times before its first update.
COMPARED = (1, 2, 4, 8, 16)
#: Nothing is compared any more.
DONE = COMPARED[-1] + 1


@dataclass(frozen=True)
class Value:
    """A variable's value on this rank.

    Attributes:
        name: of the variable, for errors.
        digest: `digest_of` its bytes.
        read: returns its elements, of any shape; numbers of any dtype.
    """

    name: str
    digest: int
    read: Callable[[], np.ndarray]

    def elements(self) -> np.ndarray:
        """Return the elements, of one dimension; float64, a complex number as two."""
        array = self.read().reshape(-1)
        parts = array.view(array.real.dtype) if np.iscomplexobj(array) else array
        return parts.astype(np.float64)


def digest_of(content: np.ndarray) -> int:
    """Return 64 bits that tell the bytes of one array from those of another."""
    return int(xxhash.xxh64_intdigest(np.ascontiguousarray(content).tobytes()))


def first_difference(group: Collectives, values: Sequence[Value]) -> tuple[str, str] | None:
    """Return the name of the first variable that differs, and who has what. A collective.

    Costs one small allreduce while the bytes are equal.

    Args:
        group: of the ranks to compare.
        values: of the same variables in the same order on every rank.

    Returns:
        None if all are equal, or differ no more than by rounding.

    Raises:
        RanksDisagree: on every rank: bytes differ, and a rank that has called `join` cannot tell
            its own.
    """
    digests = ",".join(str(value.digest) for value in values)
    if are_equal(group, xxhash.xxh64_intdigest(digests.encode()) & 0xFFFFFF, "hvdkit.values"):
        return None
    (present,) = group.sum([1], "hvdkit.values.present")
    if present < len(group.ranks):
        # They enter nothing but reductions.
        raise RanksDisagree(
            f"ranks have different values of variables. Of which cannot be told, because "
            f"{len(group.ranks) - present} of {len(group.ranks)} ranks have called join() already."
        )
    differ = group.max([int(_differs(group, value)) for value in values], "hvdkit.values.differ")
    if not any(differ):
        return None
    value = values[differ.index(1)]
    told = texts_by_rank(group, _first_elements(value), "hvdkit.values.told")
    return value.name, "; ".join(told)


def count_reduction(
    group: Collectives, counted: int, values: Callable[[], Sequence[Value]], advice: str
) -> int:
    """Count a reduction of a loop; compare variables before it if it is time to. A collective.

    Args:
        group: of the ranks that reduce, which all have counted as many.
        counted: the reductions so far, or what the last call returned.
        values: reads what is reduced.
        advice: what to do about a difference, for the error.

    Returns:
        What to pass to the next call.

    Raises:
        RanksDisagree: on every rank, naming the first variable that differs.
    """
    if counted not in COMPARED:
        return min(counted + 1, DONE)
    different = first_difference(group, values())
    if different is None:
        return DONE
    if counted < COMPARED[-1]:
        return counted + 1
    name, told = different
    raise RanksDisagree(
        f"ranks have different values of {name!r} ({told}) after {counted} reductions of its "
        f"gradient, and mean gradients never make them equal. {advice}"
    )


def _differs(group: Collectives, value: Value) -> bool:
    """Return whether a variable is not that of the first rank. A collective."""
    own = value.elements()
    if not own.size:
        return False
    data = group.broadcast(own.tobytes(), group.ranks[0], "hvdkit.values.first")
    first = np.frombuffer(data, own.dtype)
    finite = np.isfinite(first)
    if np.any(finite != np.isfinite(own)):
        return True
    own, first = own[finite], first[finite]
    largest = np.max(np.abs(first), initial=0.0)
    return bool(np.max(np.abs(own - first), initial=0.0) > _TOLERANCE * largest)


def _first_elements(value: Value) -> str:
    elements = value.elements()
    shown = ", ".join(f"{element:.6g}" for element in elements[:_SHOWN])
    return f"{shown}, ..." if len(elements) > _SHOWN else shown
