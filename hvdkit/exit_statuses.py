"""The exit statuses of ranks and jobs: the table that everything else reads.

The outcome of a job, the manifests for Kubernetes, `hvdkit why` and docs/settings.md use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdkit.errors import HOSTS_CHANGED, RESUMABLE


@dataclass(frozen=True)
class ExitStatus:
    """A row of the table.

    Attributes:
        value: the status.
        meaning: the meaning in words.
        is_failure: whether a rank with this status has failed.
        is_restartable: whether `--restarts` starts the job again.
        by_user: whether the same command can only succeed after a change by the user.
    """

    value: int
    meaning: str
    is_failure: bool = True
    is_restartable: bool = True
    by_user: bool = False


#: The status with which Open MPI 5 ends a rank if mpirun has lost its daemon on a host.
MPI_LOST_DAEMON = 195

TABLE: Mapping[int, ExitStatus] = {
    row.value: row
    for row in (
        ExitStatus(0, "success", is_failure=False, is_restartable=False),
        ExitStatus(1, "an exception in Python, or the job could not be started"),
        ExitStatus(2, "wrong arguments", is_restartable=False, by_user=True),
        ExitStatus(RESUMABLE, "saved and stopped", is_failure=False, is_restartable=False),
        ExitStatus(HOSTS_CHANGED, "the hosts of an elastic job have changed", is_failure=False),
        ExitStatus(126, "the command cannot be run", by_user=True),
        ExitStatus(127, "the command was not found", by_user=True),
        ExitStatus(MPI_LOST_DAEMON, "mpirun has lost its daemon on a host"),
    )
}
