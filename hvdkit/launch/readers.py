"""Write to standard output and error, whose reader may not read: `less`, or a `tee` that hangs.

A write waits for the reader. After a stop signal, the wait has a limit. Otherwise the launcher
could not notice that the ranks have ended, and would not end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time

# Bytes. A pipe that is writable takes so many without a wait.
_PIECE_BYTES = select.PIPE_BUF
# Seconds. A signal handler may set a limit during a wait.
_POLL_SECONDS = 0.2

# When to end all waits (`time.monotonic`).
_limit = float("inf")


def wait() -> None:
    """Wait for readers without a limit, until `give_up_at` sets one."""
    global _limit
    _limit = float("inf")


def give_up_at(limit: float) -> None:
    """Set the time at which this process no longer waits for readers. The earliest time holds."""
    global _limit
    _limit = min(_limit, limit)


def write(descriptor: int, data: bytes) -> None:
    """Write all data.

    The descriptor may be non-blocking: another program that shares the terminal or the pipe may
    have set this, for example a rank of `--debug-rank`.

    Raises:
        TimeoutError: the reader does not read, and the limit of `give_up_at` has passed.
        OSError: of the system, such as for a full disk or a closed pipe.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data:
        if poll.poll(1000 * _POLL_SECONDS):
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(descriptor, data[:_PIECE_BYTES]) :]
        elif time.monotonic() > _limit:
            raise TimeoutError(errno.ETIMEDOUT, "its reader does not read")
