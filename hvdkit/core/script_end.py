"""Note for the launcher that the script has made an orderly end, although its process still runs.

At the end of a script, Python waits for threads that are not daemons and for the processes of
`multiprocessing`. The launcher would wait for a rank that has nothing left to save.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path

from hvdkit import record_files
from hvdkit.core.recorder import FOLDER_VARIABLE

# The process, the rank and the status of the last call of `note_end_with`.
_last: tuple[int, int, int] | None = None


def note_end_with(status: int, rank: int) -> None:
    """Write the note when the script ends. Call this before raising `SystemExit(status)`.

    If the script catches `SystemExit`, the launcher uses the exit status of the process. It uses
    the noted status only if the process does not end by itself.

    Args:
        status: the exit status.
        rank: the rank of this process.
    """
    global _last
    is_registered = _last is not None and _last[0] == os.getpid()
    _last = os.getpid(), rank, status
    # Unlike functions of `atexit`, these run before Python waits for threads. Each runs before
    # those that were registered earlier, such as the one that waits for ThreadPoolExecutor.
    register = getattr(threading, "_register_atexit", None)
    if register is not None and not is_registered:
        with contextlib.suppress(RuntimeError):  # the script has already ended
            register(_write)


def _write() -> None:
    """Write the note, unless this is a forked process, or an exception has ended the script."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or _last is None or hasattr(sys, "last_value"):
        return
    pid, rank, status = _last
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            (Path(folder) / record_files.SCRIPT_ENDED.format(rank, status, pid)).touch()
