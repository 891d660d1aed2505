"""Change valid inputs at random, as bytes or as JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

#: Values that a reader of JSON may not expect.
_VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, 1e300, -1e300),
    *(float("nan"), float("inf"), "", "x", "0", "9" * 5000, "../../etc/passwd", "/dev/zero"),
    *("\x1b]0;title\x07", "\x9b31m", "\u202eabc", "\x00", "\ud800", "a\nb\rc", "<script>", "$x$"),
    *("%s%n{0}{x}[/]", "a" * 100_000, [], {}, [[]], {"": None}, [0] * 1000),
)
#: Pieces of text that a parser may not expect.
_PIECES = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\x1b[31m", b"\x9b", "\u202e".encode(), b"\r\n", b"\n"),
    *(b" ", b",", b":", b"=", b"-", b"#", b"[", b"]", b"{", b"}", b'"', b"\\", b"\\ud800", b"$("),
    *(b"9" * 5000, b"1e400", b"-1", b"99999999999999999999", b"NaN", b"0x", b"(x1000000)"),
    *(b"[0-99999999]", b"[1-9][1-9][1-9][1-9][1-9][1-9]", b"a" * 5000, b"[" * 5000, b"(" * 300),
    *(b'{"a":' * 5000, b"%s", b"\xc3", b"\t", b"\x0c", b"\x85"),
)
#: The most bytes of an input.
MOST = 20_000_000


def mutated(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the seeds with some changes."""
    seed = draw.choice(seeds)
    if draw.random() < 0.1:
        return seed
    data = _changed_json(draw, seed) if draw.random() < 0.6 else None
    if data is None or draw.random() < 0.1:
        data = _changed_bytes(draw, seed if data is None else data, seeds)
    return data[:MOST]


def _changed_bytes(draw: random.Random, seed: bytes, seeds: Sequence[bytes]) -> bytes:
    data = bytearray(seed)
    for _ in range(draw.choice([1, 1, 2, 4, 8])):
        at = draw.randint(0, len(data))
        end = at + draw.choice([1, 4, 20, 200])
        match draw.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = draw.randbytes(draw.randint(1, 40))
            case 3:
                data[at:at] = data[at:end] * draw.choice([1, 2, 50, 2000])
            case 4:
                del data[at:]
            case 5:
                other = draw.choice(seeds)
                data[at:] = other[draw.randint(0, len(other)) :]
            case _:
                data[at:at] = draw.choice(_PIECES)
    return bytes(data)


def _changed_json(draw: random.Random, seed: bytes) -> bytes | None:
    """Return JSON, or lines of it, with changed values; None if the seed is not JSON."""
    try:
        documents = [json.loads(seed)]
    except (ValueError, RecursionError):
        try:
            documents = [json.loads(line) for line in seed.splitlines()]
        except (ValueError, RecursionError):
            return None
    if not documents:
        return None
    try:
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            at = draw.randrange(len(documents))
            documents[at] = _changed_value(draw, documents[at])
        text = "\n".join(json.dumps(each) for each in documents)
    except (RecursionError, ValueError):
        return None
    if draw.random() < 0.05:
        text = text.replace(": ", ": " * 2, 1).replace("}", f", {json.dumps(text)}: 1}}", 1)
    return text.encode("utf-8", "surrogatepass")


def _changed_value(draw: random.Random, value: Any) -> Any:
    """Return a value of JSON with one change somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        inside = value[key]
        match draw.randrange(12):
            case 0:
                return {name: each for name, each in value.items() if name != key}
            case 1:
                return {**value, str(draw.choice(_VALUES))[:5000]: inside}
            case 2:
                return {name if name != key else f"{name}\u202e": v for name, v in value.items()}
        return {**value, key: _changed_value(draw, inside)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        match draw.randrange(12):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                small = len(repr(value[at])) < 1000
                return value + [value[at]] * draw.choice([1, 10, 3000 if small else 2])
        return [*value[:at], _changed_value(draw, value[at]), *value[at + 1 :]]
    match draw.randrange(8):
        case 0:
            nested: Any = value
            for _ in range(draw.choice([3, 60, 190, 900])):
                nested = [nested] if draw.random() < 0.5 else {"a": nested}
            return nested
        case 1 if isinstance(value, int | float):
            return value * draw.choice([-1, 2, 1000, 10**15])
    return draw.choice(_VALUES)
