"""The exit statuses of ranks and jobs: the only table of them.

The outcome of a job, `hvdkit why` and the manifests for Kubernetes read it, and a test compares it
with docs/settings.md. A status that is not in the table is that of a rank that has failed.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from hvdkit.errors import HOSTS_CHANGED, RESUMABLE


@dataclass(frozen=True)
class ExitStatus:
    """A row of the table.

    Attributes:
        value: the status.
        meaning: what has happened, for a message. Empty if other words of each message say it.
        is_failure: whether a rank with this status has failed.
        is_resumable: whether the job has saved, so that a batch system starts it again.
        elastic: whether only ranks of elastic jobs have the status.
    """

    value: int
    meaning: str = ""
    is_failure: bool = True
    is_resumable: bool = False
    elastic: bool = False


#: The status with which Open MPI 5 ends a rank if mpirun has lost its daemon on a host.
MPI_LOST_DAEMON = 195

TABLE: Mapping[int, ExitStatus] = {
    row.value: row
    for row in (
        ExitStatus(0, is_failure=False),
        ExitStatus(1),
        ExitStatus(2),
        ExitStatus(RESUMABLE, "saved and stopped", is_failure=False, is_resumable=True),
        ExitStatus(HOSTS_CHANGED, "the hosts have changed", is_failure=False, elastic=True),
        ExitStatus(126, "a shell could not run the command"),
        ExitStatus(127, "a shell did not find the command"),
        ExitStatus(MPI_LOST_DAEMON, "mpirun has lost its daemon on a host"),
    )
}

#: The signals of a crash.
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


def signal_of(status: int) -> int:
    """Return the signal that has ended a process, or the program of a shell.

    The result is not a signal if the process has ended in another way.
    """
    return -status if status < 0 else status - 128


def orderly(elastic: bool) -> tuple[int, ...]:
    """Return the statuses other than 0 of ranks that have not failed.

    Args:
        elastic: whether the job is elastic.
    """
    rows = (row for row in TABLE.values() if row.value and not row.is_failure)
    return tuple(row.value for row in rows if elastic or not row.elastic)


def resumable() -> tuple[int, ...]:
    """Return the statuses of jobs that have saved, and that a batch system starts again."""
    return tuple(row.value for row in TABLE.values() if row.is_resumable)


def resumable_text() -> str:
    """Return these statuses with their meaning, such as `75 (saved and stopped)`."""
    return " or ".join(f"{value} ({TABLE[value].meaning})" for value in resumable())


def status_text(status: int) -> str:
    """Return a text for an exit status that is not a signal, such as `exit status 3`."""
    row = TABLE.get(status)
    meaning = f" ({row.meaning})" if row is not None and row.meaning and row.is_failure else ""
    return f"exit status {status}{meaning}"
