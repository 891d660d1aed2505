"""The values that an allreduce benchmark reduces, and the check of the results.

Rank r has small integers that depend on r and on the position, with a period of 1009. The period is
prime, so a result whose chunks were interchanged is wrong in most elements.
"""

from collections.abc import Callable, Iterator
from math import inf

import numpy as np

from hvdkit.bench.allreduce.cases import Case

PERIOD = 1009
#: The largest magnitude of a value.
LARGEST = 6

#: The distance between 1 and the next larger number of each floating-point dtype.
_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_WIRE_DTYPE = {"fp16": "float16", "bf16": "bfloat16"}
_ROWS = 1 << 10


def pattern(rank: int) -> np.ndarray:
    """Return one period of the values of a rank: float64, of shape [PERIOD]."""
    positions = np.arange(PERIOD, dtype=np.int64)
    spread = 2 * LARGEST + 1
    return ((positions * (7 * rank + 5) + 3 * rank) % PERIOD % spread - LARGEST).astype(np.float64)


def periods(rank: int, elements: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the values of a rank in blocks: the position of each block, and its values."""
    block = np.tile(pattern(rank), min(_ROWS, -(-elements // PERIOD)))
    for start in range(0, elements, len(block)):
        yield start, block[: elements - start]


def expected(op: str, ranks: int) -> np.ndarray:
    """Return one period of the result: float64, of shape [PERIOD]."""
    patterns = [pattern(rank) for rank in range(ranks)]
    if op in ("sum", "average"):
        total = np.sum(patterns, axis=0)
        return total / ranks if op == "average" else total
    return np.min(patterns, axis=0) if op == "min" else np.max(patterns, axis=0)


def tolerance(case: Case, ranks: int) -> float:
    """Return the largest error of an element that rounding can cause.

    Sums of small integers are exact. Other results round at most twice per addition.
    """
    if not case.floating or case.op in ("min", "max"):
        return 0.0
    share = 1.0 if case.op == "sum" else 1.0 / ranks
    if case.wire == "int8":
        # The error of a mean is at most 2 m / 254, see `hvdkit.reduction.int8`.
        return 1.01 * share * ranks * 2 * LARGEST / 254
    epsilon = _EPSILON[_WIRE_DTYPE.get(case.wire, case.dtype)]
    if case.op == "sum" and ranks * LARGEST <= 2 / epsilon:
        return 0.0
    return share * 2 * ranks * ranks * LARGEST * epsilon


def wrong_elements(
    case: Case, ranks: int, elements: Callable[[int, int], np.ndarray]
) -> tuple[int, float]:
    """Return the number of wrong elements, and the largest error.

    Args:
        case: the case.
        ranks: the number of ranks.
        elements: returns the elements from a start to an end, as float64.
    """
    allowed = tolerance(case, ranks)
    block = np.tile(expected(case.op, ranks), min(_ROWS, -(-case.elements // PERIOD)))
    wrong, largest = 0, 0.0
    for start in range(0, case.elements, len(block)):
        end = min(start + len(block), case.elements)
        errors = np.abs(elements(start, end) - block[: end - start])
        errors = np.where(np.isfinite(errors), errors, inf)
        wrong += int(np.count_nonzero(errors > allowed))
        largest = max(largest, float(errors.max()))
    return wrong, largest
