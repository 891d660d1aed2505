"""Read files and texts that another user may have written, and show them.

Files are regular ones of a limited size: a symbolic link would lead to a file that only this user
may read, a pipe would wait forever, and a device or a very large file would use up the memory. JSON
has a limited number of values and levels: a small file can need 50 times its size in memory, and
deep JSON overflows the stack.

A folder may have any number of files. So commands that read whole folders have a `Budget`.

All of hvdkit parses JSON with `parse_json`: ruff finds other calls (TID251).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

#: The longest file that is read, in bytes. A record of 1,000 process sets has about 1 MB.
LONGEST = 16 * 1024**2
#: The most values in JSON, as `json_values` counts them. They take at most about 50 MB.
MOST_VALUES = 400_000
#: The most levels of arrays and objects in JSON, more than a checkpoint has (`tree.MAX_DEPTH`).
MOST_LEVELS = 200

#: The memory for the content of all files of a command, in bytes. The records of 4,000 ranks take
#: about as much.
MOST_MEMORY = 500_000_000
# Python's objects have at most about twice this size, on average, with their places in containers.
_OBJECT_BYTES = 96
_SHOWN_PATHS = 3

# Seconds since 1970, in about 3,000 years: no clock shows a later time.
_LATEST = 1e11
_MOST_RANKS = 200_000
# Characters of an item that `json_items` reads at most.
_ITEM = 1_000_000
_BETWEEN_ITEMS = re.compile(r"[\s,]*")
_OBJECT = 4
# Bytes of JSON whose values are counted at a time: each may be a string.
_COUNTED_BYTES = 65_536


class Budget:
    """The memory for the content of all files that a command reads.

    The number of objects of this process measures the content, because the same number of bytes of
    JSON takes 2 to 60 times as much memory.

    Args:
        most: the most memory, in bytes.

    Attributes:
        left_out: the files and folders that were not read, or not to their end.
    """

    def __init__(self, most: int = MOST_MEMORY) -> None:
        self._most = most
        self._objects = sys.getallocatedblocks()
        self._bytes = 0
        self.left_out: list[Path] = []

    def allows(self, path: Path) -> bool:
        """Return whether a file or folder may be read. If not, note that it is left out."""
        objects = sys.getallocatedblocks() - self._objects
        if self._bytes + _OBJECT_BYTES * objects < self._most:
            return True
        self.left_out.append(path)
        return False

    def spend(self, text: str) -> None:
        """Note that a text was read. Its long strings are not counted as objects."""
        self._bytes += sys.getsizeof(text)

    @property
    def note(self) -> str:
        """A sentence about what was left out; "" for nothing."""
        if not self.left_out:
            return ""
        shown = ", ".join(map(str, self.left_out[:_SHOWN_PATHS]))
        more = len(self.left_out) - _SHOWN_PATHS
        return (
            f"Not read, or not to the end: {shown}{f' and {more:,} more' if more > 0 else ''}. The "
            f"content of all files may take {self._most / 1e6:,.0f} MB of memory, and that of the "
            f"others takes as much."
        )


def open_regular(
    path: str | Path, parent: int | None = None, flags: int = os.O_RDONLY, mode: int = 0o666
) -> int:
    """Open a regular file, and return its descriptor.

    Args:
        path: the file. The last name in it may not be a symbolic link.
        parent: the descriptor of the folder of a relative path; default the working directory.
        flags: flags of `os.open`; default: for reading.
        mode: of a file that is made, without the bits of the umask.

    Raises:
        OSError: it cannot be opened, or is not a regular file (ENXIO).
    """
    # O_NONBLOCK: opening a pipe must not wait for another process.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, "not a regular file", str(path))
    return descriptor


def read_text(path: Path, longest: int = LONGEST) -> str:
    """Return the text of a regular file. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `longest` bytes.
    """
    with open(open_regular(path), "rb") as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise OSError(errno.EFBIG, f"more than {longest:,} bytes", str(path))
    return content.decode("utf-8", errors="replace")


def read_named(path: Path, errors: str = "strict") -> str:
    """Return the text of a file that the user has named, which may be a link or a pipe.

    Args:
        errors: as for `open`.

    Raises:
        OSError: it cannot be read, or has more than `LONGEST` characters, such as /dev/zero.
        UnicodeDecodeError: it is not UTF-8.
    """
    with path.open(encoding="utf-8-sig", errors=errors) as file:
        text = file.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise OSError(errno.EFBIG, f"more than {LONGEST:,} characters", str(path))
    return text


def read_json(path: Path, longest: int = LONGEST) -> Any:
    """Return the content of a regular file with JSON.

    Raises:
        OSError: as for `read_text`.
        ValueError: as for `parse_json`.
    """
    return parse_json(read_text(path, longest))


def parse_json(text: str | bytes, most_values: int = MOST_VALUES, **hooks: Any) -> Any:
    """Return the content of JSON.

    Args:
        text: the JSON; bytes must be UTF-8. Python would accept UTF-16, too, in which `json_values`
            takes parts of other characters for quotes.
        most_values: the most values in it, as `json_values` counts them.
        hooks: further arguments of `json.loads`.

    Raises:
        ValueError: it is not JSON, has too many values, or is nested too deeply.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if json_values(data, most_values) > most_values:
        raise ValueError(f"it has too many values; expected at most {most_values}")
    try:
        content = json.loads(text if isinstance(text, str) else str(text, "utf-8"), **hooks)
    except RecursionError:
        content = None
    else:
        if _levels_end(content):
            return content
    raise ValueError(f"the JSON is nested too deeply; expected at most {MOST_LEVELS} levels")


def json_items(file: IO[str]) -> Iterator[Any]:
    """Yield the items of a JSON array of any length. The end of the file may be missing.

    Raises:
        ValueError: it is not JSON, or an item has more than 1 MB or is nested too deeply.
    """
    decode = json.JSONDecoder().raw_decode
    text, place = file.read(_ITEM).lstrip().removeprefix("["), 0
    while True:
        place = _BETWEEN_ITEMS.match(text, place).end()  # type: ignore[union-attr]
        try:
            item, place = decode(text, place)
            yield item
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error
        except ValueError as error:
            # A piece of the file ends within an item.
            more = file.read(_ITEM)
            if not more:
                return
            if len(text) - place > _ITEM:
                raise ValueError(f"an item of the JSON has more than {_ITEM:,} bytes") from error
            text, place = text[place:] + more, 0


def json_values(data: bytes, limit: int) -> int:
    """Estimate the number of values in JSON. An object counts as four, because of its memory.

    Args:
        data: JSON, valid or not.
        limit: counting may stop above this number.
    """
    rough = data.count(b",") + data.count(b"[") + _OBJECT * data.count(b"{")
    if rough <= limit:
        return rough
    # Count exactly: ignore these characters inside strings, whose quotes are without escapes now.
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    count, inside = 0, False
    for begin in range(0, len(plain), _COUNTED_BYTES):
        pieces = plain[begin : begin + _COUNTED_BYTES].split(b'"')
        outside = b"".join(pieces[inside::2])
        count += outside.count(b",") + outside.count(b"[") + _OBJECT * outside.count(b"{")
        if count > limit:
            break
        inside ^= len(pieces) % 2 == 0
    return count


def whole(number: Any) -> int:
    """Return a whole number in JSON.

    Raises:
        TypeError, ValueError: it is no number, or has more than 64 bits.
    """
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{number} is not a whole number")
    found = int(number)
    if not -(2**63) <= found < 2**63:
        raise ValueError("a number has more than 64 bits")
    return found


def rank_number(number: Any) -> int:
    """Return a rank, or a number of ranks, in JSON.

    Raises:
        TypeError, ValueError: it is no number, or no job has so many ranks.
    """
    found = whole(number)
    if not 0 <= found <= _MOST_RANKS:
        raise ValueError(f"{found} is not a rank or a number of ranks")
    return found


def seconds(number: Any) -> float:
    """Return a time or a duration in JSON.

    Raises:
        TypeError, ValueError: it is no number, or no clock shows this time.
    """
    try:
        found = float(number)
    except OverflowError:
        found = math.inf
    if not abs(found) < _LATEST:
        raise ValueError(f"{found} s is not a time")
    return found


def _levels_end(content: Any) -> bool:
    """Return whether the content of JSON has at most MOST_LEVELS levels."""
    level: list[Any] = [[content]]
    for _ in range(MOST_LEVELS + 1):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [v for values in inside for v in values if isinstance(v, dict | list)]
        if not level:
            return True
    return False


def printable(text: str, *, one_line: bool = False) -> str:
    """Return a text without characters that change how a terminal shows others.

    U+FFFD stands for each of them: escape sequences, other control characters but the newline and
    the tabulator, and marks of the direction of text.

    Args:
        one_line: replace newlines and tabulators, too.
    """
    if text.isprintable():
        return text
    kept = "" if one_line else "\n\t"

    def is_shown(c: str) -> bool:
        # Python counts spaces that do not break a line as not printable.
        return c.isprintable() or c in kept or unicodedata.category(c) == "Zs"

    return "".join(c if is_shown(c) else "\N{REPLACEMENT CHARACTER}" for c in text)
