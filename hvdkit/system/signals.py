"""The signals that ask a job to stop: their handlers, and the exit status after one of them."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hvdkit.errors import RESUMABLE

#: SIGINT: Ctrl-C. SIGTERM: a batch system ends the job. SIGUSR1: a batch system will end the job
#: soon. SIGHUP: the terminal was closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` for each stop signal, and restore the previous handlers at the end.

    A signal that this process ignores (nohup, a shell's background job) stays ignored.
    """
    handled = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            restore(number, handler_before)


@contextmanager
def ignored(number: int) -> Iterator[None]:
    """Ignore a signal. Programs that this process starts ignore it, too, until they handle it."""
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        restore(number, previous)


def restore(number: int, previous: Any) -> None:
    """Install a handler that `signal.signal` has returned.

    None stands for a handler that was not installed by Python, and that Python cannot install
    again. Then the signal gets its default handler.
    """
    signal.signal(number, signal.SIG_DFL if previous is None else previous)


# Whether stop signals are only noted, and the first one that was noted.
_notes = False
_noted: signal.Signals | None = None


def begin_to_note() -> None:
    """Only note stop signals from now on, because the end of the command is already known."""
    global _notes
    _notes = True


def stop_noting() -> signal.Signals | None:
    """Let stop signals end the command again, unless one was noted. Return the first noted one."""
    global _notes
    _notes = _noted is not None
    return _noted


def forget_noted() -> None:
    """Let stop signals end the command, which begins now."""
    global _notes, _noted
    _notes, _noted = False, None


def noted() -> signal.Signals | None:
    """Return the first stop signal that was only noted; None for none."""
    return _noted


def note(number: int) -> bool:
    """Note a stop signal. Return False if it ends the command instead."""
    global _noted
    if _notes:
        _noted = _noted or signal.Signals(number)
    return _notes


def status_before_start(number: signal.Signals) -> int:
    """Return the exit status of a job that a signal stopped before any rank was started.

    It is `RESUMABLE` for a batch system's signals only, not for Ctrl-C or a closed terminal.
    """
    by_batch_system = number in (signal.SIGTERM, signal.SIGUSR1)
    return RESUMABLE if by_batch_system else 128 + number
