"""One writer for a folder, on whatever host, also on shared folders.

Two things guard it. A record lock on `.lock`, which the system gives up when the process ends:
it decides between processes of one host, and of several where the file system passes locks on.
And a lease in `.writer`: who writes, and a number that grows every few seconds. A lease whose
process has ended on this host, or which does not change for some time, was left by a dead writer.
Only changes are looked at, and timed by the looker's monotonic clock: clocks are never compared.

A record lock (`fcntl`), not `flock`: forked children, such as loader workers that outlive a killed
trainer for a while, do not inherit it. Nothing else may open `.lock`, as closing any descriptor of
it gives the lock up.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path

from hvdkit.checkpoint.errors import CheckpointError, WriterConflict
from hvdkit.checkpoint.lease import Lease, conflict, taken_over, wait_for_death

LOCK_FILE, LEASE_FILE = ".lock", ".writer"

_log = logging.getLogger(__name__)

#: Seconds between two signs of life, and without one until a writer counts as dead.
BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 20.0

_MAX_LEASE_BYTES = 4096

#: Folders that this process writes to, by device and inode.
_held: set[tuple[int, int]] = set()
_held_guard = threading.Lock()


class FolderLock:
    """The right to write to a folder. Taken when made, given back by `close`."""

    def __init__(self, path: Path, folder: int) -> None:
        """Args:
            path: the folder, for errors and to see whether it is still there.
            folder: its open descriptor, which stays the caller's.

        Raises:
            WriterConflict: another live process has it, or this one has already.
            OSError: the folder cannot be written to.
        """
        self._path = path
        self._folder = folder
        self.lease = Lease.own()
        self._beats = 0
        self._stop = threading.Event()
        status = os.fstat(folder)
        self._identity = (status.st_dev, status.st_ino)
        with _held_guard:
            # Looked at before `.lock` is opened: closing it again would give our own lock up.
            if self._identity in _held:
                raise WriterConflict(
                    f"{path} is open for writing in this process already; close that writer first."
                )
            _held.add(self._identity)
        try:
            self._descriptor = os.open(
                LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666, dir_fd=folder
            )
            try:
                self._take()
            except BaseException:
                os.close(self._descriptor)
                raise
        except BaseException:
            self._forget()
            raise
        self._thread = threading.Thread(
            target=self._beat, name="hvdkit-checkpoint-lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """See that the folder is still there and still ours.

        Raises:
            WriterConflict: another process has taken it over.
            CheckpointError: it is not there any more, or this process was forked from the writer.
        """
        self.lease.expect_own_process(str(self._path))
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise CheckpointError(
                f"the folder {self._path} has vanished ({error.strerror}); nothing can be saved "
                "until it is there again, with what was in it."
            ) from error
        if (status.st_dev, status.st_ino) != self._identity:
            raise CheckpointError(
                f"{self._path} is not the folder any more that was opened, e.g. because it was "
                "unmounted or replaced; nothing can be saved until that one is there again."
            )
        found = Lease.parse(_read_lease(self._folder))
        if found is None or found.token != self.lease.token:
            raise taken_over(str(self._path), self.lease, found, PATIENCE_SECONDS)

    def close(self) -> None:
        """Give the folder back. May be called again."""
        if self._stop.is_set():
            return
        self._stop.set()
        if os.getpid() != self.lease.pid:
            return
        self._thread.join()
        try:
            found = Lease.parse(_read_lease(self._folder))
            if found is not None and found.token == self.lease.token:
                os.unlink(LEASE_FILE, dir_fd=self._folder)
        except OSError as error:
            # The next writer waits until it sees that nobody changes the lease.
            _log.warning("the lease %s/%s stays: %s", self._path, LEASE_FILE, error.strerror)
        finally:
            os.close(self._descriptor)
            self._forget()

    def _forget(self) -> None:
        with _held_guard:
            _held.discard(self._identity)

    def _take(self) -> None:
        locked = self._lock()
        content = _read_lease(self._folder)
        if content is not None:
            wait_for_death(
                str(self._path),
                self.lease,
                Lease.parse(content),
                lambda: _read_lease(self._folder),
                PATIENCE_SECONDS,
            )
        # Locked by a process that is dead: the system has not cleaned up after it yet, or a server
        # keeps the lock of a host that is gone. Or by one that is taking the folder over just now.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while locked is False and time.monotonic() < deadline:
            time.sleep(PATIENCE_SECONDS / 200)
            locked = self._lock()
            if (now := _read_lease(self._folder)) != content and now is not None:
                raise self._conflict(Lease.parse(now))
        if locked is False and content is None:
            raise self._conflict(None)
        self._write_lease(os.O_CREAT)
        if not locked:
            _log.warning(
                "%s/.lock cannot be locked; watching the lease for %.0f s instead.",
                self._path,
                BEAT_SECONDS,
            )
            time.sleep(BEAT_SECONDS)
            self.check()

    def _lock(self) -> bool | None:
        """True: we have it. False: another process has it. None: the file system has no locks."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                return None
            raise
        return True

    def _conflict(self, lease: Lease | None) -> WriterConflict:
        return conflict(str(self._path), lease)

    def _write_lease(self, flags: int = 0) -> None:
        self._beats += 1
        # One length for all, so that nothing of an older one stays.
        content = self.lease.to_bytes(self._beats).ljust(_MAX_LEASE_BYTES)
        # Opened and closed each time: that is when NFS shows others a change.
        descriptor = os.open(
            LEASE_FILE, os.O_WRONLY | os.O_NOFOLLOW | flags, 0o666, dir_fd=self._folder
        )
        try:
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)

    def _beat(self) -> None:
        failing = False
        while not self._stop.wait(BEAT_SECONDS):
            try:
                found = Lease.parse(_read_lease(self._folder))
                if found is None or found.token != self.lease.token:
                    return  # taken over: `check` says so
                self._write_lease()
                failing = False
            except OSError as error:
                if not failing:
                    _log.warning("no sign of life in %s: %s", self._path, error.strerror)
                failing = True


def _read_lease(folder: int) -> bytes | None:
    try:
        descriptor = os.open(LEASE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        return os.pread(descriptor, _MAX_LEASE_BYTES, 0)
    finally:
        os.close(descriptor)
