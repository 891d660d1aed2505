"""Steps that all launchers share: ask the hosts, choose the network, make ranks' environments.

The launchers call the functions in this order: `start_agents`, `collect_facts`, `choose_network`,
`start_ranks`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdkit.launch import binding, environment, network
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.hosts import Host, are_local
from hvdkit.launch.launcher import Settings
from hvdkit.launch.messages import Message
from hvdkit.launch.network import HostNetwork, Interface
from hvdkit.launch.plan import Place, Plan

_SHOWN_NAMES = 8
_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_INTERPRETERS = ("python", "bash", "sh")

# Host -> whether it is this machine. Each host is looked up only once.
_looked_up: dict[Host, bool] = {}


def local_hosts(plan: Plan) -> dict[Host, bool]:
    """Return, for each of the plan's hosts, whether it is this machine."""
    known = {host: host.local for host in plan.hosts if host.local is not None}
    unknown = [host for host in plan.hosts if host.local is None]
    _looked_up.update(are_local([host for host in unknown if host not in _looked_up]))
    return {host: known.get(host, _looked_up.get(host, False)) for host in plan.hosts}


def start_agents(agents: AgentPool, plan: Plan, settings: Settings) -> None:
    """Start an agent on each of the plan's hosts."""
    rank = settings.debug_rank
    terminal = None if rank is None else plan.places[rank].host
    agents.start(local_hosts(plan), settings.ssh, settings.python, terminal)


def collect_facts(agents: AgentPool, plan: Plan, settings: Settings) -> dict[Host, Message]:
    """Return the facts of each agent's host (`host_facts.facts`).

    Raises:
        HvdkitError: a host cannot take part.
    """
    facts = agents.require_facts(task(plan, settings), settings.timeouts.start)
    return {connection.host: found for connection, found in facts.items()}


def task(plan: Plan, settings: Settings) -> Message:
    """Return the fields of the `task` message."""
    return {
        "bind": settings.bind,
        "lost_after": settings.timeouts.lost,
        "stay": settings.agents_stay,
        "spares": settings.spares,
        "command": list(plan.command),
        "directory": plan.directory,
        "path": os.environ.get("PATH"),
        "files": script(plan.command, plan.directory),
    }


def script(command: Sequence[str], directory: str) -> list[str]:
    """Return the script that an interpreter runs, which every host must have; empty if none."""
    if not Path(command[0]).name.startswith(_INTERPRETERS):
        return []
    for argument in command[1:]:
        if argument in ("-c", "-m"):
            return []
        if not argument.startswith("-"):
            return [argument] if Path(directory, argument).is_file() else []
    return []


def choose_network(
    plan: Plan,
    facts: Mapping[Host, Message],
    settings: Settings,
    say: Callable[[str], None] | None = None,
) -> tuple[dict[Host, Interface], str]:
    """Return the interface of each host's ranks, and this machine's address for the rendezvous.

    Args:
        plan: the job.
        facts: host -> its facts (`host_facts.facts`).
        settings: the user's choices.
        say: prints a warning if the hosts share a network that is faster than that of ssh; None for
            no warning.
    """
    local = local_hosts(plan)
    if all(local.values()) and settings.network is None:
        return dict.fromkeys(facts, network.LOOPBACK), network.LOOPBACK.address
    networks = {host.name: _network_of(found, local[host]) for host, found in facts.items()}
    chosen = network.choose_interfaces(networks, settings.network)
    address = network.rendezvous_address(chosen, network.own_interfaces())
    if say is not None and settings.network is None:
        _warn_of_faster_network(networks, chosen, say)
    return {host: chosen[host.name] for host in facts}, address


def _network_of(facts: Message, local: bool) -> HostNetwork:
    interfaces = [Interface(**fields) for fields in facts["interfaces"]]
    # On this machine, `reached_at` is the address to which the user has logged in. It does not
    # show which network leads to the other hosts.
    return HostNetwork(interfaces, None if local else facts["reached_at"])


def _warn_of_faster_network(
    networks: Mapping[str, HostNetwork],
    chosen: Mapping[str, Interface],
    say: Callable[[str], None],
) -> None:
    if (found := network.faster_network(networks, chosen)) is not None:
        faster, faster_speed, speed = found
        subnet = next(iter(chosen.values())).network
        say(
            f"the ranks use the network of ssh, {subnet} ({speed / 1000:g} Gbit/s). The hosts "
            f"share a faster one ({faster_speed / 1000:g} Gbit/s): --network {faster}"
        )


def rank_messages(
    plan: Plan,
    facts: Mapping[Host, Message],
    settings: Settings,
    interfaces: Mapping[Host, Interface],
    place_variables: Callable[[Place, Interface], Mapping[str, str]],
    master: tuple[str, int] | None = None,
) -> dict[Host, list[Message]]:
    """Return host -> the field `ranks` of its `start` message: numbers and environments.

    Args:
        plan: the job.
        facts: host -> its facts (`host_facts.facts`).
        settings: the user's choices.
        interfaces: host -> the interface of its ranks.
        place_variables: returns the variables with a rank's place, such as its local rank.
        master: the address of rank 0's host and a free port there, for
            `environment.torch_variables`; None for ranks without these variables.
    """
    variables = environment.explicit(os.environ, settings.variables)
    forwarded = environment.forwarded(os.environ)
    local = local_hosts(plan)
    ranks = {}
    for host, found in facts.items():
        bound = bound_cpus(plan, host, found, settings)
        # Ranks on this machine inherit the other variables from their agent.
        inherited = local[host] or settings.use_agent_environment
        base = variables if inherited else forwarded | variables
        interface = interfaces[host]
        optional = {} if interface is network.LOOPBACK else _nccl(interface)
        elastic = settings.elastic_variables(host) if settings.elastic_variables else {}
        ranks[host] = [
            {
                "rank": place.rank,
                "terminal": place.rank == settings.debug_rank,
                "cpus": bound[place.local_rank],
                "env": base
                | (environment.torch_variables(plan, place, *master) if master else {})
                | {name: variables[name] for name in _MASTER_VARIABLES if name in variables}
                | dict(place_variables(place, interface))
                | dict(elastic)
                | (environment.pinned_gpu(place, found["gpus"]) if settings.pin_gpus else {}),
                "defaults": optional
                | environment.defaults(place, found["cores"], settings.timeouts.start)
                | (environment.DEBUG_DEFAULTS if settings.debug_rank is not None else {}),
            }
            for place in plan.on(host)
        ]
    return ranks


def bound_cpus(plan: Plan, host: Host, facts: Message, settings: Settings) -> list[list[int]]:
    """Return the CPUs that each rank of `host` is bound to; empty lists without binding."""
    count = len(plan.on(host))
    return binding.assign(facts["topology"], count) if settings.bind else [[] for _ in range(count)]


def start_ranks(
    agents: AgentPool,
    plan: Plan,
    facts: Mapping[Host, Message],
    settings: Settings,
    interfaces: Mapping[Host, Interface],
    place_variables: Callable[[Place, Interface], Mapping[str, str]],
) -> None:
    """Let the agents start the ranks. The arguments are those of `rank_messages`.

    There must be one agent for each host or one for each rank, in the order of the plan.
    """
    address = master(agents, plan, interfaces, settings)
    by_host = rank_messages(plan, facts, settings, interfaces, place_variables, address)
    ranks = {message["rank"]: message for messages in by_host.values() for message in messages}
    groups = plan.by_agent(len(agents.connections))
    for connection, places in zip(agents.connections, groups, strict=True):
        connection.idle = False
        connection.send("start", ranks=[ranks[place.rank] for place in places], size=plan.size)


def master(
    agents: AgentPool, plan: Plan, interfaces: Mapping[Host, Interface], settings: Settings
) -> tuple[str, int] | None:
    """Return MASTER_ADDR and MASTER_PORT: the address of rank 0's host and a free port there.

    None if the user does not want torchrun's variables.

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
    port = agents.ask(connection, "free_port", {"address": address}, settings.timeouts.start)
    return address, int(port)


def warn_of_withheld(plan: Plan, settings: Settings, say: Callable[[str], None]) -> None:
    """Tell the user which variables are not sent to other hosts, if the job has other hosts."""
    given = environment.explicit(os.environ, settings.variables)
    names = [name for name in environment.withheld(os.environ) if name not in given]
    if names and not (settings.use_agent_environment or all(local_hosts(plan).values())):
        shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
        say(
            f"not sent to other hosts: {shown}. Their names look like secrets, or their values "
            f"belong to this host; to send a variable, give -x NAME"
        )


def _nccl(interface: Interface) -> dict[str, str]:
    # With "=", NCCL compares the whole name. Without "=", eth1 would also select eth10.
    return {"NCCL_SOCKET_IFNAME": f"={interface.name}"}


def host_lines(
    plan: Plan,
    facts: Mapping[Host, Message],
    interfaces: Mapping[Host, Interface],
    settings: Settings,
) -> list[str]:
    """Return a line about each host for a dry run: its ranks, network, cores and Python."""
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
