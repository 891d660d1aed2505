"""Write files so that a reader finds the old or the new content, never a part.

An error, such as a full disk, leaves the old file and no other. In a shared folder, a link or a
pipe of another user is not written to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import open_regular

# As in Linux. Opening a path with more links fails.
_MOST_LINKS = 40
_DESCRIPTORS = "/proc/self/fd"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to. The file becomes `path` unless the block raises an exception.

    If `path` is a link, the file becomes the file to which it leads. A device or a pipe, such as
    /dev/stdout, is not replaced: the block writes to it directly.

    Raises:
        OSError: the file cannot be renamed, or `path` is a link or a pipe of another user. The file
            at `path` is as before.
    """
    with _target(path) as (path, is_written_directly):
        if is_written_directly:
            yield path
            return
        draft = beside(path)
        try:
            yield draft
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


def write(path: Path, text: str) -> None:
    """Write a text in UTF-8 to a file, as `replacing` does.

    Raises:
        OSError: as for `replacing`.
    """
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def open_to_write(path: Path, flags: int) -> int:
    """Open a regular file for writing, and return its descriptor. Make it if it does not exist.

    If `path` is a link, it is the file to which it leads.

    Args:
        flags: flags of `os.open`, such as O_WRONLY | O_APPEND.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or `path` is a link or a pipe of
            another user, or may be a hard link of another user to any file of this user.
    """
    with _target(path) as (target, _):
        # Truncate only after the check.
        descriptor = open_regular(target, flags=(flags & ~os.O_TRUNC) | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_nlink > 1 and _others_may_link(target.parent):
                reason = "it has a second name, which another user may have made"
                raise PermissionError(errno.EACCES, reason, str(path))
            if flags & os.O_TRUNC:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _others_may_link(folder: Path) -> bool:
    """Return whether other users may make files in a folder, also if it is sticky."""
    status = folder.stat()
    return status.st_uid not in (0, os.geteuid()) or bool(
        status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def create(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file. After an error, such as a full disk, there is no file.

    Raises:
        FileExistsError: there is a file at `path`.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def create_for(option: str, path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file that the user has named. A file that the user may have edited stays.

    Raises:
        HvdkitError: there is a file at `path`, or it cannot be written.
    """
    try:
        create(path, data, mode)
    except FileExistsError:
        raise HvdkitError(f"{option} {path} exists; remove it, or choose another name") from None
    except OSError as error:
        raise HvdkitError(f"{option} {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Check that `replacing` can write to `path`, which is no folder.

    Raises:
        OSError: it cannot.
    """
    with _target(path) as (path, is_written_directly):
        if is_written_directly:
            # Opening a pipe would wait for its reader.
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return
        draft = beside(path)
        draft.touch()
        draft.unlink()


def beside(path: Path) -> Path:
    """Return a hidden name for a new file or folder in the folder of `path`.

    In a shared folder, another user must not foresee the name, and make a link there.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def _target(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the file to which a path leads, and whether it is a device or a pipe.

    Each link is opened, and then read. Otherwise, another user could exchange it between the check
    of its owner and its use. For the same reason, the path of a device or a pipe is that of its
    descriptor.

    Raises:
        OSError: a link or a pipe belongs to another user, or there are too many links.
    """
    for _ in range(_MOST_LINKS):
        try:
            opened = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield path, False
            return
        try:
            found = os.fstat(opened)
            is_link = stat.S_ISLNK(found.st_mode)
            # A link of another user leads to a file that this user did not name, and a pipe sends
            # the content to that user.
            if (is_link or stat.S_ISFIFO(found.st_mode)) and found.st_uid not in (0, os.geteuid()):
                what = "link" if is_link else "pipe"
                raise PermissionError(errno.EACCES, f"it is a {what} of another user", str(path))
            if not is_link:
                is_file = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
                yield (path, False) if is_file else (Path(f"{_DESCRIPTORS}/{opened}"), True)
                return
            leads_to = os.readlink("", dir_fd=opened)
            if path.parent.is_relative_to("/proc") and not os.path.isabs(leads_to):
                yield path, True  # a pipe or a socket of a process, as in /dev/stdout
                return
        finally:
            os.close(opened)
        path = path.parent / leads_to
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
