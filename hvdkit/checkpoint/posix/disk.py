"""File operations on an open folder, each mostly one system call.

Names are relative to the folder, and symbolic links are not followed: links in an untrusted folder
cannot lead out of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.system.plain_files import open_regular

#: Called before each operation with its name and the file's name. For tests: it may raise an error
#: in place of the system, or end the process.
before_step: Callable[[str, str], None] | None = None

#: Errors that show that a file is damaged. Others show only that it cannot be read now.
_DAMAGE = {
    errno.ENOENT: "it is missing",
    errno.ENOTDIR: "it is not a folder",
    errno.ELOOP: "it is a symbolic link, which is not followed",
    errno.ENXIO: "it is not a regular file",
}


# Errors of file systems where a file cannot have a second name.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES}
_COPIED_BYTES = 1 << 20

# A read that fails with EIO may succeed a moment later, on a disk or a file server.
_READ_TRIES = 4
_READ_AGAIN_SECONDS = 0.2


def _step(name: str, file: str) -> None:
    if before_step is not None:
        before_step(name, file)


def open_folder(path: str | Path, parent: int | None = None) -> int:
    """Open a folder. In `parent`, it may not be a symbolic link."""
    follow = 0 if parent is None else os.O_NOFOLLOW
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | follow, dir_fd=parent)


@contextmanager
def folder(path: str | Path, parent: int | None = None) -> Iterator[int]:
    """Open a folder for the duration of a block. In `parent`, it may not be a symbolic link."""
    descriptor = open_folder(path, parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """Create the folder `path` and its missing parents, durably."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        with folder(made.parent) as descriptor:
            sync_folder(descriptor, made.parent.name)


def make_folder(name: str, parent: int) -> None:
    """Create the folder `name`."""
    _step("mkdir", name)
    os.mkdir(name, dir_fd=parent)


def create(name: str, parent: int) -> int:
    """Create the file `name`, which must not exist, for writing and reading."""
    _step("create", name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.open(name, flags, 0o666, dir_fd=parent)


def link(name: str, old: int, new: int) -> None:
    """Link the file `name` of the folder `old` into `new`; copy it if links are not supported."""
    _step("link", name)
    try:
        os.link(name, name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    source, size = open_plain(name, old)
    try:
        target = create(name, new)
        try:
            buffer = np.empty(min(size, _COPIED_BYTES), np.uint8)
            for offset in range(0, size, _COPIED_BYTES):
                piece = buffer[: min(_COPIED_BYTES, size - offset)]
                read_into(source, piece, offset, name)
                write(target, piece.data, name)
            sync(target, name)
        finally:
            os.close(target)
    finally:
        os.close(source)


def write(descriptor: int, data: memoryview, name: str) -> None:
    """Append all of `data`."""
    while data:
        _step("write", name)
        data = data[os.write(descriptor, data) :]


def sync(descriptor: int, name: str) -> None:
    """Wait until the content and size of a file are on the disk."""
    _step("fsync", name)
    os.fsync(descriptor)


def forget(descriptor: int, begin: int, end: int) -> None:
    """Drop a part of a file from the page cache, so that the next read reads the disk.

    Pages that are not on the disk yet stay in memory, and Linux begins to write them. A file system
    in memory, such as tmpfs, drops nothing.
    """
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def sync_folder(descriptor: int, name: str) -> None:
    """Wait until the names in a folder are on the disk."""
    _step("fsync folder", name)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot fsync a folder; their renames are on the server at once.
        if error.errno != errno.EINVAL:
            raise


def names(descriptor: int) -> list[str]:
    """List the names in an open folder."""
    # Open the folder again: on sshfs, an open folder lists its names only once.
    with folder(".", descriptor) as anew:
        return os.listdir(anew)


def rename(old: str, new: str, parent: int) -> None:
    """Rename a folder in `parent`. Fail if `new` is a folder that is not empty."""
    _step("rename", old)
    os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)


def remove(name: str, parent: int) -> None:
    """Remove the folder `name` and its content. Links are removed, not followed.

    After an error, remove the rest and then raise the first error.
    """
    first: OSError | None = None
    with folder(name, parent) as descriptor:
        for entry in names(descriptor):
            try:
                if stat.S_ISDIR(os.lstat(entry, dir_fd=descriptor).st_mode):
                    remove(entry, descriptor)
                else:
                    _step("unlink", entry)
                    os.unlink(entry, dir_fd=descriptor)
            except OSError as error:
                first = first or error
    if first:
        raise first
    _step("rmdir", name)
    os.rmdir(name, dir_fd=parent)


def open_plain(name: str, parent: int) -> tuple[int, int]:
    """Open the regular file `name` for reading. Return the descriptor and the size in bytes.

    Raises:
        Damaged: the file is missing, or is not a regular file.
        CheckpointError: it cannot be opened now; it may be intact.
    """
    with reading(name):
        descriptor = _tried(lambda: open_regular(name, parent))
        size = os.fstat(descriptor).st_size
    with contextlib.suppress(OSError):
        # Let the kernel read further ahead: large files are read sequentially.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return descriptor, size


def read_into(descriptor: int, out: np.ndarray, offset: int, name: str) -> None:
    """Fill `out` (uint8) with the bytes from `offset` on.

    Raises:
        Damaged: the file is too short.
        CheckpointError: it cannot be read now; it may be intact.
    """
    left = out.data

    def read() -> int:
        _step("read", name)
        return os.preadv(descriptor, [left], offset)

    while left:
        with reading(name):
            count = _tried(read)
        if count == 0:
            raise Damaged(name, f"it ends at byte {offset}, {len(left)} bytes too early")
        left, offset = left[count:], offset + count


def _tried(call: Callable[[], int]) -> int:
    """Repeat `call` a few times while it fails with EIO."""
    for _ in range(_READ_TRIES - 1):
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        time.sleep(_READ_AGAIN_SECONDS)
    return call()


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert the system's errors for the file `name` to `Damaged` or `CheckpointError`."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        if number in _DAMAGE:
            raise Damaged(name, _DAMAGE[number]) from error
        raise CheckpointError(
            f"{name} cannot be read: {error.strerror}. Nothing was changed; try again when it is "
            f"readable, or choose another step."
        ) from error
