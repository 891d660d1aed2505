"""Read files that another user may have written: regular files only, and not without a limit.

A symbolic link would lead to a file that only this user may read, a pipe would wait forever, and a
device or a very large file would use up the memory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

#: The longest file that is read, in bytes. A record of 1,000 process sets has about 1 MB.
LONGEST = 64 * 1024**2


def read_text(path: Path, longest: int = LONGEST) -> str:
    """Return the text of a regular file. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `longest` bytes.
    """
    # O_NONBLOCK: opening a pipe must not wait for a process that writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with open(descriptor, "rb") as file:
        content = file.read(longest + 1)
    if len(content) > longest:
        raise OSError(errno.EFBIG, f"more than {longest:,} bytes", str(path))
    return content.decode("utf-8", errors="replace")


def read_json(path: Path, longest: int = LONGEST) -> Any:
    """Return the content of a regular file with JSON.

    Raises:
        OSError: as for `read_text`.
        ValueError: it is not JSON, or is nested too deeply.
    """
    return parse_json(read_text(path, longest))


def parse_json(text: str | bytes) -> Any:
    """Return the content of JSON.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def printable(text: str) -> str:
    """Return a text without characters that change how a terminal shows others.

    U+FFFD stands for each of them: escape sequences, other control characters but the newline and
    the tabulator, and marks of the direction of text.
    """
    shown = (c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(shown)
