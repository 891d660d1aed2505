"""Errors of checkpoints."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.system.plain_files import printable


class CheckpointError(HvdkitError):
    """A checkpoint cannot be written or read. Names the file, the reason and a remedy."""


class WriterConflict(CheckpointError):
    """Another process is writing to the same folder, or has taken it over."""


class NoneGood(CheckpointError):
    """There are steps, and none of them is good."""


class Damaged(CheckpointError):
    """A file of a checkpoint is missing, or differs from the file that was written."""

    def __init__(self, file: str, reason: str) -> None:
        self.file = printable(file, one_line=True)
        self.reason = printable(reason, one_line=True)
        super().__init__(f"{self.file}: {self.reason}")


#: Advice for errors of the operating system.
_ADVICE = {
    errno.ENOSPC: "Free some space, or keep fewer steps",
    errno.EDQUOT: "Free some of your quota, or keep fewer steps",
    errno.EROFS: "Give a folder that can be written to",
    errno.EACCES: "Check its permissions and its owner, or give another folder",
    errno.EPERM: "Check its permissions and its owner, or give another folder",
    errno.ENOENT: "Check that it exists: it may have been removed",
    errno.EIO: "Check the disk, or the connection to it",
}


@contextmanager
def failing(action: str, path: str | Path) -> Iterator[None]:
    """Raise a `CheckpointError` for an `OSError` while doing `action` to `path`."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Check the disk and the folder")
        name = error.filename
        inside = f" ({name})" if isinstance(name, str) and name not in str(path) else ""
        raise CheckpointError(
            f"cannot {action} {path}: {error.strerror}{inside}. {advice}; the steps "
            f"that `hvdkit checkpoint ls` lists are complete."
        ) from error
