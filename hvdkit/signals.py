"""The signals that ask a job to stop, and their handlers."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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


def restore(number: int, previous: Any) -> None:
    """Install a handler that `signal.signal` has returned.

    None stands for a handler that was not installed by Python, and that Python cannot install
    again. Then the signal gets its default handler.
    """
    signal.signal(number, signal.SIG_DFL if previous is None else previous)
