"""The interface of launchers, and their settings. `hvdkit run` chooses one launcher for a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from hvdkit.launch import environment
from hvdkit.launch.hosts import Host
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.output import Output
from hvdkit.launch.ssh import Ssh
from hvdkit.launch.timeouts import Timeouts


class Launcher(Protocol):
    """Start the ranks of one job in one way: `gloo.Gloo`, `mpi.Mpi` or `slurm.Slurm`."""

    def run(self, output: Output, say: Callable[[str], None]) -> AbstractContextManager[Outcome]:
        """Start the ranks, and watch them until they have ended. The context has the outcome.

        On exit, the context closes the agents of this start. This may take many seconds.

        Args:
            output: gets the ranks' output.
            say: prints a message for the user.

        Raises:
            HvdkitError: the job could not be started.
        """

    def describe(self, say: Callable[[str], None]) -> str:
        """Return the plan as text, and the commands that would start the ranks.

        This starts agents to ask the hosts, but starts no rank.

        Raises:
            HvdkitError: a host cannot take part.
        """


@dataclass(frozen=True)
class Settings:
    """The settings of a job, apart from the command and the hosts.

    Attributes:
        ssh: how to reach other hosts.
        python: the Python of the agents on other hosts.
        network: the user's choice of network (`network.choose_interfaces`).
        variables: the user's `-x` arguments.
        pin_gpus: give each rank one GPU in CUDA_VISIBLE_DEVICES.
        timeouts: the timeouts of the job.
        preflight: check several hosts before starting ranks.
        torch_env: give ranks the variables that torchrun gives.
        use_agent_environment: ranks inherit the environment of their agent, not of the launcher.
        debug_rank: the rank that gets the user's terminal, with unlimited time; None for none.
        bind: bind each rank to cores of one NUMA node.
        agents_stay: agents stay after their ranks have ended, until the launcher ends them. So the
            launcher can ask them why the job has failed, and start it again.
        spares: agents keep spare interpreters for restarts.
        elastic_variables: returns the variables for the ranks of an elastic job on a host; None in
            other jobs.
    """

    ssh: Ssh
    python: str
    network: str | None = None
    variables: Sequence[str] = ()
    pin_gpus: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    preflight: bool = True
    torch_env: bool = True
    use_agent_environment: bool = False
    debug_rank: int | None = None
    bind: bool = False
    agents_stay: bool = False
    spares: bool = False
    elastic_variables: Callable[[Host], Mapping[str, str]] | None = None

    @property
    def rank_timeouts(self) -> Timeouts:
        """The timeouts for running ranks.

        Raises:
            UsageError: the ranks' HVDKIT_STALL_TIMEOUT is not a number of seconds.
        """
        debug = self.debug_rank is not None
        stall = environment.rank_stall_seconds(os.environ, self.variables, debug)
        start = float("inf") if debug else self.timeouts.start
        return replace(self.timeouts, start=start, stall=stall)
