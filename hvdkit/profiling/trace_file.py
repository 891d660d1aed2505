"""Write the trace of all ranks to one file, in Chrome's trace event format."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.profiling.events import Event
from hvdkit.system.whole_files import check_writable, replacing

# Level 1 is the fastest, and makes a file that is about a third larger than that of the default.
_LEVEL = 1


def check(path: Path) -> str:
    """Return why no file can be written at `path`; empty if one can. Makes the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            return f"{path} is a folder: expected the name of a file"
        check_writable(path)
    except FileExistsError:
        return f"cannot write {path}: {path.parent} is not a folder. Choose another one"
    except OSError as error:
        return f"cannot write {path}: {error.strerror}. Choose another folder"
    return ""


def pack(events: Iterable[Event]) -> bytes:
    """Return events for `write`, compressed."""
    return zlib.compress(",\n".join(map(_encode, events)).encode(), _LEVEL)


def write(path: Path, packed: Sequence[bytes], facts: Mapping[str, Any]) -> None:
    """Write a trace. A file at `path` is replaced when the new one is complete.

    Args:
        path: the file.
        packed: the results of `pack` of all ranks.
        facts: the metadata of the trace.

    Raises:
        HvdkitError: the file cannot be written.
    """
    try:
        with replacing(path) as draft, gzip.open(draft, "wb", _LEVEL) as file:
            file.write(b'{"traceEvents": [\n')
            separator = b""
            for each in packed:
                if text := zlib.decompress(each):
                    file.write(separator + text)
                    separator = b",\n"
            end = f'\n],\n"displayTimeUnit": "ms",\n"otherData": {_encode(facts)}}}\n'
            file.write(end.encode())
    except OSError as error:
        raise HvdkitError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path) -> dict[str, Any]:
    """Return the content of a trace."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content: dict[str, Any] = json.load(file)
    return content


def _encode(value: Mapping[str, Any]) -> str:
    # NaN is not JSON, and Perfetto refuses it.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
