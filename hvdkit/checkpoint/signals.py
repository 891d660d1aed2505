"""Record the signals that ask a job to stop; `Manager.maybe_save` and `close` read the record."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from hvdkit.errors import UsageError
from hvdkit.system.signals import restore

_log = logging.getLogger("hvdkit.checkpoint")

#: SIGTERM comes before a time limit or a preemption, SIGINT from the keyboard, SIGUSR1 from a Slurm
#: script with `--signal`.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_SAME_SECONDS = 3.0


class StopRequest:
    """The request that a process stops. All checkpointers of the process share it.

    Attributes:
        asked: the name of the last signal, such as "SIGTERM", or the script's reason; empty if
            there was no request.
        unanswered: the last signal, until the job is stopped for it; None if there is none.
        stopped_at: when the job was stopped (`time.monotonic`); None if it was not.
        end_process: called with the first signal after the last checkpointer was closed, and before
            another one records signals, if the process can be resumed. It ends the process.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.unanswered: int | None = None
        self.stopped_at: float | None = None
        self.end_process: Callable[[int | None], NoReturn] | None = None

    def record(self, number: int) -> None:
        """Record a signal."""
        self.asked = signal.Signals(number).name
        self.unanswered = number

    def forget(self) -> None:
        """Forget the request."""
        self.asked, self.unanswered = "", None

    def answer(self) -> None:
        """Forget the request, because the job stops for it now."""
        self.forget()
        self.stopped_at = time.monotonic()


class StopSignals:
    """Record the signals that ask this process to stop.

    A second signal of the same kind, more than 3 seconds later, has its original effect: it can
    stop a job that does not reach the end of a step. A second signal within 3 seconds counts as the
    first one, because a terminal and a launcher may both forward it.

    Args:
        numbers: the signals to record, such as `signal.SIGTERM`; may be empty.
        request: the record.

    Raises:
        UsageError: a number is not a signal that a process can handle.
    """

    def __init__(
        self, numbers: Sequence[int] = STOP_SIGNALS, request: StopRequest | None = None
    ) -> None:
        self.request = request or StopRequest()
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
        self._handlers: list[_Handler] = []

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
        self._handlers = [_Handler.of(number) for number in self._numbers]
        for handler in self._handlers:
            handler.add(self)

    def remove(self, keep: bool = False) -> None:
        """Restore the handlers that the signals had before. Later signals are not recorded.

        Args:
            keep: keep the handlers of signals that would kill the process. If the job has stopped,
                they let it end. Otherwise, they call `StopRequest.end_process`.
        """
        handlers, self._handlers = self._handlers, []
        for handler in handlers:
            handler.remove(self, keep)

    def deliver(self) -> None:
        """Raise a recorded signal again if no save stopped the job for it. Call `remove` first."""
        number = self.request.unanswered
        self.request.forget()
        if number is not None:
            signal.raise_signal(number)

    @property
    def is_for_script(self) -> bool:
        """Whether the script has its own handler of the recorded signal."""
        number = self.request.unanswered
        return any(each.number == number and each.is_of_script for each in self._handlers)


class _Handler:
    """The handler of one signal, which all `StopSignals` of a process share.

    It is kept after it was removed, because a handler that was installed later may still call it.

    Attributes:
        number: the signal.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self._process = os.getpid()
        # Those that record the signal, unless their checkpointer is gone without `remove`.
        self._recording: weakref.WeakSet[StopSignals] = weakref.WeakSet()
        # The request of a process whose checkpointers are closed.
        self._closed: StopRequest | None = None
        self._since: float | None = None
        self._previous = signal.signal(number, self)

    @classmethod
    def of(cls, number: signal.Signals) -> _Handler:
        """Return the installed handler of a signal. Install one if the script has another."""
        found = signal.getsignal(number)
        if isinstance(found, _Handler) and found._process == os.getpid():
            return found
        return cls(number)

    @property
    def is_of_script(self) -> bool:
        """Whether the script had a handler of its own before."""
        usual = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
        return self._previous not in usual

    def add(self, signals: StopSignals) -> None:
        """Record the signal in the request of `signals`."""
        if not self._recording:
            self._since = self._closed = signals.request.end_process = None
        self._recording.add(signals)

    def remove(self, signals: StopSignals, keep: bool) -> None:
        """Stop recording the signal in the request of `signals`, see `StopSignals.remove`."""
        self._recording.discard(signals)
        if self._recording:
            return
        if keep and self._previous is signal.SIG_DFL:
            self._closed, self._since = signals.request, None
        else:
            self._restore()

    def end(self) -> None:
        """Ignore the signal from now on, at the end of a script that can be resumed.

        While Python ends, it removes all handlers. The signal would then kill a process whose state
        is saved, and hide its exit status.
        """
        has_stopped = any(each.request.stopped_at is not None for each in self._recording)
        is_saved = has_stopped or self._closed is not None
        if is_saved and os.getpid() == self._process:
            signal.signal(self.number, signal.SIG_IGN)

    def _restore(self) -> None:
        # Keep a handler that the user has installed since.
        in_main = threading.current_thread() is threading.main_thread()
        installed: Any = signal.getsignal(self.number)
        if in_main and installed is self:
            restore(self.number, self._previous)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child has inherited the handler. The workers of a `DataLoader` must survive
            # signals to all processes of the job. But `Process.terminate` sends SIGTERM, and the
            # parent then waits for the end of the child.
            if number == signal.SIGTERM:
                self._pass_on(number, frame)
            return
        # None if a later checkpointer has begun, which may have other stop signals.
        end_process = None if self._closed is None else self._closed.end_process
        if not self._recording and end_process is None:
            self._pass_on(number, frame)
            return
        now = time.monotonic()
        if self._closed is not None and self._since is None:
            # Further signals, as from a batch system, must not interrupt the end of a stop.
            self._since = self._closed.stopped_at
        is_first = self._since is None
        self._since = self._since or now
        if now > self._since + _SAME_SECONDS:
            for each in self._recording:
                each.request.unanswered = None
            self._recording.clear()
            self._closed = None
            self._restore()
            signal.raise_signal(number)
        elif self._recording:
            for each in self._recording:
                each.request.record(number)
        elif is_first and end_process is not None:
            end_process(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let a signal have the effect that it has without this object."""
        previous: Any = self._previous
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _end_handlers() -> None:
    for number in signal.valid_signals():
        installed: Any = signal.getsignal(number)
        if isinstance(installed, _Handler):
            installed.end()


# Registered before the functions of `hvd.init()`, so it runs after them.
atexit.register(_end_handlers)
