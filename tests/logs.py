"""Log messages of ranks."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def recorded(name: str) -> Iterator[list[logging.LogRecord]]:
    """Yield a list to which the records of the logger `name` are appended.

    On a rank, pytest's `caplog` is not available.
    """
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def without_slow_ranks(output: str) -> str:
    """Return the output of a rank without lines about slow ranks.

    Other programs on the machine of the tests may cause these lines.
    """
    return re.sub(r"^rank \d+ on host \S+ is slow: .*\n", "", output, flags=re.M)
