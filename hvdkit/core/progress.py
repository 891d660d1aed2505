"""Report saved checkpoints and commits to the launcher, which then permits all restarts again."""

import contextlib
import os
from pathlib import Path

from hvdkit.core.recorder import FOLDER_VARIABLE

#: The file in the folder of HVDKIT_RECORD_DIR that is touched after each save.
FILE = "saved"


def report_saved() -> None:
    """Report that a checkpoint or a commit was saved. Errors are ignored, because it is saved."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with contextlib.suppress(OSError):
            (Path(folder) / FILE).touch()
