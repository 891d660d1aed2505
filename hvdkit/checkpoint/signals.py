"""Record the signals that ask a job to stop; `Manager.maybe_save` reads the record."""

import logging
import os
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
        # The process whose signals are recorded, and these signals.
        self._process = 0
        self._recorded: set[int] = set()
        # The handlers before ours. They are kept after `remove`, because a handler that was
        # installed later may still call ours.
        self._previous: dict[int, Any] = {}
        self._since: dict[int, float] = {}

    def install(self) -> None:
        """Install the handlers, once. In another thread than the main one, only log a warning.

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
        self._process = os.getpid()
        for number in self._numbers:
            self._recorded.add(number)
            self._previous[number] = signal.signal(number, self._record)

    def remove(self) -> None:
        """Restore the handlers that the signals had before. Later signals are not recorded."""
        self._recorded.clear()
        if threading.current_thread() is threading.main_thread():
            for number in self._previous:
                self._restore(number)

    def deliver(self) -> None:
        """Raise a recorded signal again if no save stopped the job for it. Call `remove` first."""
        number, self.unanswered = self.unanswered, None
        if number is not None:
            signal.raise_signal(number)

    def _restore(self, number: int) -> None:
        # Keep a handler that the user has installed since.
        if signal.getsignal(number) == self._record:
            restore(number, self._handler_before(number))

    def _handler_before(self, number: int) -> Any:
        """Return the handler before ours, except those of checkpointers that are closed."""
        previous = self._previous[number]
        owner = getattr(previous, "__self__", None)
        if isinstance(owner, StopSignals) and number not in owner._recorded:
            return owner._handler_before(number)
        return previous

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child has inherited the handler. The workers of a `DataLoader` must survive
            # signals to all processes of the job. But `Process.terminate` sends SIGTERM, and the
            # parent then waits for the end of the child.
            if number == signal.SIGTERM:
                self._pass_on(number, frame)
            return
        if number not in self._recorded:
            self._pass_on(number, frame)
            return
        self.asked = signal.Signals(number).name
        self.unanswered = number
        now = time.monotonic()
        if now > self._since.setdefault(number, now) + _SAME_SECONDS:
            self._recorded.discard(number)
            self._restore(number)
            self.unanswered = None
            signal.raise_signal(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let a signal have the effect that it has without this object."""
        previous = self._handler_before(number)
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
