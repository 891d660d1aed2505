"""Log a warning if a rank waits longer than 10 seconds for the other ranks in a collective."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 10.0


@contextmanager
def warning_while_waiting(log: logging.Logger, rank: int, call: str, advice: str) -> Iterator[None]:
    """Context of a collective. After 10 seconds in it, log a warning.

    Args:
        log: where to log.
        rank: this rank.
        call: the call that contains the collective, such as "fit".
        advice: what the user should do.
    """
    timer = threading.Timer(
        _SECONDS,
        log.warning,
        (
            "rank %d has waited for other ranks in %s for %.0f seconds: %s",
            *(rank, call, _SECONDS, advice),
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
