"""Write to standard output and error, whose reader may not read: `less`, or a `tee` that hangs.

`say` prints each message of `hvdkit run` for the user.

A write waits for the reader. After a stop signal, the wait has a limit. Otherwise the launcher
could not notice that the ranks have ended, and would not end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Iterator

from hvdkit.system.plain_files import printable
from hvdkit.system.signals import noted

# Bytes. A pipe that is writable takes so many without a wait.
_PIECE_BYTES = select.PIPE_BUF
# Seconds. A signal handler may set a limit during a wait.
_POLL_SECONDS = 0.2
_FULL_SECONDS = 0.02
# The limit after a stop signal, and the pause that a reader may make after it. Ranks may write
# while they stop.
_SOON_SECONDS, _PAUSE_SECONDS = 10.0, 2.0
_NOW_SECONDS = 1.0

# When to end all waits (`time.monotonic`), and the shortest wait for a reader after this time.
_limit = _shortest = float("inf")


def say(text: str) -> None:
    """Print a message of `hvdkit run`."""
    # Do not use sys.stderr, because a signal handler may call this during another write. Ignore
    # errors, because a closed terminal must not prevent the ranks from saving.
    with contextlib.suppress(OSError):
        write(2, f"hvdkit run: {printable(text)}\n".encode())


def wait() -> None:
    """Wait for readers without a limit, until `give_up_at` sets one."""
    global _limit, _shortest
    _limit = _shortest = float("inf")


def give_up_at(limit: float, shortest: float) -> None:
    """Set the time at which this process no longer waits for readers. The earliest time holds.

    Args:
        limit: the time (`time.monotonic`).
        shortest: the seconds that a reader may pause after this time. Otherwise output of ranks
            that stop slowly is lost when its reader pauses for a moment.
    """
    global _limit, _shortest
    _limit, _shortest = min(_limit, limit), min(_shortest, shortest)


def give_up_soon() -> None:
    """Set the limit after the first stop signal."""
    give_up_at(time.monotonic() + _SOON_SECONDS, _PAUSE_SECONDS)


def give_up_now() -> None:
    """Set the limit after a second stop signal."""
    give_up_at(time.monotonic() + _NOW_SECONDS, shortest=0.0)


def write(descriptor: int, data: bytes) -> None:
    """Write all data.

    The descriptor may be non-blocking: another program that shares the terminal or the pipe may
    have set this, for example a rank of `--debug-rank`.

    Raises:
        TimeoutError: the reader does not read, and the limit of `give_up_at` has passed.
        OSError: of the system, such as for a full disk or a closed pipe.
    """
    with _without_wait(descriptor) as descriptor:
        read_at = time.monotonic()
        while data:
            if written := _write_piece(descriptor, data, _POLL_SECONDS):
                data, read_at = data[written:], time.monotonic()
                continue
            if noted() is not None:
                give_up_soon()
            if time.monotonic() > max(_limit, read_at + _shortest):
                raise TimeoutError(errno.ETIMEDOUT, "its reader does not read")


def write_ready(descriptor: int, data: bytearray) -> None:
    """Write what the reader takes without a wait, and remove it from `data`.

    Raises:
        OSError: of the system, such as for a full disk or a closed pipe.
    """
    with _without_wait(descriptor) as descriptor:
        while data and (written := _write_piece(descriptor, data, 0)):
            del data[:written]


def discard(descriptor: int) -> None:
    """Let what is written to a descriptor go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _write_piece(descriptor: int, data: bytes | bytearray, wait: float) -> int:
    """Write the first bytes after at most `wait` seconds. Return their number."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(1000 * wait):
        return 0
    try:
        return os.write(descriptor, data[:_PIECE_BYTES])
    except BlockingIOError:
        # A terminal with space for one byte is writable, but a line end needs two.
        time.sleep(min(wait, _FULL_SECONDS))
        return 0


@contextlib.contextmanager
def _without_wait(descriptor: int) -> Iterator[int]:
    """Open a terminal again, so that a write does not wait for it. Yield the new descriptor.

    A writable terminal may have less space than a piece. The mode of the given descriptor stays,
    because other processes share it, such as the shell.
    """
    own = -1
    if os.isatty(descriptor):
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # the terminal of another user, after `su`
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
    try:
        yield descriptor if own < 0 else own
    finally:
        if own >= 0:
            os.close(own)
