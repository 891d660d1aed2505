"""The largest batch size that fits in memory on every rank, and advice on the learning rate."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

from hvdkit.errors import UsageError
from hvdkit.training.noise_scale import (
    Estimate,
    confidence,
    learning_rate_factor,
    steps_factor,
)

# The result is less than a sixteenth below a size that does not fit.
_RESOLUTION = 16
# Between sizes that differ by more than this number, multiples of 8 are tried.
_ROUND_FROM = 16


def parse(text: str) -> list[int]:
    """Return the sizes to try: `[FIRST, LAST]` for a range, or those of a list.

    Raises:
        UsageError: the text is neither `FIRST..LAST` nor a list of numbers.
    """
    found = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if found and 1 <= int(found[1]) < int(found[2]):
        return [int(found[1]), int(found[2])]
    parts = text.split(",")
    if not found and all(part.strip().isdecimal() and int(part) for part in parts):
        return sorted({int(part) for part in parts})
    raise UsageError(
        f"--batch-sizes is {text!r}: expected FIRST..LAST, such as 16..1024, or numbers of at "
        f"least 1, such as 16,24,32"
    )


def is_range(text: str) -> bool:
    """Return whether sizes between the first and the last one may be tried."""
    return ".." in text


def largest_in_range(first: int, last: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest size that fits; None if the first one does not.

    Double the size until it does not fit, then bisect. The result is `last`, or less than a
    sixteenth below a size that does not fit.

    Args:
        first: the smallest size to try.
        last: the largest size to try.
        fits: tries a size. Sizes below one that fits fit, too.
    """
    good, size = 0, first
    while fits(size):
        if size == last:
            return last
        good, size = size, min(2 * size, last)
    return _bisect(good, size, fits) if good else None


def _bisect(good: int, bad: int, fits: Callable[[int], bool]) -> int:
    while bad - good > max(1, good // _RESOLUTION):
        middle = (good + bad) // 2
        if bad - good > _ROUND_FROM and good < middle // 8 * 8:
            middle = middle // 8 * 8
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def largest_of(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of some sizes that fits, by bisection; None if none does.

    Args:
        sizes: the sizes, in increasing order.
        fits: see `largest_in_range`.
    """
    count = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[count - 1] if count else None


def blocks_of(sums: Sequence[Sequence[float]]) -> list[Estimate]:
    """Return the sums of each block, from sums since the beginning."""
    before = [(0.0, 0.0), *((float(s), float(n)) for s, n in sums)]
    return [Estimate(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(before)]


def advice(blocks: Sequence[Estimate], ranks: int, tried: Sequence[int]) -> list[str]:
    """Return lines about the noise scale, and about the learning rate for other batch sizes.

    Args:
        blocks: see `hvdkit.training.noise_scale.confidence`.
        ranks: the number of ranks.
        tried: batch sizes of a rank that fit; the first one is the reference.
    """
    interval = confidence(blocks)
    if interval is None:
        return [
            "The noise scale is not known, because its estimates are too noisy. Measure more steps "
            "(--final-steps)."
        ]
    low, high = interval
    scale = sum(b.noise for b in blocks) / sum(b.signal for b in blocks)
    lines = [
        f"The gradient noise scale at the beginning of the training is {scale:,.0f} samples "
        f"({low:,.0f} to {high:,.0f} with a probability of 95 %).",
        "If the learning rate is good for the first line, use these factors (SGD; with Adam, the "
        "best factor is between the square root and this one):",
        "  batch of a rank  of all ranks  learning rate    steps  samples",
    ]
    first = tried[0] * ranks
    for size in sorted({*tried}):
        batch = size * ranks
        rate, steps = learning_rate_factor(scale, first, batch), steps_factor(scale, first, batch)
        lines.append(
            f"  {size:15,}  {batch:12,}  {f'x {rate:.2f}':>13}  {steps:7.1%}  "
            f"{steps * batch / first:7.0%}"
        )
    lines.append(
        "The noise scale grows during the training: hvd.GradientNoiseScale shows it at any time."
    )
    return lines
