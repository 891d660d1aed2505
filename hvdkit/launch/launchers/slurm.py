"""Start ranks inside a Slurm allocation: `srun` starts an agent for each rank.

With agents, output, failures, orderly stops and exit statuses are the same as with other launchers.
Over Gloo, the plan gives a rank its place, so Slurm needs no PMI.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import ClassVar

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import environment, network, prepare
from hvdkit.launch.control.agent_command import local_agent_command
from hvdkit.launch.control.controller import Controller, over_gloo, over_mpi
from hvdkit.launch.control.listener import AgentListener
from hvdkit.launch.control.messages import LISTENER_VARIABLES, Message
from hvdkit.launch.control.network import Interface
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.hosts.allocation import Allocation, check_size
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.launchers import mpi
from hvdkit.launch.launchers.external import agents_started_by
from hvdkit.launch.launchers.launcher import Launcher, Workers
from hvdkit.system.processes import without_rank_variables

# Variables that srun reads as its options. They would contradict the plan.
_SRUN_OPTIONS = {
    "SLURM_DISTRIBUTION",
    "SLURM_HOSTFILE",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_GPU",
}
# Variables of a login. With --export=NAMES, srun forwards only these names.
_LOGIN = ("HOME", "LOGNAME", "SHELL", "USER")

_QUESTION_SECONDS = 20


def srun_command(plan: Plan, allocation: Allocation, kind: str | None) -> list[str]:
    """Return srun's command line, which starts the agents.

    srun takes the values of variables from its own environment, so that no command line shows them.

    Args:
        plan: the host of each rank.
        kind: srun's `--mpi`; None for ranks over Gloo.

    Raises:
        HvdkitError: srun is not on PATH.
    """
    srun = shutil.which("srun")
    if srun is None:
        raise HvdkitError(
            "this is a Slurm allocation, but there is no srun on PATH; add Slurm's bin folder to "
            "PATH (in a container: mount the folder), or use --launcher gloo with -H"
        )
    arguments = [f"--nodes={len(plan.hosts)}", f"--ntasks={plan.size}"]
    # One node name for each rank, in the order of ranks.
    names = [place.host.name for place in plan.places]
    arguments += ["--distribution=arbitrary", f"--nodelist={','.join(names)}"]
    if allocation.cpus_per_task is not None:
        # Since Slurm 22.05, srun ignores the allocation's number and would give each task one CPU.
        arguments.append(f"--cpus-per-task={allocation.cpus_per_task}")
    if allocation.inside_step:
        arguments.append("--overlap")
    # The agents and this process end the ranks, not srun.
    arguments += [f"--mpi={kind or 'none'}", "--kill-on-bad-exit=0", "--wait=0"]
    login = [name for name in _LOGIN if name in os.environ]
    names = sorted({*login, *environment.forwarded(os.environ), *LISTENER_VARIABLES})
    arguments += ["--chdir=/", f"--export={','.join(names)}"]
    return [srun, *arguments, *local_agent_command()]


def _srun_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in without_rank_variables(env).items()
        if name not in _SRUN_OPTIONS
    }


class Slurm(Launcher):
    """Start ranks inside an allocation: `srun` starts an agent for each rank.

    Args:
        kind: srun's `--mpi` for ranks over MPI; None for Gloo.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "bind": "{} was given, but Slurm binds tasks itself. Set SLURM_CPU_BIND=cores instead",
        "debug_rank": "{} needs ranks that `hvdkit run` starts itself. Use --launcher gloo",
        "mpirun": "{0} needs --launcher mpi: add it, or remove {0}",
        "mpi_args": "{0} needs --launcher mpi: add it, or remove {0}",
    }
    in_allocation = True

    def __init__(self, settings: Settings, allocation: Allocation, kind: str | None) -> None:
        # Slurm has already pinned a task that sees one GPU. Each start has new agents.
        pin_gpus = settings.pin_gpus and not allocation.pins_gpus
        super().__init__(
            replace(settings, pin_gpus=pin_gpus, agents_stay=False, spares=False, steps=False)
        )
        self._allocation = allocation
        self._kind = kind

    def hosts(self, size: int | None) -> Sequence[Host]:
        if size is not None:
            check_size(self._allocation, size)
        return list(self._allocation.hosts)

    @property
    def name(self) -> str:
        over = "Gloo" if self._kind is None else f"MPI (srun --mpi={self._kind})"
        return f"{over}, started by srun"

    @contextmanager
    def examined(self, plan: Plan, checks: bool = True) -> Iterator[Workers]:
        settings = self.settings
        with closing(
            AgentListener(_own_address(plan), plan.size, settings.ssh.silence)
        ) as listener:
            here = os.environ | listener.variables()
            command = srun_command(plan, self._allocation, self._kind)
            env, timeout = _srun_environment(here), settings.timeouts.start
            with agents_started_by("srun", command, env, listener, plan, timeout) as agents:
                # Ask one agent of each host.
                first = {connection.host: connection for connection in reversed(agents.connections)}
                with agents.only([first[host] for host in plan.hosts]):
                    answers = agents.require_facts(prepare.task(plan, settings), timeout)
                    facts = {
                        host: _facts(answers[agent], host, plan, self._allocation)
                        for host, agent in first.items()
                    }
                    found = self._examine(agents, plan, facts, checks)
                # Slurm also sends signals to the tasks, here the agents.
                forwards = prepare.task(plan, settings) | {"forward_signals": True}
                agents.require_facts(forwards, timeout)
                yield found

    def controller(self, plan: Plan, workers: Workers) -> AbstractContextManager[Controller]:
        if self._kind is not None:
            return nullcontext(over_mpi(_open_mpi_network(workers.interfaces)))
        return over_gloo(plan, workers.facts, workers.address)

    def commands(self, plan: Plan, workers: Workers) -> Sequence[Sequence[str]]:  # noqa: ARG002
        return [srun_command(plan, self._allocation, self._kind)]


def _facts(found: Message, host: Host, plan: Plan, allocation: Allocation) -> Message:
    """Return the facts of one task's agent, with the cores of all ranks of its host."""
    ranks = len(plan.on(host))
    # If Slurm binds tasks, an agent sees its own CPUs. Otherwise it sees all CPUs of the machine.
    each = min(
        found["cores"],
        max(1, allocation.cpus[host] // ranks),
        allocation.cpus_per_task or sys.maxsize,
    )
    return found | {"cores": each * ranks}


def _own_address(plan: Plan) -> str:
    """Return the address of this machine that the nodes can reach."""
    local = prepare.local_hosts(plan)
    others = [host.name for host in plan.hosts if not local[host]]
    if not others:
        return network.LOOPBACK.address
    for name in others[:4]:
        address = network.source_address(_address_of(name))
        if address is not None:
            return address
    raise HvdkitError(
        f"this machine has no route to {others[0]} ({_address_of(others[0])}), a node of the "
        "allocation; start the job on one of the nodes (sbatch)"
    )


def _address_of(name: str) -> str:
    """Return the address of a node's name. If the name does not resolve, ask Slurm."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        pass  # Slurm does not need node names to resolve
    try:
        shown = subprocess.run(
            ["scontrol", "show", "node", "-o", name],
            capture_output=True,
            text=True,
            timeout=_QUESTION_SECONDS,
            check=True,
        ).stdout
        address = re.search(r"\bNodeAddr=(\S+)", shown)
        if address is not None:
            return socket.gethostbyname(address[1])
    except (OSError, subprocess.SubprocessError):
        pass  # reported below
    raise HvdkitError(
        f"{name}, a node of the allocation, has no address here: its name does not resolve, and "
        f"`scontrol show node {name}` shows no address. Add the node to DNS or /etc/hosts"
    )


def _open_mpi_network(interfaces: Mapping[Host, Interface]) -> dict[str, str]:
    """Return Open MPI's variable for the network, which replaces mpirun's arguments."""
    name = "OMPI_MCA_btl_tcp_if_include"
    subnets = mpi.open_mpi_subnets(interfaces)
    return {name: subnets} if subnets and name not in os.environ else {}
