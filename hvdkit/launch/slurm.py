"""Carries a plan out inside a Slurm allocation: `srun` starts an agent in each rank's place.

So output, the first failure, an orderly stop and the exit status are the same as elsewhere. Over
Gloo a rank's place comes from the plan, and Slurm needs no PMI.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hvdkit.errors import HvdkitError
from hvdkit.launch import environment, gloo, mpi, network, preflight, prepare
from hvdkit.launch.agents import Agents
from hvdkit.launch.allocation import Allocation
from hvdkit.launch.arrivals import Door, Starter, let_in
from hvdkit.launch.connection import own_agent
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job, Outcome
from hvdkit.launch.messages import Message
from hvdkit.launch.network import Interface
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Place, Plan
from hvdkit.launch.prepare import Settings
from hvdkit.processes import without_place
from hvdkit.rendezvous import RendezvousServer

# What srun would take from here as wishes of the user, and what contradicts the plan.
_OVERRULED = {
    "SLURM_DISTRIBUTION",
    "SLURM_HOSTFILE",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_GPU",
}
# What a login has given the user; srun forwards nothing that it is not told to.
_LOGIN = ("HOME", "LOGNAME", "SHELL", "USER")

_QUESTION_SECONDS = 20


def srun_command(
    plan: Plan,
    given: Allocation,
    command: Sequence[str],
    variables: Sequence[str],
    kind: str = "none",
    directory: str = "/",
) -> list[str]:
    """srun's command line.

    Args:
        plan: how many ranks run where.
        given: the allocation.
        command: what they run.
        variables: the names of those that they get, besides Slurm's; their values are taken from
            srun's own environment, so that no command line shows them.
        kind: srun's `--mpi`.
        directory: where they run.

    Raises:
        HvdkitError: there is no srun.
    """
    srun = shutil.which("srun")
    if srun is None:
        raise HvdkitError(
            "this is a Slurm allocation, and there is no srun on PATH; add Slurm's bin folder to "
            "it (in a container: mount it), or use --launcher gloo with -H"
        )
    arguments = [f"--nodes={len(plan.hosts)}", f"--ntasks={plan.size}"]
    # Rank after rank, as the plan has them.
    names = [place.host.name for place in plan.places]
    arguments += ["--distribution=arbitrary", f"--nodelist={','.join(names)}"]
    if given.cpus_per_task is not None:
        # Since Slurm 22.05 srun does not take it from the allocation: one CPU would be left.
        arguments.append(f"--cpus-per-task={given.cpus_per_task}")
    if given.inside_step:
        arguments.append("--overlap")
    # How ranks end is the agents' and our business.
    arguments += [f"--mpi={kind}", "--kill-on-bad-exit=0", "--wait=0"]
    arguments += [f"--chdir={directory}", f"--export={','.join(variables)}"]
    return [srun, *arguments, *command]


def _srun_environment(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in without_place(env).items() if name not in _OVERRULED}


@dataclass(frozen=True)
class _Started:
    """Agents in all ranks' places, and what they say of their hosts."""

    agents: Agents
    command: Sequence[str]
    facts: Mapping[Host, Message]
    interfaces: Mapping[Host, Interface]
    address: str


@contextmanager
def _started(
    plan: Plan, given: Allocation, settings: Settings, kind: str, say: Callable[[str], None]
) -> Iterator[_Started]:
    """Start the agents, ask them, and choose the network; on the way out all have ended."""
    door = Door(_own_address(plan), plan.size)
    here = os.environ | door.variables()
    login = [name for name in _LOGIN if name in here]
    names = sorted({*login, *environment.forwarded(here), *door.variables()})
    command = srun_command(plan, given, own_agent(), names, kind)
    running = Starter("srun", command, _srun_environment(here), say)
    try:
        with Agents() as agents:
            everyone = let_in(agents, door, running, plan, settings.limits.start)
            # One agent speaks for its host.
            first = {connection.host: connection for connection in reversed(everyone)}
            agents.connections = [first[host] for host in plan.hosts]
            try:
                answers = agents.contact(prepare.task(plan), settings.limits.start)
                facts = {
                    host: _facts(answers[speaker], host, plan, given)
                    for host, speaker in first.items()
                }
                interfaces, address = prepare.choose_network(plan, facts, settings)
                prepare.warn_of_faster_network(plan, facts, interfaces, settings, say)
                preflight.before_start(agents, interfaces, plan, settings, door.at, say)
            finally:
                agents.connections = [*everyone]
            task = prepare.task(plan) | {"passes_signals_on": True}
            agents.contact(task, settings.limits.start)
            yield _Started(agents, command, facts, interfaces, address)
    finally:
        door.close()
        running.end()


def _facts(found: Message, host: Host, plan: Plan, given: Allocation) -> Message:
    """Return the facts of one task's agent, corrected to those of the whole host."""
    ranks = len(plan.on(host))
    # An agent that is bound sees its own CPUs, another all of the machine's.
    each = min(
        found["cores"], max(1, given.cpus[host] // ranks), given.cpus_per_task or sys.maxsize
    )
    return found | {"cores": each * ranks}


def _own_address(plan: Plan) -> str:
    """This machine's address towards the nodes."""
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
    """A node's address: its name's, or, where nobody knows that, the one that Slurm has for it."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        pass  # nodes need no names outside of Slurm
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
        pass  # said below
    raise HvdkitError(
        f"{name}, a node of the allocation, has no address here: neither its name resolves, nor "
        f"does `scontrol show node {name}` say it"
    )


def _settings(settings: Settings, given: Allocation) -> Settings:
    # A task that sees one GPU is pinned already.
    return replace(settings, pin_gpus=settings.pin_gpus and not given.pins_gpus)


@dataclass(frozen=True)
class Slurm:
    """Starts ranks with `srun` inside an allocation, which starts an agent for each.

    Attributes:
        plan: the job.
        settings: how it is started.
        given: the allocation that it runs in.
        kind: srun's `--mpi` for ranks over MPI; None for Gloo.
    """

    plan: Plan
    settings: Settings
    given: Allocation
    kind: str | None

    def run(self, output: Output, say: Callable[[str], None]) -> Outcome:
        """Start the ranks, and watch them until they have ended."""
        settings = _settings(self.settings, self.given)
        with _started(self.plan, self.given, settings, self.kind or "none", say) as up:
            if self.kind is not None:
                everyone = set(range(self.plan.size))
                variables = mpi.CONTROLLER | _open_mpi_network(up.interfaces)
                _send_start(up, self.plan, settings, lambda *_: variables)
                return Job(
                    self.plan, up.agents, output, settings.limits, lambda: everyone, say
                ).run()
            with RendezvousServer(up.address, size=self.plan.size) as server:
                places = gloo.place_variables(self.plan, up.address, server.port, server.key)
                _send_start(up, self.plan, settings, places)
                come = gloo.registered(server, self.plan.size, up.facts, say)
                return Job(self.plan, up.agents, output, settings.limits, come, say).run()

    def describe(self, say: Callable[[str], None]) -> str:
        """Return the plan in words, and the commands that would carry it out. Starts agents."""
        settings = _settings(self.settings, self.given)
        with _started(self.plan, self.given, settings, self.kind or "none", say) as up:
            pass
        over = "Gloo" if self.kind is None else f"MPI (srun --mpi={self.kind})"
        lines = [f"{self.plan.size} ranks over {over}, started by srun, in {self.plan.directory}"]
        lines += prepare.host_lines(self.plan, up.facts, up.interfaces, settings)
        lines += [
            "",
            "This starts the agents, which start the ranks:",
            f"  {shlex.join(up.command)}",
        ]
        if self.kind is not None:
            hidden = environment.explicit(os.environ, settings.variables)
            told = mpi.CONTROLLER | _open_mpi_network(up.interfaces)
            names = sorted({*_LOGIN, *environment.forwarded(os.environ), *hidden, *told})
            command = srun_command(
                self.plan, self.given, self.plan.command, names, self.kind, self.plan.directory
            )
            words = ["env", *(f"{name}={value}" for name, value in told.items())]
            by_hand = [
                "",
                "To start the same ranks by hand:",
                f"  {shlex.join([*words, *command])}",
            ]
            return "\n".join([*lines, *by_hand])

        def on_host(host: Host, words: Sequence[str]) -> str:
            srun = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap"]
            return shlex.join([*srun, f"--chdir={self.plan.directory}", *words])

        by_hand = gloo.by_hand(self.plan, settings, up.facts, up.interfaces, up.address, on_host)
        return "\n".join([*lines, *by_hand])


def _open_mpi_network(interfaces: Mapping[Host, Interface]) -> dict[str, str]:
    """Return the network as Open MPI's variables, in place of mpirun's arguments."""
    name = "OMPI_MCA_btl_tcp_if_include"
    subnets = mpi.open_mpi_subnets(interfaces)
    return {name: subnets} if subnets and name not in os.environ else {}


def _send_start(
    up: _Started,
    plan: Plan,
    settings: Settings,
    places: Callable[[Place, Interface], Mapping[str, str]],
) -> None:
    master = prepare.master(up.agents, plan, up.interfaces, settings)
    ranks = prepare.rank_messages(plan, up.facts, settings, up.interfaces, places, master)
    by_number = {message["rank"]: message for host in plan.hosts for message in ranks[host]}
    for number, connection in enumerate(up.agents.connections):
        prepare.start(connection, plan, [by_number[number]])
