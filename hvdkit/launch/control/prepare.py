"""Steps that all launchers share: ask the hosts, choose the network, make ranks' environments.

The launchers call the functions in this order: `start_agents`, `collect_facts`, `choose_network`,
`start_ranks`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.faults.names import shortened
from hvdkit.launch.agent import binding
from hvdkit.launch.control import environment, network, readers
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.messages import Message
from hvdkit.launch.control.network import HostNetwork, Interface
from hvdkit.launch.control.plan import Place, Plan
from hvdkit.launch.control.questions import Questions
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.hosts.hosts import Host, are_local
from hvdkit.rendezvous.server import KEY

_SHOWN_NAMES = 8
_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_INTERPRETERS = ("python", "bash", "sh")

# Host -> whether it is this machine. Each host is looked up only once.
_looked_up: dict[Host, bool] = {}


@dataclass(frozen=True)
class Workers:
    """The agents of a start, and what they have told about their hosts.

    Attributes:
        agents: the agents. They start the ranks, answer questions, and report each end.
        facts: host -> its facts (`host_facts.facts`).
        interfaces: host -> the interface of its ranks.
        address: this machine's address on the network of the ranks.
    """

    agents: AgentPool
    facts: Mapping[Host, Message]
    interfaces: Mapping[Host, Interface]
    address: str


def local_hosts(plan: Plan) -> dict[Host, bool]:
    """Return, for each of the plan's hosts, whether it is this machine."""
    known = {host: host.local for host in plan.hosts if host.local is not None}
    unknown = [host for host in plan.hosts if host.local is None]
    _looked_up.update(are_local([host for host in unknown if host not in _looked_up]))
    return {host: known.get(host, _looked_up.get(host, False)) for host in plan.hosts}


def start_agents(
    agents: AgentPool, plan: Plan, settings: Settings, hosts: Mapping[Host, bool] | None = None
) -> None:
    """Start an agent on each of the plan's hosts, or only on `hosts` (`local_hosts`)."""
    rank = settings.debug_rank
    terminal = None if rank is None else plan.places[rank].host
    chosen = local_hosts(plan) if hosts is None else hosts
    agents.start(chosen, settings.ssh, settings.python, terminal)


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
        "steps": settings.steps,
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
    agents: AgentPool,
    plan: Plan,
    facts: Mapping[Host, Message],
    settings: Settings,
    warns: bool = False,
) -> Workers:
    """Choose the interface of each host's ranks, and this machine's address for the rendezvous.

    Args:
        facts: host -> its facts (`host_facts.facts`).
        warns: whether to warn if the hosts share a network that is faster than that of ssh.
    """
    local = local_hosts(plan)
    if all(local.values()) and settings.network is None:
        loopback = network.LOOPBACK
        return Workers(agents, facts, dict.fromkeys(facts, loopback), loopback.address)
    networks = {
        host.name: HostNetwork(
            [Interface(**fields) for fields in found["interfaces"]],
            # On this machine, `reached_at` is the address to which the user has logged in. It does
            # not show which network leads to the other hosts.
            None if local[host] else found["reached_at"],
        )
        for host, found in facts.items()
    }
    chosen = network.choose_interfaces(networks, settings.network)
    address = network.rendezvous_address(chosen, network.own_interfaces())
    warns = warns and settings.network is None
    if warns and (faster := network.faster_network(networks, chosen)) is not None:
        net, faster_speed, speed = faster
        readers.say(
            f"the ranks use the network of ssh, {next(iter(chosen.values())).network} "
            f"({speed / 1000:g} Gbit/s). The hosts share a faster one ({faster_speed / 1000:g} "
            f"Gbit/s): --network {net}"
        )
    return Workers(agents, facts, {host: chosen[host.name] for host in facts}, address)


def rank_messages(
    plan: Plan,
    workers: Workers,
    settings: Settings,
    place_variables: Callable[[Place, Interface], Mapping[str, str]],
    master_port: int | None,
) -> list[Message]:
    """Return what the agents get about each rank: its numbers and its environment.

    Args:
        place_variables: returns the variables with a rank's place, such as its local rank.
        master_port: a free port of rank 0's host, for `environment.torch_variables`; None for ranks
            without these variables.
    """
    variables = environment.explicit(os.environ, settings.variables)
    forwarded = environment.forwarded(os.environ)
    local = local_hosts(plan)
    master = workers.interfaces[plan.places[0].host].address
    ranks: list[Message] = []
    for host in plan.hosts:
        found = workers.facts[host]
        bound = bound_cpus(plan, host, found, settings)
        # Ranks on this machine inherit the other variables from their agent.
        inherited = local[host] or settings.use_agent_environment
        base = variables if inherited else forwarded | variables
        interface = workers.interfaces[host]
        optional = {} if interface is network.LOOPBACK else _nccl(interface)
        ranks += [
            {
                "rank": place.rank,
                "terminal": place.rank == settings.debug_rank,
                "cpus": bound[place.local_rank],
                "env": base
                | (
                    {}
                    if master_port is None
                    else environment.torch_variables(plan, place, master, master_port)
                )
                | {name: variables[name] for name in _MASTER_VARIABLES if name in variables}
                | dict(place_variables(place, interface))
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
    plan: Plan,
    workers: Workers,
    settings: Settings,
    place_variables: Callable[[Place, Interface], Mapping[str, str]],
) -> None:
    """Let the agents start the ranks. The arguments are those of `rank_messages`.

    There must be one agent for each host or one for each rank, in the order of the plan.

    Raises:
        HvdkitError: the host of rank 0 does not answer.
    """
    agents = workers.agents
    port = _master_port(plan, workers, settings)
    ranks = rank_messages(plan, workers, settings, place_variables, port)
    groups = plan.by_agent(len(agents.connections))
    for connection, places in zip(agents.connections, groups, strict=True):
        connection.idle = False
        connection.send("start", ranks=[ranks[place.rank] for place in places], size=plan.size)


def _master_port(plan: Plan, workers: Workers, settings: Settings) -> int | None:
    """Return a free port of rank 0's host; None for ranks without torchrun's variables."""
    if not settings.torch_env:
        return None
    host = plan.places[0].host
    address = workers.interfaces[host].address
    if workers.interfaces[host] is network.LOOPBACK:
        return network.free_port(address)
    agents = workers.agents
    # There may be an agent for each rank.
    with agents.only([next(each for each in agents.connections if each.host == host)]):
        questions = Questions(agents, settings.timeouts.start)
        return int(questions.all("free_port", {"address": address})[host])


def rank_lines(
    plan: Plan,
    workers: Workers,
    settings: Settings,
    place_variables: Callable[[Place, Interface], Mapping[str, str]],
) -> list[str]:
    """Return the command of each rank for a dry run. The arguments are those of `rank_messages`."""
    port = _master_port(plan, workers, settings)
    # Variables from -x, and variables of unknown use, may be secrets.
    asked = environment.explicit(os.environ, settings.variables)
    forwarded = environment.forwarded(os.environ).keys() - environment.known(os.environ).keys()
    hidden = {*asked, *forwarded, KEY}
    lines = []
    for rank in rank_messages(plan, workers, settings, place_variables, port):
        variables = rank["defaults"] | rank["env"]
        shown = {name: value for name, value in variables.items() if name not in hidden}
        words = ["env", *(f"{name}={value}" for name, value in sorted(shown.items()))]
        lines.append(f"  cd {shlex.quote(plan.directory)} && {shlex.join([*words, *plan.command])}")
    if asked:
        lines.append(f"  (and with {', '.join(sorted(asked))}, from -x)")
    return lines


def warn_of_withheld(plan: Plan, settings: Settings) -> None:
    """Tell the user which variables are not sent to other hosts, if the job has other hosts."""
    given = environment.explicit(os.environ, settings.variables)
    names = [name for name in environment.withheld(os.environ) if name not in given]
    if names and not (settings.use_agent_environment or all(local_hosts(plan).values())):
        readers.say(
            f"not sent to other hosts: {shortened(names, _SHOWN_NAMES)}. Their names look like "
            f"secrets, or their values belong to this host; to send a variable, give -x NAME"
        )


def _nccl(interface: Interface) -> dict[str, str]:
    # With "=", NCCL compares the whole name. Without "=", eth1 would also select eth10.
    return {"NCCL_SOCKET_IFNAME": f"={interface.name}"}


def host_lines(plan: Plan, workers: Workers, settings: Settings) -> list[str]:
    """Return a line about each host for a dry run: its ranks, network, cores and Python."""
    lines = []
    for host in plan.hosts:
        numbers = ", ".join(str(place.rank) for place in plan.on(host))
        interface, found = workers.interfaces[host], workers.facts[host]
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
