"""The settings of a job that all launchers share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hvdkit.launch.control import environment
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.hosts.ssh import Ssh


@dataclass(frozen=True)
class Settings:
    """The settings of a job, apart from the command and the hosts.

    Attributes:
        ssh: how to reach other hosts.
        python: the Python of the agents on other hosts.
        network: the user's choice of network (`network.choose_interfaces`).
        variables: the user's `-x` arguments.
        pin_gpus: give each rank one GPU in CUDA_VISIBLE_DEVICES.
        preflight: check several hosts before starting ranks.
        torch_env: give ranks the variables that torchrun gives.
        use_agent_environment: ranks inherit the environment of their agent, not of the launcher.
        debug_rank: the rank that gets the user's terminal, with unlimited time; None for none.
        bind: bind each rank to cores of one NUMA node.
        agents_stay: agents stay after their ranks have ended, until the launcher ends them. So the
            launcher can ask them why the job has failed, and start it again.
        spares: agents keep spare interpreters for restarts.
        steps: agents give their ranks folders for steps that outlive the ranks.
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
    steps: bool = False

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
