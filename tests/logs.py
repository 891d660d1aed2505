"""Record log messages on a rank, where pytest's `caplog` is not available."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded(name: str) -> Iterator[list[logging.LogRecord]]:
    """Yield a list to which the records of the logger `name` are appended."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
