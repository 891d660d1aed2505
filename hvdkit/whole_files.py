"""Write files so that a reader finds the old or the new content, never a part.

An error, such as a full disk, leaves the old file and no other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to. The file becomes `path` unless the block raises an exception.

    If `path` is a link, the file becomes the file to which it leads. A device or a pipe, such as
    /dev/stdout, is not replaced: the block writes to it directly.

    Raises:
        OSError: the file cannot be renamed. The file at `path` is as before.
    """
    if _is_written_directly(path):
        yield path
        return
    path = Path(os.path.realpath(path))
    draft = _draft(path)
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
    draft = _draft(Path(os.path.realpath(path)))
    draft.touch()
    draft.unlink()


def _is_written_directly(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _draft(path: Path) -> Path:
    # Hidden. In a shared folder, another user must not foresee the name, and make a link there.
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
