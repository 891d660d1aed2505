"""Run a `--host-discovery-script`. Its output has the format of Horovod's discovery scripts."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.hosts.hosts import Host, parse_lines
from hvdkit.system.processes import kill_group, wait_for_end, wait_for_killed

_SCRIPT_SECONDS = 60.0
_POLL_SECONDS = 0.05
# The most bytes that a script may print, and the most bytes of its errors.
_MOST_BYTES = 10_000_000


class DiscoveryStopped(HvdkitError):
    """The script was ended, because the job ends."""


def discover(
    script: Path, slots: int = 1, stopped: Callable[[], bool] = lambda: False
) -> list[Host]:
    """Return the hosts that a script prints; may be empty.

    A line is `HOST:SLOTS` or `HOST`.

    Args:
        script: an executable, or a command line for the shell, as in Horovod.
        slots: the slots of a host without a number.
        stopped: returns whether to end the script.

    Raises:
        UsageError: the script fails, or a line is not a host.
        DiscoveryStopped: the script was ended.
    """
    name = f"--host-discovery-script {script}"
    words = [str(script.absolute())]
    if " " in str(script) and not script.exists():
        words = ["/bin/sh", "-c", str(script)]
    # Files, because a program that the script has started in the background may hold pipes. In
    # memory, because other users may have filled the disk.
    with _file("output") as out, _file("errors") as errors:
        try:
            process = subprocess.Popen(
                words, stdout=out, stderr=errors, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise UsageError(f"{name}: {error.strerror}") from error
        deadline = time.monotonic() + _SCRIPT_SECONDS
        try:
            while (
                wait_for_end(process, _POLL_SECONDS) is None
                and max(map(_size, (out, errors))) <= _MOST_BYTES
            ):
                if stopped():
                    raise DiscoveryStopped(f"{name} was ended")
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"{name} did not end within {_SCRIPT_SECONDS:g} s. Run it by hand to see "
                        f"where it waits"
                    )
        finally:
            # The group, because a shell may have started other programs.
            kill_group(process)
            wait_for_killed(process)
        out.seek(0)
        text = out.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES or _size(errors) > _MOST_BYTES:
            raise UsageError(
                f"{name} printed more than {_MOST_BYTES:,} bytes: expected a line HOST:SLOTS for "
                f"each host. Run it by hand to see what it prints"
            )
        if process.returncode != 0:
            errors.seek(max(0, _size(errors) - 500))
            last = errors.read(500).decode(errors="replace").strip()
            raise UsageError(
                f"{name} failed with exit status {process.returncode}: "
                f"{last or 'it wrote no error. Run it by hand'}"
            )
    # An error about a line shows bytes that are not UTF-8.
    return parse_lines(text.decode(errors="backslashreplace"), name, slots)


def _file(name: str) -> IO[bytes]:
    return open(os.memfd_create(f"hvdkit-{name}"), "w+b")


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
