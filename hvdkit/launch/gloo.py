"""Start ranks over Gloo: an agent on each host, and a rendezvous server on this machine."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hvdkit.errors import HvdkitError
from hvdkit.launch import environment, network, preflight, prepare
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.connection import agent_command
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job
from hvdkit.launch.kept_agents import KeptAgents
from hvdkit.launch.launcher import Settings
from hvdkit.launch.messages import Message
from hvdkit.launch.network import Interface
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Place, Plan
from hvdkit.launch.reachability import broken_connections
from hvdkit.processes import python_command
from hvdkit.rendezvous import RendezvousServer, gloo_environment
from hvdkit.signals import begin_to_note, stop_noting

#: With this many ranks, an engine without hvdkit's patch of the rendezvous starts slowly.
SLOW_SIZE = 32
#: The first revision of the engine (the Horovod of `hvdkit build`) that sends the job's key to the
#: rendezvous.
KEY_REVISION = 6
# Time for all hosts to try connections after a failure.
_CONNECT_SECONDS = 20.0


@dataclass(frozen=True)
class Gloo:
    """Start ranks over Gloo, with an agent on each host: here, or over ssh.

    Attributes:
        plan: the job.
        settings: how it is started.
        kept: the agents of earlier starts; None for a job with one start.
    """

    plan: Plan
    settings: Settings
    kept: KeptAgents | None = None

    @contextmanager
    def run(self, output: Output, say: Callable[[str], None]) -> Iterator[Outcome]:
        """Start the ranks, and watch them until they have ended. Close the agents on exit."""
        prepare.warn_of_withheld(self.plan, self.settings, say)
        if self.kept is not None:
            settings = self.kept.settings_for(self.plan, self.settings)
            agents = self.kept.of(self.plan, settings)
            outcome = run_with(agents, self.plan, settings, output, say)
            self.kept.mark_checked(self.plan)
            yield outcome
            return
        with AgentPool(self.settings.ssh.silence) as agents:
            prepare.start_agents(agents, self.plan, self.settings)
            yield run_with(agents, self.plan, self.settings, output, say)

    def describe(self, say: Callable[[str], None]) -> str:  # noqa: ARG002
        """Return the plan as text, and the commands that would start the ranks."""
        local = prepare.local_hosts(self.plan)
        with AgentPool(self.settings.ssh.silence) as agents:
            prepare.start_agents(agents, self.plan, self.settings)
            facts = prepare.collect_facts(agents, self.plan, self.settings)
        interfaces, address = prepare.choose_network(self.plan, facts, self.settings)
        lines = [f"{self.plan.size} ranks over Gloo, in {self.plan.directory}"]
        lines += prepare.host_lines(self.plan, facts, interfaces, self.settings)
        lines += ["", "This starts the agents, which start the ranks:"]
        for host in self.plan.hosts:
            agent = agent_command(host, local[host], self.settings.ssh, self.settings.python)
            lines.append(f"  {shlex.join(agent)}")

        def on_host(host: Host, words: Sequence[str]) -> str:
            line = f"cd {shlex.quote(self.plan.directory)} && {shlex.join(words)}"
            if local[host]:
                return line
            return shlex.join(["ssh", *self.settings.ssh.options(), host.name, line])

        return "\n".join(
            [
                *lines,
                *manual_commands(self.plan, self.settings, facts, interfaces, address, on_host),
            ]
        )


def run_with(
    agents: AgentPool,
    plan: Plan,
    settings: Settings,
    output: Output,
    say: Callable[[str], None],
) -> Outcome:
    """Start and watch the ranks of `plan`, with the running agents of its hosts."""
    facts = prepare.collect_facts(agents, plan, settings)
    interfaces, address = prepare.choose_network(plan, facts, settings, say)
    without_key = not all_send_key(facts)
    with RendezvousServer(address, size=plan.size, stores_without_key=without_key) as server:
        launcher_address = (address, server.port)
        preflight.before_start(agents, interfaces, plan, settings, launcher_address, say)
        places = place_variables(plan, address, server.port, server.key)
        prepare.start_ranks(agents, plan, facts, settings, interfaces, places)
        ready = registered_ranks(server, plan.size, facts, say)
        elastic = settings.elastic_variables is not None
        outcome = Job(plan, agents, output, settings.rank_timeouts, ready, say, elastic).run()
        may_continue = outcome.restartable and outcome.interrupted is None
        if settings.agents_stay and may_continue and not outcome.shows_host(plan):
            try:
                if stop_noting() is None:
                    outcome = _with_broken(outcome, agents, interfaces, launcher_address)
                begin_to_note()
            except KeyboardInterrupt as stop:
                number = stop.args[0] if stop.args else signal.SIGINT
                outcome = replace(outcome, interrupted=signal.Signals(number))
        return outcome


def _with_broken(
    outcome: Outcome,
    agents: AgentPool,
    interfaces: Mapping[Host, Interface],
    launcher_address: tuple[str, int],
) -> Outcome:
    """Return the outcome of a job with the connections between its hosts that fail now."""
    # An agent may also be lost after its ranks have ended.
    answering = all(each.idle and not each.ended for each in agents.connections)
    if len(interfaces) == 1 or not answering:
        return outcome
    try:
        broken = broken_connections(agents, interfaces, launcher_address, _CONNECT_SECONDS)
    except HvdkitError:
        return outcome  # the next start finds that a host does not answer
    return outcome.with_broken(broken)


def place_variables(
    plan: Plan, address: str, port: int, key: str | None = None
) -> Callable[[Place, Interface], dict[str, str]]:
    """Return a function that returns the variables for a rank's place.

    Args:
        plan: the job.
        address: the address of its rendezvous.
        port: the port of its rendezvous.
        key: the key for the rendezvous; None for a rendezvous without a key.
    """

    def variables(place: Place, interface: Interface) -> dict[str, str]:
        return gloo_environment(
            place.rank,
            plan.size,
            address,
            port,
            interface.name,
            place.host.address,
            place.local_rank,
            place.local_size,
            place.cross_rank,
            place.cross_size,
            key,
        )

    return variables


def all_send_key(facts: Mapping[Host, Message]) -> bool:
    """Return whether the engine of every host sends the key to the rendezvous."""
    return all(found["engine"] >= KEY_REVISION for found in facts.values())


def registered_ranks(
    server: RendezvousServer,
    size: int,
    facts: Mapping[Host, Message],
    say: Callable[[str], None],
) -> Callable[[], set[int]]:
    """Return a function that returns the ranks that have registered at the rendezvous.

    If the engine of every host sends the key, ranks without the key are not counted: they may not
    belong to this job. The function warns once of an engine that is slow to start at this size.
    """
    warned = False
    have_key = all_send_key(facts)

    def ranks() -> set[int]:
        nonlocal warned
        if have_key:
            return server.registered()
        old = server.without_key() & set(range(size))
        if old and size >= SLOW_SIZE and not warned:
            warned = True
            say(
                f"the engine of rank {min(old)} asks for the addresses of {size} ranks one by one, "
                f"which takes long: build a newer engine there with `hvdkit build`"
            )
        return server.registered() | old

    return ranks


def manual_commands(
    plan: Plan,
    settings: Settings,
    facts: Mapping[Host, Message],
    interfaces: Mapping[Host, Interface],
    address: str,
    on_host: Callable[[Host, Sequence[str]], str],
) -> list[str]:
    """Return the lines of a dry run with commands that start the ranks without hvdkit.

    Args:
        plan: the job.
        settings: how it is started.
        facts: host -> its facts (`host_facts.facts`).
        interfaces: host -> the interface of its ranks.
        address: this machine's address, for the rendezvous.
        on_host: returns the command that runs the given words on a host.
    """
    port = network.free_port(address)
    rendezvous = python_command("-m", "hvdkit.rendezvous", address, str(port))
    lines = ["", "To start the same ranks by hand:", f"  {shlex.join(rendezvous)} &"]
    places = place_variables(plan, address, port)
    master = (interfaces[plan.places[0].host].address, network.free_port(address))
    ranks = prepare.rank_messages(
        plan, facts, settings, interfaces, places, master if settings.torch_env else None
    )
    # Variables from -x, and variables of unknown use, may be secrets.
    asked = environment.explicit(os.environ, settings.variables)
    forwarded = environment.forwarded(os.environ).keys() - environment.known(os.environ).keys()
    hidden = {*asked, *forwarded}
    for host in plan.hosts:
        for rank in ranks[host]:
            shown = {k: v for k, v in (rank["defaults"] | rank["env"]).items() if k not in hidden}
            words = ["env", *(f"{name}={value}" for name, value in sorted(shown.items()))]
            lines.append(f"  {on_host(host, [*words, *plan.command])} &")
    if asked:
        lines.append(f"  (and with {', '.join(sorted(asked))}, from -x)")
    return lines
