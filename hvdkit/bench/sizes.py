"""Sizes of buffers, as users write them: `1KiB..64MiBx4`, `4MB,25MB`."""

import re

from hvdkit.errors import UsageError

# Units of GNU dd: KB is 1000, K and KiB are 1024. For nccl-tests, too, 8M is 8 MiB.
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {f"{unit}ib": _UNITS[unit] for unit in "kmgt"}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}

_DEFAULT_FACTOR = "2"


def parse_sizes(text: str) -> list[int]:
    """Return the sizes in bytes, in increasing order, without repetitions.

    Args:
        text: sizes and ranges of sizes, separated by commas. `A..BxF` are A, A x F, A x F x F, …
            up to B; F is 2 if it is not given.

    Raises:
        UsageError: a part is malformed.
    """
    sizes: set[int] = set()
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        first, dots, rest = part.partition("..")
        if not dots:
            sizes.add(parse_size(first))
            continue
        last, given, factor_text = rest.partition("x")
        if not given:
            factor_text = _DEFAULT_FACTOR
        factor = int(factor_text) if factor_text.isdigit() else 0
        start, end = parse_size(first), parse_size(last)
        if factor < 2 or end < start:
            raise UsageError(
                f"--sizes has the range {part!r}; expected FIRST..LAST or FIRST..LASTxFACTOR, with "
                f"a factor of at least 2, such as 1KiB..64MiBx4"
            )
        while start <= end:
            sizes.add(start)
            start *= factor
    if not sizes:
        raise UsageError("--sizes is empty; expected sizes such as 1KiB..64MiBx4 or 4MB,25MB")
    return sorted(sizes)


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
