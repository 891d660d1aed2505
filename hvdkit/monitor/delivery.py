"""Deliver records to loggers, in threads, so that no logger stops or slows the training."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from hvdkit.monitor.loggers.logger import Logger
from hvdkit.monitor.records import Record, Run

#: The most records that wait for a logger. Further records are dropped.
CAPACITY = 1000
#: Seconds that `close` waits for all loggers together.
CLOSE_SECONDS = 10.0

_log = logging.getLogger("hvdkit.monitor")


class Delivery:
    """The threads of some loggers, each with a queue.

    Args:
        loggers: loggers that are open.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._lines = [_Line(logger) for logger in loggers]
        self._closed = False

    def begin(self, run: Run) -> None:
        """Pass the beginning of a part of the run to all loggers."""
        for line in self._lines:
            line.put(lambda logger: logger.begin(run), is_record=False)

    def log(self, record: Record) -> None:
        """Pass a record to all loggers."""
        for line in self._lines:
            line.put(lambda logger: logger.log(record), is_record=True)

    def close(self) -> None:
        """Deliver the queued records and close the loggers, within `CLOSE_SECONDS` in all."""
        if self._closed:
            return
        self._closed = True
        for line in self._lines:
            line.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for line in self._lines:
            line.join(deadline)


class _Line:
    """A logger, its queue and its thread."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._name = type(logger).__name__
        self._calls: deque[tuple[Callable[[Logger], None], bool]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._failed = self._dropped = 0
        self._warned_of: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"hvdkit-{self._name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Logger], None], is_record: bool) -> None:
        with self._changed:
            if self._ended:
                return
            full = is_record and len(self._calls) >= CAPACITY
            if full:
                self._dropped += 1
            else:
                self._calls.append((call, is_record))
                self._changed.notify()
        if full:
            self._warn(
                "slow",
                f"{self._name} is slower than the training: {CAPACITY} records wait, and further "
                f"ones are dropped. Increase `every`, or remove the logger.",
            )

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            with self._changed:
                waiting = sum(is_record for _, is_record in self._calls)
                self._dropped += waiting
                self._calls.clear()
            _log.warning("%s did not end within %.0f s.", self._name, CLOSE_SECONDS)
        lost = self._failed + self._dropped
        if lost:
            _log.warning(
                "%s lost %d records: %d because of errors, %d because it was too slow.",
                *(self._name, lost, self._failed, self._dropped),
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._calls or self._ended):
                    self._changed.wait()
                if not self._calls:
                    break
                call, is_record = self._calls.popleft()
            self._try(call, is_record)
        self._try(lambda logger: logger.close(), is_record=False)

    def _try(self, call: Callable[[Logger], None], is_record: bool) -> None:
        try:
            call(self._logger)
        except Exception as error:
            self._failed += is_record
            self._warn(
                "error",
                f"{self._name} failed, and the training continues without its records: "
                f"{type(error).__name__}: {error}",
            )

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned_of:
            self._warned_of.add(kind)
            _log.warning("%s", text)
