"""The folder on a host to which the host's ranks write their records."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

#: Ranks write a record when this file is touched.
REQUEST = "request"
#: A checkpointer touches this file when it has saved a step (`hvdkit/checkpoint/progress.py`).
SAVED = "saved"
#: The process that made the folder holds a lock on this file.
_LOCK = "lock"
#: The beginning of the folder's name.
PREFIX = "hvdkit-records-"


class RecordFolder:
    """A folder for records. It is made on the first use of `path`."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock: IO[str] | None = None
        # The size and time of each file that `changed` and `saved` have seen.
        self._seen: dict[str, tuple[int, int]] = {}

    @property
    def path(self) -> Path:
        """The path of the folder, which only this user can read."""
        if self._path is None:
            _remove_abandoned(Path(tempfile.gettempdir()))
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # The lock ends with the process, also after SIGKILL.
            self._lock = (self._path / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self._path

    def request(self) -> None:
        """Ask the ranks for records."""
        request(self.path)

    def changed(self) -> Iterator[str]:
        """Yield the records that were written since the last call, as JSON."""
        if self._path is None:
            return
        for file in sorted(self._path.glob("rank-*.json")):
            # After an error the next call reads the file again.
            with contextlib.suppress(OSError):
                facts = file.stat()
                stamp = facts.st_size, facts.st_mtime_ns
                if self._seen.get(file.name) != stamp:
                    text = file.read_text(encoding="utf-8", errors="replace")
                    self._seen[file.name] = stamp
                    yield text

    def saved(self) -> bool:
        """Return whether a step was saved since the last call."""
        if self._path is None:
            return False
        try:
            stamp = 0, (self._path / SAVED).stat().st_mtime_ns
        except OSError:
            return False
        before = self._seen.get(SAVED)
        self._seen[SAVED] = stamp
        return before != stamp

    def remove(self) -> None:
        """Delete the folder."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove_abandoned(parent: Path) -> None:
    """Delete the folders in `parent` whose processes have ended without deleting them."""
    for folder in parent.glob(f"{PREFIX}*"):
        # An error keeps the folder: it is another user's, its process is alive, or it is new.
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def request(folder: Path) -> None:
    """Ask the ranks that write to `folder` for records."""
    with contextlib.suppress(OSError):
        file = folder / REQUEST
        file.touch()
        os.utime(file)
