"""The folders of `--output-dir`: one for each start, with the ranks' output and the failure."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hvdkit.errors import UsageError
from hvdkit.launch.failures import Failure
from hvdkit.launch.plan import Plan

#: A link to the folder of the last start.
LATEST = "latest"
ERROR = "error.json"


def make(directory: Path) -> Path:
    """Make the folder of a start in `directory`, named after the time (UTC), and return it.

    Raises:
        UsageError: it cannot be made.
    """
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = directory / (now if number == 1 else f"{now}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise UsageError(f"--output-dir {directory}: {error.strerror}") from error
    with suppress(OSError):  # where there are no links
        new = directory / f".{LATEST}.{os.getpid()}"
        new.symlink_to(folder.name)
        new.replace(directory / LATEST)
    return folder


def write_error(folder: Path, failure: Failure, plan: Plan, say: Callable[[str], None]) -> None:
    """Write what is known of the failure that ended a job.

    The file has `rank`, `host`, `status` (its exit status; null after a signal), `signal` (its
    name; null otherwise), `exception` and `traceback` (null and empty without one) and
    `last_lines`.
    """
    died = failure.status < 0
    told = {
        "rank": failure.rank,
        "host": plan.places[failure.rank].host.name,
        "status": None if died else failure.status,
        "signal": signal.Signals(-failure.status).name if died else None,
        "exception": failure.exception,
        "traceback": failure.traceback,
        "last_lines": list(failure.tail),
    }
    try:
        (folder / ERROR).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"{folder / ERROR}: {error.strerror}")
