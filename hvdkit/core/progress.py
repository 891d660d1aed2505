"""Report saved checkpoints and commits to the launcher, which then permits all restarts again."""

import contextlib
import os
from pathlib import Path

from hvdkit import record_files
from hvdkit.core.recorder import FOLDER_VARIABLE


def report_saved() -> None:
    """Report that a checkpoint or a commit was saved. Errors are ignored, because it is saved."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with contextlib.suppress(OSError):
            (Path(folder) / record_files.SAVED).touch()
