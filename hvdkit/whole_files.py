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

# As in Linux. Opening a path with more links fails.
_MOST_LINKS = 40


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to. The file becomes `path` unless the block raises an exception.

    If `path` is a link, the file becomes the file to which it leads. A device or a pipe, such as
    /dev/stdout, is not replaced: the block writes to it directly.

    Raises:
        OSError: the file cannot be renamed, or `path` is a link or a pipe of another user. The file
            at `path` is as before.
    """
    if _is_written_directly(path):
        yield path
        return
    path = Path(os.path.realpath(path))
    draft = beside(path)
    try:
        yield draft
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


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


def check_writable(path: Path) -> None:
    """Check that `replacing` can write to `path`, which is no folder.

    Raises:
        OSError: it cannot.
    """
    if _is_written_directly(path):
        # Opening a pipe would wait for its reader.
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    draft = beside(Path(os.path.realpath(path)))
    draft.touch()
    draft.unlink()


def beside(path: Path) -> Path:
    """Return a hidden name for a new file or folder in the folder of `path`.

    In a shared folder, another user must not foresee the name, and make a link there.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _is_written_directly(path: Path) -> bool:
    """Return whether `path` is a device or a pipe.

    Raises:
        OSError: `path` is a link or a pipe of another user.
    """
    _check_owners(path)
    return path.exists() and not path.is_file()


def _check_owners(path: Path) -> None:
    # A link of another user leads to a file that this user did not name, and a pipe sends the
    # content to that user.
    for _ in range(_MOST_LINKS):
        try:
            found = path.lstat()
        except FileNotFoundError:
            return
        is_link = stat.S_ISLNK(found.st_mode)
        if (is_link or stat.S_ISFIFO(found.st_mode)) and found.st_uid not in (0, os.geteuid()):
            what = "link" if is_link else "pipe"
            raise PermissionError(errno.EACCES, f"it is a {what} of another user", str(path))
        if not is_link:
            return
        path = path.parent / path.readlink()
