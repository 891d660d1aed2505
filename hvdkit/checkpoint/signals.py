"""Record the signals that ask a job to stop; `Manager.maybe_save` reads the record."""

import logging
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hvdkit.errors import UsageError
from hvdkit.signals import restore

_log = logging.getLogger("hvdkit.checkpoint")

#: SIGTERM comes before a time limit or a preemption, SIGINT from the keyboard, SIGUSR1 from a Slurm
#: script with `--signal`.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_SAME_SECONDS = 3.0


class StopSignals:
    """Record the signals that ask this process to stop.

    A second signal of the same kind, more than 3 seconds later, has its original effect: it can
    stop a job that does not reach the end of a step. A second signal within 3 seconds counts as the
    first one, because a terminal and a launcher may both forward it.

    Args:
        numbers: the signals to record, such as `signal.SIGTERM`; may be empty.

    Attributes:
        asked: the name of the last signal, such as "SIGTERM"; empty if there was none.
        unanswered: the last signal, until the job is stopped for it; None if there is none.

    Raises:
        UsageError: a number is not a signal that a process can handle.
    """

    def __init__(self, numbers: Sequence[int] = STOP_SIGNALS) -> None:
        self.asked = ""
        self.unanswered: int | None = None
        try:
            self._numbers = [signal.Signals(number) for number in numbers]
        except ValueError as error:
            raise UsageError(
                f"stop_signals is {list(numbers)}: {error}; expected some of signal.SIGTERM, ..."
            ) from error
        if signal.SIGKILL in self._numbers or signal.SIGSTOP in self._numbers:
            raise UsageError(
                "stop_signals has SIGKILL or SIGSTOP, which no process can handle: remove it"
            )
        self._installed = False
        self._previous: dict[int, Any] = {}
        self._since: dict[int, float] = {}

    def install(self) -> None:
        """Install the handlers. In another thread than the main thread, only log a warning.

        Python can install signal handlers in the main thread only.
        """
        if self._installed or not self._numbers:
            return
        self._installed = True
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in self._numbers)
            _log.warning(
                "the checkpointer is used outside the main thread, so %s does not save this job; "
                "use it in the main thread, or set stop_signals=() if you handle signals yourself",
                names,
            )
            return
        for number in self._numbers:
            self._previous[number] = signal.signal(number, self._record)

    def remove(self) -> None:
        """Restore the handlers that the signals had before."""
        if threading.current_thread() is threading.main_thread():
            for number in list(self._previous):
                self._restore(number)
            self._installed = False

    def deliver(self) -> None:
        """Raise a recorded signal again if no save stopped the job for it. Call `remove` first."""
        number, self.unanswered = self.unanswered, None
        if number is not None:
            signal.raise_signal(number)

    def _restore(self, number: int) -> None:
        previous = self._previous.pop(number)
        # Keep a handler that the user has installed since.
        if signal.getsignal(number) == self._record:
            restore(number, previous)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self.unanswered = number
        now = time.monotonic()
        if now > self._since.setdefault(number, now) + _SAME_SECONDS:
            self._restore(number)
            self.unanswered = None
            signal.raise_signal(number)
