"""Signals that ask a job to stop, noted for the loop to look at."""

import logging
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hvdkit.errors import UsageError

_log = logging.getLogger("hvdkit.checkpoint")

#: What schedulers, launchers and people send: SIGTERM before a time limit or a preemption, SIGINT
#: from the keyboard, SIGUSR1 where a Slurm script asks for it (`--signal`).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_SAME_SECONDS = 3.0


class StopSignals:
    """Notes signals that ask this process to stop.

    One that comes again, some seconds later, does what it would have done without us, so a job
    that no longer comes to the end of a step can still be ended. Sooner it is taken for the same
    one, because a terminal and a launcher may both pass it on.

    Args:
        numbers: the signals to note, such as `signal.SIGTERM`; may be empty.

    Attributes:
        asked: what has asked to stop, such as "SIGTERM"; empty if nothing has.

    Raises:
        UsageError: they are no signals that can be noted.
    """

    def __init__(self, numbers: Sequence[int] = STOP_SIGNALS) -> None:
        self.asked = ""
        try:
            self._numbers = [signal.Signals(number) for number in numbers]
        except ValueError as error:
            raise UsageError(
                f"stop_signals is {list(numbers)}: {error}; expected some of signal.SIGTERM, ..."
            ) from error
        if signal.SIGKILL in self._numbers or signal.SIGSTOP in self._numbers:
            raise UsageError("stop_signals has SIGKILL or SIGSTOP, which no process can note")
        self._installed = False
        self._previous: dict[int, Any] = {}
        self._since: dict[int, float] = {}

    def install(self) -> None:
        """Begin to note them. Nothing outside the main thread, where Python cannot."""
        if self._installed or not self._numbers:
            return
        self._installed = True
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._numbers)
            _log.warning("not in the main thread: this job is not saved at %s", names)
            return
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Restore the handlers that the signals had before."""
        if threading.current_thread() is threading.main_thread():
            for number in list(self._previous):
                self._restore(number)
            self._installed = False

    def _restore(self, number: int) -> None:
        previous = self._previous.pop(number)
        # Someone who has put a handler of their own in place since then keeps it. None: a handler
        # that was not set by Python, and that Python cannot set again.
        if signal.getsignal(number) == self._note:
            signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        now = time.monotonic()
        if now > self._since.setdefault(number, now) + _SAME_SECONDS:
            self._restore(number)
            signal.raise_signal(number)
