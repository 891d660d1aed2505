"""Start ranks inside a Slurm allocation: `srun` starts an agent for each rank.

With agents, output, failures, orderly stops and exit statuses are the same as with other launchers.
Over Gloo, the plan gives a rank its place, so Slurm needs no PMI.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from hvdkit.errors import HvdkitError
from hvdkit.launch import environment, gloo, mpi, network, preflight, prepare
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.allocation import Allocation
from hvdkit.launch.connection import local_agent_command
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.launcher import Settings
from hvdkit.launch.listener import AgentListener, agents_started_by
from hvdkit.launch.messages import Message
from hvdkit.launch.network import Interface
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Place, Plan
from hvdkit.processes import without_rank_variables
from hvdkit.rendezvous import RendezvousServer

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


def srun_command(
    plan: Plan,
    allocation: Allocation,
    command: Sequence[str],
    variables: Sequence[str],
    kind: str = "none",
    directory: str = "/",
) -> list[str]:
    """Return srun's command line.

    Args:
        plan: the host of each rank.
        allocation: the allocation.
        command: the command of each rank.
        variables: the names of the ranks' variables, besides Slurm's. srun takes the values from
            its own environment, so that no command line shows them.
        kind: srun's `--mpi`.
        directory: the ranks' working directory.

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
    arguments += [f"--mpi={kind}", "--kill-on-bad-exit=0", "--wait=0"]
    arguments += [f"--chdir={directory}", f"--export={','.join(variables)}"]
    return [srun, *arguments, *command]


def _srun_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in without_rank_variables(env).items()
        if name not in _SRUN_OPTIONS
    }


@dataclass(frozen=True)
class _Started:
    """The agents of all ranks, srun's command line, the facts of the hosts, and the network."""

    agents: AgentPool
    command: Sequence[str]
    facts: Mapping[Host, Message]
    interfaces: Mapping[Host, Interface]
    address: str

    def start_ranks(
        self,
        plan: Plan,
        settings: Settings,
        places: Callable[[Place, Interface], Mapping[str, str]],
    ) -> None:
        prepare.start_ranks(self.agents, plan, self.facts, settings, self.interfaces, places)


@contextmanager
def _started(
    plan: Plan, allocation: Allocation, settings: Settings, kind: str, say: Callable[[str], None]
) -> Iterator[_Started]:
    """Start the agents, collect facts, and choose the network. End the agents on exit."""
    with closing(AgentListener(_own_address(plan), plan.size, settings.ssh.silence)) as listener:
        here = os.environ | listener.variables()
        login = [name for name in _LOGIN if name in here]
        names = sorted({*login, *environment.forwarded(here), *listener.variables()})
        command = srun_command(plan, allocation, local_agent_command(), names, kind)
        env, timeout = _srun_environment(here), settings.timeouts.start
        with agents_started_by("srun", command, env, listener, plan, timeout, say) as agents:
            # Ask one agent of each host.
            first = {connection.host: connection for connection in reversed(agents.connections)}
            with agents.only([first[host] for host in plan.hosts]):
                answers = agents.require_facts(prepare.task(plan, settings), timeout)
                facts = {
                    host: _facts(answers[agent], host, plan, allocation)
                    for host, agent in first.items()
                }
                interfaces, address = prepare.choose_network(plan, facts, settings, say)
                # The listener of the agents is closed, and the rendezvous is not open yet.
                with socket.create_server((address, 0), backlog=len(plan.hosts)) as server:
                    preflight.before_start(
                        agents, interfaces, plan, settings, server.getsockname(), say
                    )
            # Slurm also sends signals to the tasks, here the agents.
            agents.require_facts(prepare.task(plan, settings) | {"forward_signals": True}, timeout)
            yield _Started(agents, command, facts, interfaces, address)


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


def _settings(settings: Settings, allocation: Allocation) -> Settings:
    # Slurm has already pinned a task that sees one GPU.
    return replace(settings, pin_gpus=settings.pin_gpus and not allocation.pins_gpus)


@dataclass(frozen=True)
class Slurm:
    """Start ranks inside an allocation: `srun` starts an agent for each rank.

    Attributes:
        plan: the job.
        settings: how it is started.
        allocation: the allocation.
        kind: srun's `--mpi` for ranks over MPI; None for Gloo.
    """

    plan: Plan
    settings: Settings
    allocation: Allocation
    kind: str | None

    @contextmanager
    def run(self, output: Output, say: Callable[[str], None]) -> Iterator[Outcome]:
        """Start the ranks, and watch them until they have ended. Close the agents on exit."""
        prepare.warn_of_withheld(self.plan, self.settings, say)
        settings = _settings(self.settings, self.allocation)
        timeouts = settings.rank_timeouts
        with _started(self.plan, self.allocation, settings, self.kind or "none", say) as started:
            if self.kind is not None:
                variables = mpi.CONTROLLER | _open_mpi_network(started.interfaces)
                started.start_ranks(self.plan, settings, lambda *_: variables)
                yield Job(self.plan, started.agents, output, timeouts, None, say).run()
                return
            without_key = not gloo.all_send_key(started.facts)
            with RendezvousServer(
                started.address, size=self.plan.size, stores_without_key=without_key
            ) as server:
                places = gloo.place_variables(self.plan, started.address, server.port, server.key)
                started.start_ranks(self.plan, settings, places)
                ready = gloo.registered_ranks(server, self.plan.size, started.facts, say)
                yield Job(self.plan, started.agents, output, timeouts, ready, say).run()

    def describe(self, say: Callable[[str], None]) -> str:
        """Return the plan as text, and the commands that would start the ranks.

        This starts the agents, but no rank.
        """
        settings = _settings(self.settings, self.allocation)
        with _started(self.plan, self.allocation, settings, self.kind or "none", say) as started:
            pass
        over = "Gloo" if self.kind is None else f"MPI (srun --mpi={self.kind})"
        lines = [f"{self.plan.size} ranks over {over}, started by srun, in {self.plan.directory}"]
        lines += prepare.host_lines(self.plan, started.facts, started.interfaces, settings)
        lines += [
            "",
            "This starts the agents, which start the ranks:",
            f"  {shlex.join(started.command)}",
        ]
        if self.kind is not None:
            hidden = environment.explicit(os.environ, settings.variables)
            variables = mpi.CONTROLLER | _open_mpi_network(started.interfaces)
            names = sorted({*_LOGIN, *environment.forwarded(os.environ), *hidden, *variables})
            directory = self.plan.directory
            command = srun_command(
                self.plan, self.allocation, self.plan.command, names, self.kind, directory
            )
            words = ["env", *(f"{name}={value}" for name, value in variables.items())]
            manual = [
                "",
                "To start the same ranks by hand:",
                f"  {shlex.join([*words, *command])}",
            ]
            return "\n".join([*lines, *manual])

        def on_host(host: Host, words: Sequence[str]) -> str:
            srun = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap"]
            return shlex.join([*srun, f"--chdir={self.plan.directory}", *words])

        manual = gloo.manual_commands(
            self.plan, settings, started.facts, started.interfaces, started.address, on_host
        )
        return "\n".join([*lines, *manual])


def _open_mpi_network(interfaces: Mapping[Host, Interface]) -> dict[str, str]:
    """Return Open MPI's variable for the network, which replaces mpirun's arguments."""
    name = "OMPI_MCA_btl_tcp_if_include"
    subnets = mpi.open_mpi_subnets(interfaces)
    return {name: subnets} if subnets and name not in os.environ else {}
