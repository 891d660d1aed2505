"""The interface of launchers. `hvdkit run` chooses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hvdkit.launch.job import Outcome
from hvdkit.launch.output import Output


class Launcher(Protocol):
    """Starts the ranks of one job in one way: `gloo.Gloo`, `mpi.Mpi` or `slurm.Slurm`."""

    def run(self, output: Output, say: Callable[[str], None]) -> Outcome:
        """Start the ranks, and watch them until they have ended.

        Args:
            output: where the ranks' output goes.
            say: tells the user something at once.

        Raises:
            HvdkitError: the job could not be started.
        """

    def describe(self, say: Callable[[str], None]) -> str:
        """Return the plan in words, and the commands that would carry it out.

        Asks the hosts, and starts no rank.

        Raises:
            HvdkitError: a host cannot take part.
        """
