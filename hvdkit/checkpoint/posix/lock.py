"""Allow one writer per folder, over all hosts that share the folder.

A record lock on `.lock` decides between processes of one host, and of several hosts if the file
system supports that. The system releases it when the process ends. A lease in `.writer` names the
writer and has a heartbeat, for file systems without locks between hosts; see `lease`.

The lock is a record lock (`fcntl`), not `flock`, because forked children do not inherit it:
DataLoader workers may outlive a killed trainer for a while. Nothing else may open `.lock`, because
closing any descriptor of it releases the lock. Only users who may write to the folder may open it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path

from hvdkit.checkpoint.errors import CheckpointError, WriterConflict
from hvdkit.checkpoint.lease import MAX_BYTES, Lease, conflict, taken_over, wait_for_death
from hvdkit.system.plain_files import open_regular

LOCK_FILE, LEASE_FILE = ".lock", ".writer"

_log = logging.getLogger(__name__)

#: Seconds between two heartbeats.
BEAT_SECONDS = 5.0
#: Seconds without a heartbeat after which a writer is considered dead.
LEASE_TIMEOUT_SECONDS = 20.0

#: Device and inode of the folders that this process writes to.
_held: set[tuple[int, int]] = set()
_held_guard = threading.Lock()


class FolderLock:
    """The lock of a folder. The constructor takes it, `close` releases it."""

    def __init__(self, path: Path, folder: int) -> None:
        """Args:
            path: the folder, for errors and to check that it still exists.
            folder: the open descriptor of `path`; the caller closes it.

        Raises:
            WriterConflict: another live process, or this one, holds the lock.
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
            # Check before `.lock` is opened: closing it would release the lock of this process.
            if self._identity in _held:
                raise WriterConflict(
                    f"{path} is already open for writing in this process; first close the other "
                    f"Checkpointer of this folder."
                )
            _held.add(self._identity)
        try:
            # A process that may only read the file could lock it for reading, and keep all writers
            # out.
            writers = status.st_mode & 0o022
            mode = 0o600 | writers | writers << 1
            self._descriptor = open_regular(LOCK_FILE, folder, os.O_RDWR | os.O_CREAT, mode)
            try:
                # A file with two names may be any file of this user, to which another user has
                # made a hard link.
                if os.fstat(self._descriptor).st_nlink == 1:
                    with contextlib.suppress(OSError):  # a file of another user, for example
                        os.fchmod(self._descriptor, mode)
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
        """Check that the folder still exists and this process still holds its lock.

        Raises:
            WriterConflict: another process has taken over.
            CheckpointError: the folder was removed, or this process was forked from the writer.
        """
        self.lease.expect_own_process(str(self._path))
        try:
            status = os.stat(self._path)
        except OSError as error:
            raise CheckpointError(
                f"the folder {self._path} is gone ({error.strerror}); nothing can be saved until "
                "the same folder is back."
            ) from error
        if (status.st_dev, status.st_ino) != self._identity:
            raise CheckpointError(
                f"{self._path} is now another folder than the one that was opened, for example "
                "because it was unmounted; nothing can be saved until the same folder is back."
            )
        found = Lease.parse(_read_lease(self._folder))
        if found is None or found.token != self.lease.token:
            raise taken_over(str(self._path), self.lease, found, LEASE_TIMEOUT_SECONDS)

    def close(self) -> None:
        """Release the lock. May be called more than once."""
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
            # The next writer waits until the lease has not changed for some time.
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
                LEASE_TIMEOUT_SECONDS,
                locked=locked is True,
            )
        # The holder of the lock may be a dead process that the system, or a file server, has not
        # cleaned up; or a live one that is taking the folder over now.
        deadline = time.monotonic() + LEASE_TIMEOUT_SECONDS
        while locked is False and time.monotonic() < deadline:
            time.sleep(LEASE_TIMEOUT_SECONDS / 200)
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
        """Try to lock. Return None if the file system does not support locks."""
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
        # All leases have one length, so that no bytes of an older one remain.
        content = self.lease.to_bytes(self._beats).ljust(MAX_BYTES)
        # Open and close the file each time: NFS shows a change to other hosts after the close.
        descriptor = self._open_lease(flags)
        try:
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)

    def _open_lease(self, flags: int) -> int:
        descriptor = open_regular(LEASE_FILE, self._folder, os.O_WRONLY | flags)
        if os.fstat(descriptor).st_nlink < 2:
            return descriptor
        # As for `.lock`. A copy of the folder may consist of hard links, too.
        os.close(descriptor)
        os.unlink(LEASE_FILE, dir_fd=self._folder)
        return open_regular(LEASE_FILE, self._folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def _beat(self) -> None:
        failing = False
        while not self._stop.wait(BEAT_SECONDS):
            try:
                found = Lease.parse(_read_lease(self._folder))
                if found is None or found.token != self.lease.token:
                    return  # Taken over: `check` raises.
                self._write_lease()
                failing = False
            except OSError as error:
                if not failing:
                    _log.warning("cannot renew the lease in %s: %s", self._path, error.strerror)
                failing = True


def _read_lease(folder: int) -> bytes | None:
    try:
        descriptor = open_regular(LEASE_FILE, folder)
    except FileNotFoundError:
        return None
    try:
        return os.pread(descriptor, MAX_BYTES, 0)
    finally:
        os.close(descriptor)
