"""Export a file or a folder, which becomes visible once it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdkit.checkpoint.posix import disk
from hvdkit.errors import HvdkitError


@contextmanager
def exporting(target: Path) -> Iterator[Path]:
    """Yield a path beside `target`. At the end of the block, its content replaces `target`.

    The files of a folder must be on the disk at the end of the block. If the block raises, the
    content is deleted.

    Raises:
        HvdkitError: the content cannot be written.
    """
    # Not a name of `tempfile`, whose files other users could not read.
    beside = target.absolute().with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            yield beside
            if beside.is_dir():
                _sync_folder(beside)
            else:
                with beside.open("rb") as file:
                    os.fsync(file.fileno())
            beside.replace(target)
        finally:
            if beside.is_dir():
                shutil.rmtree(beside, ignore_errors=True)
            else:
                beside.unlink(missing_ok=True)
        _sync_folder(beside.parent)
    except OSError as error:
        raise HvdkitError(f"cannot write {target}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    with disk.folder(folder) as descriptor:
        disk.sync_folder(descriptor, folder.name)
