"""Run a `--host-discovery-script`. Its output has the format of Horovod's discovery scripts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.hosts import Host, parse_hosts

_SCRIPT_SECONDS = 60.0
_POLL_SECONDS = 0.2


class DiscoveryStopped(HvdkitError):
    """The script was ended, because the job ends."""


def discover(
    script: Path, slots: int = 1, stopped: Callable[[], bool] = lambda: False
) -> list[Host]:
    """Return the hosts that a script prints; may be empty.

    A line is `HOST:SLOTS` or `HOST`.

    Args:
        script: an executable.
        slots: the slots of a host without a number.
        stopped: returns whether to end the script.

    Raises:
        UsageError: the script fails, or a line is not a host.
        DiscoveryStopped: the script was ended.
    """
    try:
        process = subprocess.Popen(
            [str(script.absolute())],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="backslashreplace",  # an error about the line shows the bytes
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"--host-discovery-script {script}: {error.strerror}") from error
    deadline = time.monotonic() + _SCRIPT_SECONDS
    with process:
        try:
            out, errors = _communicate(process, deadline, stopped)
        except subprocess.TimeoutExpired as error:
            if stopped():
                raise DiscoveryStopped(f"--host-discovery-script {script} was ended") from error
            raise UsageError(
                f"--host-discovery-script {script} did not end within {_SCRIPT_SECONDS:g} s. "
                f"Run it by hand to see where it waits"
            ) from error
        finally:
            # The group, because a shell may have started other programs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise UsageError(
            f"--host-discovery-script {script} failed with exit status {process.returncode}: "
            f"{errors.strip()[-500:] or 'it wrote no error. Run it by hand'}"
        )
    words = [w if re.search(r":\d+$", w) else f"{w}:{slots}" for w in out.split()]
    return parse_hosts(",".join(words), f"--host-discovery-script {script}:") if words else []


def _communicate(
    process: subprocess.Popen[str], deadline: float, stopped: Callable[[], bool]
) -> tuple[str, str]:
    while True:
        try:
            return process.communicate(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if stopped() or time.monotonic() > deadline:
                raise
