"""Report saved checkpoints and commits to the launcher."""

import contextlib
import os
from pathlib import Path

from hvdkit.runtime import record_files
from hvdkit.runtime.recorder import FOLDER_VARIABLE


def report_saved() -> None:
    """Report a new checkpoint or a new commit. The launcher then permits all restarts again."""
    _touch(record_files.SAVED)


def report_committed() -> None:
    """Report that this host has the newest commit of an elastic job."""
    _touch(record_files.COMMITTED)


def _touch(name: str) -> None:
    if folder := os.environ.get(FOLDER_VARIABLE):
        with contextlib.suppress(OSError):  # the checkpoint or commit is saved nevertheless
            (Path(folder) / name).touch()
