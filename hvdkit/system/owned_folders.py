"""Temporary folders that belong to a process, and that are deleted after the process is killed.

The owner holds a lock on a file of its folder. The lock ends with the process, so the next owner
finds folders that nobody owns, and deletes them.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdkit.system.trusted_paths import untrusted

_LOCK = "lock"
# A folder with this file waits for its next owner.
_LEFT = "left"
# Seconds for which it waits. Then any process deletes it.
_LEFT_SECONDS = 60.0
# To adopt a folder.
_TRIES, _TRY_SECONDS = 5, 0.05
# For folders, if other users could replace those in TMPDIR.
_PLACES = (Path("/tmp"), Path("/dev/shm"))


def temporary() -> Path:
    """Return the folder in which processes make their folders: TMPDIR, or else /tmp.

    If other users could replace folders in TMPDIR, it is /tmp or /dev/shm: a commit of an elastic
    job contains code.
    """
    usual = Path(tempfile.gettempdir())
    for place in (usual, *_PLACES):
        with contextlib.suppress(OSError):  # there is no such folder
            if not untrusted(place) and os.access(place, os.W_OK | os.X_OK):
                return place
    return usual


class TemporaryFolder(tempfile.TemporaryDirectory[str]):  # noqa: TID251
    """A folder for a short time, which only this user can read, and which others cannot replace.

    Unlike an `OwnedFolder`, it stays if this process is killed.

    Args:
        prefix: the beginning of its name.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix=prefix, dir=temporary())


class OwnedFolder:
    """A folder of this process, which only this user can read.

    Args:
        parent: the folder in which it is made.
        prefix: the beginning of its name. Abandoned folders with this prefix are deleted.
        name: the rest of its name. If a folder of this name exists and its owner has ended, this
            process adopts it with its content. If it has another owner, the new folder gets a
            random name. Default: a random name.
    """

    def __init__(self, parent: Path, prefix: str, name: str = "") -> None:
        adopted = _adopt(parent / f"{prefix}{name}") if name else None
        if adopted is not None:
            self.path, self._lock = adopted
            (self.path / _LEFT).unlink(missing_ok=True)
        else:
            self.path, self._lock = _make(parent, prefix)
        remove_abandoned(parent, prefix)

    def leave(self) -> None:
        """Leave the folder to a process that adopts it within a minute."""
        with contextlib.suppress(OSError):  # a full disk, for example
            (self.path / _LEFT).touch()
            self._lock.close()

    def remove(self) -> None:
        """Delete the folder."""
        _delete(self.path)
        # A fork of the owner may have closed all descriptors.
        with contextlib.suppress(OSError):
            self._lock.close()


def has_owner(folder: Path) -> bool:
    """Return whether the process that made or adopted a folder still runs."""
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # the folder was deleted
    return False


def _lock(folder: Path) -> contextlib.ExitStack:
    """Lock a folder until the result is closed.

    The folder itself is locked, too: systemd-tmpfiles then does not delete it when it is old.
    Another user could make it again, and the owner would write there.

    Raises:
        OSError: another process holds the lock, or has deleted the folder; or it is not one of this
            user.
    """
    with opened(folder) as path, contextlib.ExitStack() as locks:
        lock = locks.enter_context((path / _LOCK).open("a"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between the two calls, another process may have deleted the lock file and the folder.
        if os.fstat(lock.fileno()).st_ino != (path / _LOCK).stat().st_ino:
            raise FileNotFoundError(folder)
        whole = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        locks.callback(os.close, whole)
        with contextlib.suppress(OSError):  # NFS has no locks of folders
            fcntl.flock(whole, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return locks.pop_all()


def _delete(folder: Path) -> None:
    """Delete a folder whose lock this process holds.

    The lock file is deleted last. A process that then takes the folder finds it empty, and keeps
    it: a folder with a new lock file cannot be deleted.
    """
    with contextlib.suppress(OSError), opened(folder) as path:
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)
        (path / _LOCK).unlink(missing_ok=True)
        folder.rmdir()


def _make(parent: Path, prefix: str) -> tuple[Path, contextlib.ExitStack]:
    """Make and lock a folder with a new name."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # noqa: TID251
        # Another process may have taken the new folder for an abandoned one.
        try:
            return folder, _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue
        except OSError:  # a full disk, for example
            if is_own(folder):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                raise
            # The new folder was deleted, and another user has made something of its name.


def _adopt(folder: Path) -> tuple[Path, contextlib.ExitStack] | None:
    """Lock the folder; make it if it is missing. Return None if another process or user owns it."""
    for _ in range(_TRIES):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            return folder, _lock(folder)
        except BlockingIOError:
            # `remove_abandoned` of another process may only look at the folder.
            time.sleep(_TRY_SECONDS)
        except OSError:
            return None
    return None


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Path]:
    """Open a folder of this user in which no other user can make files. Yield a path to it.

    If the folder is deleted meanwhile, others may make a folder or a link of its name, as in /tmp.
    The path does not lead there.

    Raises:
        OSError: there is no such folder.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid != os.geteuid() or others_write:
            raise PermissionError(errno.EACCES, "another user can make files in it", str(folder))
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def is_own(folder: Path) -> bool:
    """Return whether `opened` can open a folder."""
    with contextlib.suppress(OSError), opened(folder):
        return True
    return False


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete the folders in `parent` whose processes have ended without deleting them.

    A folder without a lock file is deleted, too. Its process was killed before it made the lock
    file, or has not made it yet. In the second case, `_make` finds that the folder is gone, and
    makes another folder. Take the lock first, so that the process cannot take it meanwhile.
    """
    for folder in parent.glob(f"{prefix}*"):
        # An OSError: the owner still runs, the folder was deleted meanwhile, or it is of another
        # user.
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            if not _was_left(folder):
                _delete(folder)
            lock.close()


def _was_left(folder: Path) -> bool:
    """Return whether the owner of a folder has left it for the next owner, not long ago."""
    try:
        age = time.time() - (folder / _LEFT).stat().st_mtime
    except OSError:
        return False
    return abs(age) < _LEFT_SECONDS
