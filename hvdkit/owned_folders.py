"""Temporary folders that belong to a process, and that are deleted after the process is killed.

The owner holds a lock on a file of its folder. The lock ends with the process, so the next owner
finds folders that nobody owns, and deletes them.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

_LOCK = "lock"


class OwnedFolder:
    """A folder of this process, which only this user can read.

    Args:
        parent: the folder in which it is made.
        prefix: the beginning of its name. Abandoned folders with this prefix are deleted.
        name: the rest of its name. If a folder of this name exists and its owner has ended, this
            process adopts it with its content. If it has another owner, the new folder gets a
            random name. Default: a random name.

    Attributes:
        path: the path of the folder.
    """

    def __init__(self, parent: Path, prefix: str, name: str = "") -> None:
        adopted = _adopt(parent / f"{prefix}{name}") if name else None
        if adopted is not None:
            self.path, self._lock = adopted
        else:
            self.path, self._lock = _make(parent, prefix)
        _remove_abandoned(parent, prefix)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _lock(folder: Path) -> IO[str]:
    lock = (folder / _LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def _make(parent: Path, prefix: str) -> tuple[Path, IO[str]]:
    """Make and lock a folder with a new name."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process has taken the new folder for an abandoned one
        if (folder / _LOCK).exists():
            return folder, lock
        lock.close()


def _adopt(folder: Path) -> tuple[Path, IO[str]] | None:
    """Make or lock the folder; return None if another process or user owns it."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return None
        lock = _lock(folder)
        # Another process may have deleted the folder before the lock was held.
        if (folder / _LOCK).exists():
            return folder, lock
        lock.close()
    return None


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete the folders in `parent` whose processes have ended without deleting them."""
    for folder in parent.glob(f"{prefix}*"):
        # Errors: the folder is another user's, its process is alive, or it is new.
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
