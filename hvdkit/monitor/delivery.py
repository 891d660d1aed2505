"""Deliver records to loggers, in threads, so that no logger stops or slows the training."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

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
        lines, self._lines = self._lines, []
        for line in lines:
            line.end()
        deadline = time.monotonic() + CLOSE_SECONDS
        for line in lines:
            line.join(deadline)


class _Line:
    """A logger, its queue and its thread."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._name = type(logger).__name__
        # None is the end.
        self._calls: SimpleQueue[tuple[Callable[[Logger], None], bool] | None] = SimpleQueue()
        self._failed = self._dropped = 0
        self._warned_of: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"hvdkit-{self._name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Logger], None], is_record: bool) -> None:
        if not is_record or self._calls.qsize() < CAPACITY:
            self._calls.put((call, is_record))
        else:
            self._dropped += 1
            self._warn(
                "slow",
                f"{self._name} is slower than the training: {CAPACITY} records wait, and further "
                f"ones are dropped. Increase `every`, or remove the logger.",
            )

    def end(self) -> None:
        self._calls.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            with contextlib.suppress(Empty):
                while waiting := self._calls.get_nowait():
                    self._dropped += waiting[1]
            self.end()
            _log.warning("%s did not end within %.0f s.", self._name, CLOSE_SECONDS)
        lost = self._failed + self._dropped
        if lost:
            _log.warning(
                "%s lost %d records: %d because of errors, %d because it was too slow.",
                *(self._name, lost, self._failed, self._dropped),
            )

    def _run(self) -> None:
        while (waiting := self._calls.get()) is not None:
            self._try(*waiting)
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
