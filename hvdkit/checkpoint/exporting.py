"""Export a file or a folder, which becomes visible once it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdkit.checkpoint.posix import disk
from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import open_regular
from hvdkit.system.whole_files import beside


@contextmanager
def exporting(target: Path) -> Iterator[Path]:
    """Yield a path beside `target`. At the end of the block, its content replaces `target`.

    The files of a folder must be on the disk at the end of the block. If the block raises, the
    content is deleted.

    Raises:
        HvdkitError: the content cannot be written.
    """
    # Not a name of `tempfile`, whose files other users could not read.
    draft = beside(target.absolute())
    try:
        try:
            yield draft
            if draft.is_dir():
                _sync_folder(draft)
            else:
                # In a shared folder, another user may have put a pipe there.
                with open(open_regular(draft), "rb") as file:
                    os.fsync(file.fileno())
            draft.replace(target)
        finally:
            if draft.is_dir():
                shutil.rmtree(draft, ignore_errors=True)
            else:
                draft.unlink(missing_ok=True)
        _sync_folder(draft.parent)
    except OSError as error:
        raise HvdkitError(f"cannot write {target}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    with disk.folder(folder) as descriptor:
        disk.sync_folder(descriptor, folder.name)
