"""Sizes of buffers and numbers of ranks, as users write them: `1KiB..64MiBx4`, `8,24`."""

import re
from collections.abc import Callable

from hvdkit.errors import UsageError

# Units of GNU dd: KB is 1000, K and KiB are 1024. For nccl-tests, too, 8M is 8 MiB.
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {f"{unit}ib": _UNITS[unit] for unit in "kmgt"}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}

_DEFAULT_FACTOR = "2"


def parse_sizes(text: str) -> list[int]:
    """Return the sizes in bytes; see `_parse`."""
    return _parse(text, "--sizes", parse_size, "1KiB..64MiBx4 or 4MB,25MB")


def parse_ranks(text: str) -> list[int]:
    """Return the numbers of ranks; see `_parse`."""
    return _parse(text, "--ranks", _parse_count, "8..1024, 8..512x4 or 8,24")


def _parse(text: str, option: str, number: Callable[[str], int], example: str) -> list[int]:
    """Return numbers, in increasing order, without repetitions.

    Args:
        text: numbers and ranges of numbers, separated by commas. `A..BxF` are A, A x F, A x F x F,
            … up to B; F is 2 if it is not given.
        option: the name of the option, for errors.
        number: converts a number.
        example: for errors.

    Raises:
        UsageError: a part is malformed.
    """
    found: set[int] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        first, dots, rest = part.partition("..")
        last, given, factor_text = rest.partition("x")
        if not given:
            factor_text = _DEFAULT_FACTOR
        factor = int(factor_text) if factor_text.isdigit() else 0
        start, end = number(first), number(last if dots else first)
        if factor < 2 or end < start:
            raise UsageError(
                f"{option} has the range {part!r}; expected FIRST..LAST or FIRST..LASTxFACTOR, "
                f"with a factor of at least 2, such as {example}"
            )
        while start <= end:
            found.add(start)
            start *= factor
    if not found:
        raise UsageError(f"{option} is empty; expected numbers such as {example}")
    return sorted(found)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--ranks has {text!r}; expected numbers such as 8,24")
    return int(text)


def parse_size(text: str) -> int:
    """Return a size in bytes.

    Raises:
        UsageError: it is malformed, or not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS or not (size := float(found[1]) * _UNITS[found[2]]):
        raise UsageError(
            f"--sizes has {text!r}; expected a number of bytes with a unit: KB, MB, GB (powers of "
            f"1000), KiB, MiB, GiB or K, M, G (powers of 1024)"
        )
    return max(1, int(size))


def show_size(size: float) -> str:
    """Return a size for people: `64 MiB`, `25 MB`, `1000 bytes`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size / factor:g} {unit}"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:g} bytes"
