"""Run a `--host-discovery-script`. Its output has the format of Horovod's discovery scripts."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.hosts import Host, parse_lines
from hvdkit.processes import wait_for_killed

_SCRIPT_SECONDS = 60.0
_POLL_SECONDS = 0.2
# The most bytes that a script may print.
_MOST_BYTES = 10_000_000
_READ_BYTES = 65536


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
    words = [str(script.absolute())]
    if " " in str(script) and not script.exists():
        words = ["/bin/sh", "-c", str(script)]
    try:
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"--host-discovery-script {script}: {error.strerror}") from error
    try:
        out, errors = _output(process, stopped)
    except _ScriptError as error:
        raise UsageError(f"--host-discovery-script {script} {error}") from error
    except DiscoveryStopped as error:
        raise DiscoveryStopped(f"--host-discovery-script {script} was ended") from error
    finally:
        # The group, because a shell may have started other programs. This user may not signal
        # those that were started with sudo.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        wait_for_killed(process)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
    if process.returncode != 0:
        raise UsageError(
            f"--host-discovery-script {script} failed with exit status {process.returncode}: "
            f"{errors.strip()[-500:] or 'it wrote no error. Run it by hand'}"
        )
    return parse_lines(out, f"--host-discovery-script {script}", slots)


class _ScriptError(Exception):
    """The script did not end, or printed too much."""


def _output(process: subprocess.Popen[bytes], stopped: Callable[[], bool]) -> tuple[str, str]:
    """Return the output and the last errors of a script when it has ended.

    A program that the script has started in the background may still hold the pipes.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    out, errors = bytearray(), bytearray()
    deadline = time.monotonic() + _SCRIPT_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, out)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        while True:
            has_ended = process.poll() is not None
            ready = selector.select(0 if has_ended else _POLL_SECONDS)
            for key, _ in ready:
                if data := os.read(key.fd, _READ_BYTES):
                    key.data.extend(data)
                else:
                    selector.unregister(key.fileobj)
            del errors[:-_READ_BYTES]
            if has_ended and not ready:
                # An error about a line shows bytes that are not UTF-8.
                return out.decode(errors="backslashreplace"), errors.decode(errors="replace")
            if len(out) > _MOST_BYTES:
                raise _ScriptError(
                    f"printed more than {_MOST_BYTES:,} bytes: expected a line HOST:SLOTS for each "
                    f"host. Run it by hand to see what it prints"
                )
            if stopped():
                raise DiscoveryStopped
            if time.monotonic() > deadline:
                raise _ScriptError(
                    f"did not end within {_SCRIPT_SECONDS:g} s. Run it by hand to see where it "
                    f"waits"
                )
            if not selector.get_map() and not has_ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_POLL_SECONDS)
