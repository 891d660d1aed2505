"""The steps of every launcher before it starts ranks: ask the hosts, choose their network, and
give each rank its environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdkit.launch import binding, environment, network
from hvdkit.launch.agents import Agents
from hvdkit.launch.connection import Connection
from hvdkit.launch.hosts import Host, are_local
from hvdkit.launch.job import Limits
from hvdkit.launch.messages import Message
from hvdkit.launch.network import HostNetwork, Interface
from hvdkit.launch.plan import Place, Plan
from hvdkit.launch.ssh import Ssh

_SHOWN_NAMES = 8
_CHOSEN_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_INTERPRETERS = ("python", "bash", "sh")


@dataclass(frozen=True)
class Settings:
    """The settings of a start, apart from command and hosts.

    Attributes:
        ssh: how other hosts are reached.
        python: the Python of the agents on other hosts.
        network: the user's choice of network (`network.choose_interfaces`).
        variables: the user's `-x` arguments.
        pin_gpus: give each rank one GPU in CUDA_VISIBLE_DEVICES.
        limits: of time.
        preflight: examine several hosts before ranks are started there.
        torch_env: give ranks the variables that torchrun gives.
        bind: bind each rank to cores of one NUMA node.
        debug_rank: the rank that gets the user's terminal, while others wait for it without an end;
            None for none.
        own_environments: each host's ranks have the environment of the agent there, not that of
            the launcher.
    """

    ssh: Ssh
    python: str
    network: str | None = None
    variables: Sequence[str] = ()
    pin_gpus: bool = False
    limits: Limits = field(default_factory=Limits)
    preflight: bool = True
    torch_env: bool = True
    own_environments: bool = False
    debug_rank: int | None = None
    bind: bool = False

    @property
    def rank_limits(self) -> Limits:
        """The limits once ranks have been started."""
        if self.debug_rank is None:
            return self.limits
        return replace(self.limits, start=float("inf"))


# Asked once per host.
_known_hosts: dict[Host, bool] = {}


def local_hosts(plan: Plan) -> dict[Host, bool]:
    """Return the plan's hosts, and whether each is this machine."""
    known = {host: host.local for host in plan.hosts if host.local is not None}
    unknown = [host for host in plan.hosts if host.local is None]
    _known_hosts.update(are_local([host for host in unknown if host not in _known_hosts]))
    return {host: known.get(host, _known_hosts.get(host, False)) for host in plan.hosts}


def ask_hosts(agents: Agents, plan: Plan, settings: Settings) -> dict[Host, Message]:
    """Start an agent on each of the plan's hosts; by host, what `agent.facts` found there.

    Raises:
        HvdkitError: a host cannot take part.
    """
    dial(agents, plan, settings)
    return contact(agents, plan, settings)


def dial(agents: Agents, plan: Plan, settings: Settings) -> None:
    """Start an agent on each of the plan's hosts."""
    rank = settings.debug_rank
    terminal = None if rank is None else plan.places[rank].host
    agents.dial(local_hosts(plan), settings.ssh, settings.python, terminal)


def contact(agents: Agents, plan: Plan, settings: Settings) -> dict[Host, Message]:
    """Ask the agents that are there; by host, what `agent.facts` found."""
    facts = agents.contact(task(plan) | {"bind": settings.bind}, settings.limits.start)
    return {connection.host: found for connection, found in facts.items()}


def task(plan: Plan) -> Message:
    """Return the first message to the agents."""
    return {
        "command": list(plan.command),
        "directory": plan.directory,
        "path": os.environ.get("PATH"),
        "files": script(plan.command, plan.directory),
    }


def script(command: Sequence[str], directory: str) -> list[str]:
    """The script among the arguments of an interpreter, which every host must have."""
    if not Path(command[0]).name.startswith(_INTERPRETERS):
        return []
    for argument in command[1:]:
        if argument in ("-c", "-m"):
            return []
        if not argument.startswith("-"):
            return [argument] if Path(directory, argument).is_file() else []
    return []


def choose_network(
    plan: Plan, facts: Mapping[Host, Message], settings: Settings
) -> tuple[dict[Host, Interface], str]:
    """By host, what its ranks talk over, and this machine's address for the rendezvous.

    Args:
        plan: the job.
        facts: by host, what `agent.facts` found there.
        settings: the user's choices.
    """
    local = local_hosts(plan)
    if all(local.values()) and settings.network is None:
        return dict.fromkeys(facts, network.LOOPBACK), network.LOOPBACK.address
    chosen = network.choose_interfaces(_networks(facts, local), settings.network)
    address = network.rendezvous_address(chosen, network.own_interfaces())
    return {host: chosen[host.name] for host in facts}, address


def warn_of_faster_network(
    plan: Plan,
    facts: Mapping[Host, Message],
    interfaces: Mapping[Host, Interface],
    settings: Settings,
    say: Callable[[str], None],
) -> None:
    """Say so where the hosts share a faster network than the one that ssh uses."""
    local = local_hosts(plan)
    if settings.network is not None or all(local.values()):
        return
    chosen = {host.name: interface for host, interface in interfaces.items()}
    if (found := network.faster_network(_networks(facts, local), chosen)) is not None:
        faster, its_speed, speed = found
        here = next(iter(chosen.values())).network
        say(
            f"the ranks talk over {here} ({speed / 1000:g} Gbit/s), which ssh uses; the hosts are "
            f"on {faster} ({its_speed / 1000:g} Gbit/s), too: --network {faster}"
        )


def _networks(facts: Mapping[Host, Message], local: Mapping[Host, bool]) -> dict[str, HostNetwork]:
    return {host.name: _network_of(found, local[host]) for host, found in facts.items()}


def _network_of(facts: Message, local: bool) -> HostNetwork:
    interfaces = [Interface(**fields) for fields in facts["interfaces"]]
    # Here it would be how the user has logged in, which says nothing about the other hosts.
    return HostNetwork(interfaces, None if local else facts["reached_at"])


def rank_messages(
    plan: Plan,
    facts: Mapping[Host, Message],
    settings: Settings,
    interfaces: Mapping[Host, Interface],
    place_variables: Callable[[Place, Interface], Mapping[str, str]],
    master: tuple[str, int] | None = None,
) -> dict[Host, list[Message]]:
    """By host, each rank's number and environment, as the `start` message carries them.

    Args:
        plan: the job.
        facts: by host, what `agent.facts` found there.
        settings: the user's choices.
        interfaces: by host, what its ranks talk over.
        place_variables: what tells a rank its place.
        master: the address of rank 0's host and a port that is free there, for
            `environment.torch_variables`; None to leave these out.
    """
    variables = environment.explicit(os.environ, settings.variables)
    forwarded = environment.forwarded(os.environ)
    local = local_hosts(plan)
    ranks = {}
    for host, found in facts.items():
        bound = bound_cpus(plan, host, found, settings)
        # The ranks here inherit everything anyway.
        inherited = local[host] or settings.own_environments
        base = variables if inherited else forwarded | variables
        interface = interfaces[host]
        optional = {} if interface is network.LOOPBACK else _nccl(interface)
        ranks[host] = [
            {
                "rank": place.rank,
                "terminal": place.rank == settings.debug_rank,
                "cpus": bound[place.local_rank],
                "env": base
                | (environment.torch_variables(plan, place, *master) if master else {})
                | {name: variables[name] for name in _CHOSEN_MASTER if name in variables}
                | dict(place_variables(place, interface))
                | (environment.pinned_gpu(place, found["gpus"]) if settings.pin_gpus else {}),
                "defaults": optional
                | environment.defaults(place, found["cores"], settings.limits.start)
                | (environment.PATIENT if settings.debug_rank is not None else {}),
            }
            for place in plan.on(host)
        ]
    return ranks


def bound_cpus(plan: Plan, host: Host, facts: Message, settings: Settings) -> list[list[int]]:
    """Return the CPUs that each rank of `host` is bound to; empty where it is not bound."""
    count = len(plan.on(host))
    return binding.assign(facts["topology"], count) if settings.bind else [[] for _ in range(count)]


def start(connection: Connection, plan: Plan, ranks: Sequence[Message]) -> None:
    """Let an agent start these ranks of `plan`."""
    connection.send("start", ranks=ranks, size=plan.size)


def master(
    agents: Agents, plan: Plan, interfaces: Mapping[Host, Interface], settings: Settings
) -> tuple[str, int] | None:
    """Return an address and a free port of rank 0's host; None where they are not wanted.

    Raises:
        HvdkitError: the host does not answer.
    """
    if not settings.torch_env:
        return None
    host = plan.places[0].host
    address = interfaces[host].address
    if interfaces[host] is network.LOOPBACK:
        return address, network.free_port(address)
    connection = next(each for each in agents.connections if each.host == host)
    arguments = {"address": address}
    port = agents.answer(connection, "free_port", arguments, settings.limits.start)
    return address, int(port)


def warn_of_withheld(plan: Plan, settings: Settings, say: Callable[[str], None]) -> None:
    """Name the variables that ranks on other hosts do not get, if there are such ranks."""
    given = environment.explicit(os.environ, settings.variables)
    names = [name for name in environment.withheld(os.environ) if name not in given]
    if names and not (settings.own_environments or all(local_hosts(plan).values())):
        shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        say(
            f"not sent to other hosts: {shown}. They look like secrets, or belong to this host; "
            f"-x NAME sends one"
        )


def _nccl(interface: Interface) -> dict[str, str]:
    return {"NCCL_SOCKET_IFNAME": f"={interface.name}"}  # "=": this name, not one that begins so


def host_lines(
    plan: Plan,
    facts: Mapping[Host, Message],
    interfaces: Mapping[Host, Interface],
    settings: Settings,
) -> list[str]:
    """A line for each host: its ranks, and what it says of itself."""
    lines = []
    for host in plan.hosts:
        numbers = ", ".join(str(place.rank) for place in plan.on(host))
        interface, found = interfaces[host], facts[host]
        lines.append(
            f"  {host.name}: rank {numbers}; {interface.name} {interface.address}; "
            f"{found['cores']} cores, Python {found['python']}"
        )
        if settings.bind:
            cpus = bound_cpus(plan, host, found, settings)
            lines += [
                f"    rank {place.rank} on CPUs {binding.show_list(cpus[place.local_rank])}"
                for place in plan.on(host)
            ]
    return lines
