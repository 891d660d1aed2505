"""Errors of checkpoints."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdkit.errors import HvdkitError


class CheckpointError(HvdkitError):
    """A checkpoint cannot be written or read. Says which file, why, and what to do."""


class WriterConflict(CheckpointError):
    """Another process is writing to the same folder, or has taken it over."""


class Damaged(CheckpointError):
    """A file of a checkpoint is missing or is not what was written."""

    def __init__(self, file: str, reason: str) -> None:
        # What a stranger's file is quoted with must not steer the terminal that shows it.
        self.file, self.reason = printable(file), printable(reason)
        super().__init__(f"{self.file}: {self.reason}")


def printable(text: str) -> str:
    """`text` with `?` in place of what would not show as a character."""
    return "".join(character if character.isprintable() else "?" for character in text)


#: What to do about an error of the system.
_ADVICE = {
    errno.ENOSPC: "Free some space, or keep fewer steps",
    errno.EDQUOT: "Free some of your quota, or keep fewer steps",
    errno.EROFS: "Give a folder that can be written to",
    errno.EACCES: "Check its permissions and its owner, or give another folder",
    errno.EPERM: "Check its permissions and its owner, or give another folder",
    errno.ENOENT: "Somebody has removed it; see that it is there",
    errno.EIO: "Check the disk, or the connection to it",
}


@contextmanager
def failing(action: str, path: str | Path) -> Iterator[None]:
    """Turn the system's errors while `action` is done to `path` into a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Check the disk and the folder")
        name = error.filename
        inside = f" of {name}" if isinstance(name, str) and name not in str(path) else ""
        raise CheckpointError(
            f"cannot {action} {path}: {error.strerror}{inside}. {advice}; the steps that are "
            f"listed are whole."
        ) from error
