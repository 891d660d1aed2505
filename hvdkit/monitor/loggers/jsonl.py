"""Write records as lines of JSON. `hvdkit.monitor.history` describes the file and reads it."""

import contextlib
import errno
import fcntl
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.monitor.loggers.logger import Logger
from hvdkit.monitor.metrics import METRICS
from hvdkit.monitor.records import Record, Run, Statistic
from hvdkit.system.whole_files import open_to_write

#: The version of the file. Readers refuse a newer one.
VERSION = 1

# The type `flock` of fcntl(2), and a lock of an open file for writing. Unlike flock(2), it needs a
# descriptor for writing.
_LAYOUT = struct.Struct("hhqqi4x")
_LOCK = _LAYOUT.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

# In larger jobs, records do not have the values of each rank.
_MANY_RANKS = 64


class JSONLLogger(Logger):
    """Append records to a file, one JSON object in each line.

    The file may exist: a resumed job appends to it. A job that is killed leaves a readable file,
    except perhaps for its last line, which readers skip.

    Args:
        path: the file. Its folder is created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file: int | None = None

    def open(self) -> None:
        """Open the file, and lock it against a second job.

        Raises:
            OSError: it cannot be written, or is a link or a pipe of another user.
            HvdkitError: another job writes to it.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open_to_write(self._path, os.O_RDWR | os.O_APPEND)
        try:
            self._lock(file)
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def _lock(self, file: int) -> None:
        # A process that may only read the file can lock it for reading, which means no writer.
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, _LOCK)
            except BlockingIOError:
                kind = _LAYOUT.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, _LOCK))[0]
                if kind == fcntl.F_WRLCK:
                    raise HvdkitError(
                        f"another job, or another Monitor, writes to {self._path}. Choose another "
                        f"file, or close the other Monitor first"
                    ) from None

    def begin(self, run: Run) -> None:
        """Write a line of type "start"."""
        units = {name: metric.unit for name, metric in METRICS.items()}
        line = {"type": "start", "version": VERSION, **vars(run), "units": units}
        self._write(line | {"ranks": list(run.ranks), "wire_formats": list(run.wire_formats)})

    def log(self, record: Record) -> None:
        """Write a line of type "record"."""
        line: dict[str, Any] = {"type": "record", **vars(record), "ranks": list(record.ranks)}
        if slowest := record.slowest:
            times = {name: _rounded(getattr(slowest, name)) for name in ("seconds", "median")}
            line["slowest"] = vars(slowest) | times
        line["metrics"] = {
            name: _statistic(each, record) for name, each in sorted(record.metrics.items())
        }
        self._write(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        text = json.dumps(line, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
        size = os.fstat(self._file).st_size
        cut = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        content = ("\n" * cut + text + "\n").encode()
        written = os.write(self._file, content)
        if written < len(content):
            # Remove the incomplete line, if the file system allows it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, f"{self._path}: {os.strerror(errno.ENOSPC)}")


def _statistic(statistic: Statistic, record: Record) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "mean": _rounded(statistic.mean),
        "min": _rounded(statistic.min),
        "max": _rounded(statistic.max),
    }
    if statistic.nonfinite:
        numbers["nonfinite"] = statistic.nonfinite
    if len(statistic.by_rank) > 1 and len(record.ranks) <= _MANY_RANKS:
        numbers["by_rank"] = [_rounded(statistic.by_rank.get(rank)) for rank in record.ranks]
    return numbers


def _rounded(value: float | None) -> float | None:
    """Return a value as JSON, with the precision of float32 numbers."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.9g}")
