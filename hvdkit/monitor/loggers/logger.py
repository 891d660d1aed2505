"""The interface of loggers, which write the records of a `Monitor` somewhere.

To add a logger, derive a class from `Logger`, as `tensorboard.py` does. Import its package with
`require`, and add an extra `monitor-NAME` to `pyproject.toml`. Export the class in
`hvdkit/monitor/__init__.py`, and add it to docs/monitoring.md and to
`tests/unit/monitor/test_machine.py`. Test it with the program that reads its output.
"""

import importlib
from typing import Any

from hvdkit.errors import UsageError
from hvdkit.monitor.records import Record, Run


class Logger:
    """Write records. Every rank makes the same loggers; only the first rank opens and uses them.

    `begin`, `log` and `close` are called in a thread of the logger. If one of them raises, the
    training continues: the first error is logged as a warning, and the lost records are counted.
    """

    def open(self) -> None:
        """Open files and ports, in `Monitor()`. An error is raised on every rank.

        Raises:
            OSError, HvdkitError: the logger cannot be used.
        """

    def begin(self, run: Run) -> None:
        """Begin a part of the run.

        Called before the first record, and when the step has gone back after a resume.
        """

    def log(self, record: Record) -> None:
        """Write a record."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is buffered, and close what `open` has opened."""


def require(module: str, requirement: str, extra: str) -> Any:
    """Import the package that a logger needs.

    Args:
        module: the module to import.
        requirement: the package, for the error.
        extra: the extra of hvdkit that installs it.

    Raises:
        UsageError: the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{requirement} is not installed here ({error}), and this logger needs it on every "
            f"host: pip install 'hvdkit[{extra}]'"
        ) from error
