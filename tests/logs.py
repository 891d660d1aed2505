"""What is logged, where pytest's `caplog` does not reach: on a rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded(name: str) -> Iterator[list[logging.LogRecord]]:
    """Gives the list of what the logger of that name says within."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
