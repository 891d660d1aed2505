"""Start ranks over Gloo: an agent on each host, and a rendezvous server on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import ClassVar, Self

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control import environment, network, prepare
from hvdkit.launch.control.agent_command import agent_command
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.controller import Controller, over_gloo, place_variables
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.reachability import broken_connections
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.launchers.launcher import Launcher, Workers
from hvdkit.system.processes import python_command
from hvdkit.system.signals import begin_to_note, stop_noting

# Time for all hosts to try connections after a failure.
_CONNECT_SECONDS = 20.0
_NEEDS_MPI = "{0} needs --launcher mpi: add it, or remove {0}"


class Gloo(Launcher):
    """Start ranks over Gloo, with an agent on each host: here, or over ssh.

    The agents stay between the starts of the job.
    """

    name = "Gloo"
    refused: ClassVar[Mapping[str, str]] = {"mpirun": _NEEDS_MPI, "mpi_args": _NEEDS_MPI}

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.agents = AgentPool(settings.ssh.silence)
        # The names of the hosts that have passed the preflight.
        self._checked: set[str] = set()

    def __enter__(self) -> Self:
        self.agents.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.agents.__exit__(*exc)

    def check(self, options: argparse.Namespace, plan: Plan) -> None:
        super().check(options, plan)
        if (rank := self.settings.debug_rank) is None:
            return
        if not 0 <= rank < plan.size:
            raise UsageError(f"--debug-rank is {rank}; the ranks are 0 to {plan.size - 1}")
        host = plan.places[rank].host
        if not prepare.local_hosts(plan)[host]:
            raise UsageError(
                f"--debug-rank {rank} runs on {host.name}, but this terminal is on another host; "
                f"start the job there, or choose a rank of this host"
            )

    @contextmanager
    def examined(self, plan: Plan, checks: bool = True) -> Iterator[Workers]:
        self._connect(plan)
        facts = prepare.collect_facts(self.agents, plan, self.settings)
        names = {host.name for host in plan.hosts}
        checks = checks and not names <= self._checked
        yield self._examine(self.agents, plan, facts, checks)
        self._checked.update(names)

    def _connect(self, plan: Plan) -> None:
        """Connect to the agents of the plan's hosts, in their order. Start those that are missing.

        Raises:
            StartError: a node of `--nodes` was lost.
        """
        agents = self.agents
        agents.drop(c for c in agents.every if c.ended or not c.idle)
        kept = {c.host.name: c for c in agents.every}
        local = prepare.local_hosts(plan)
        missing = {host: local[host] for host in plan.hosts if host.name not in kept}
        if missing and not self.hosts_return:
            names = [host.name for host in missing]
            lost = f"lost {', '.join(names)}: a node cannot join a running job again"
            raise StartError(lost, names)
        agents.connections, agents.unused = [], list(kept.values())
        prepare.start_agents(agents, plan, self.settings, missing)
        by_name = kept | {c.host.name: c for c in agents.connections}
        agents.connections = [by_name[host.name] for host in plan.hosts]
        agents.unused = [c for c in kept.values() if c not in agents.connections]
        for connection, host in zip(agents.connections, plan.hosts, strict=True):
            connection.host = host

    def keep_only(self, hosts: Sequence[Host]) -> None:
        """End the agents on all other hosts."""
        names = {host.name for host in hosts}
        self.agents.drop(c for c in self.agents.every if c.host.name not in names)

    def controller(self, plan: Plan, workers: Workers) -> AbstractContextManager[Controller]:
        return over_gloo(plan, workers.facts, workers.address)

    def problems(self, plan: Plan, timeout: float) -> Mapping[Host, str]:
        self._connect(plan)
        _, problems = self.agents.collect_facts(prepare.task(plan, self.settings), timeout)
        self.agents.drop(problems)
        return {connection.host: problem for connection, problem in problems.items()}

    def after_failure(self, outcome: Outcome, plan: Plan, workers: Workers) -> Outcome:
        """Return the outcome with the connections between the hosts that fail now.

        They are tried if the job may start again, and the failure does not show its host.
        """
        may_continue = outcome.restartable and outcome.interrupted is None
        if not may_continue or outcome.shows_host(plan):
            return outcome
        try:
            if stop_noting() is None:
                outcome = _with_broken(outcome, workers)
            begin_to_note()
        except KeyboardInterrupt as stop:
            number = stop.args[0] if stop.args else signal.SIGINT
            outcome = replace(outcome, interrupted=signal.Signals(number))
        return outcome

    def commands(self, plan: Plan, workers: Workers) -> Sequence[str]:
        local, ssh = prepare.local_hosts(plan), self.settings.ssh
        lines = ["This starts the agents, which start the ranks:"]
        for host in plan.hosts:
            agent = agent_command(host, local[host], ssh, self.settings.python)
            lines.append(f"  {shlex.join(agent)}")

        def on_host(host: Host, words: Sequence[str]) -> str:
            line = f"cd {shlex.quote(plan.directory)} && {shlex.join(words)}"
            return line if local[host] else shlex.join(["ssh", *ssh.options(), host.name, line])

        return [*lines, *manual_commands(plan, self.settings, workers, on_host)]


def _with_broken(outcome: Outcome, workers: Workers) -> Outcome:
    """Return the outcome of a job with the connections between its hosts that fail now."""
    # An agent may also be lost after its ranks have ended.
    answering = all(each.idle and not each.ended for each in workers.agents.connections)
    if len(workers.interfaces) == 1 or not answering:
        return outcome
    try:
        broken = broken_connections(workers, _CONNECT_SECONDS)
    except HvdkitError:
        return outcome  # the next start finds that a host does not answer
    return outcome.with_broken(broken)


def manual_commands(
    plan: Plan,
    settings: Settings,
    workers: Workers,
    on_host: Callable[[Host, Sequence[str]], str],
) -> list[str]:
    """Return the lines of a dry run with commands that start the ranks without hvdkit.

    Args:
        on_host: returns the command that runs the given words on a host.
    """
    port = network.free_port(workers.address)
    rendezvous = python_command("-m", "hvdkit.rendezvous.server", workers.address, str(port))
    lines = ["", "To start the same ranks by hand:", f"  {shlex.join(rendezvous)} &"]
    places = place_variables(plan, workers.address, port)
    master_port = network.free_port(workers.address) if settings.torch_env else None
    ranks = prepare.rank_messages(plan, workers, settings, places, master_port)
    # Variables from -x, and variables of unknown use, may be secrets.
    asked = environment.explicit(os.environ, settings.variables)
    forwarded = environment.forwarded(os.environ).keys() - environment.known(os.environ).keys()
    hidden = {*asked, *forwarded}
    for place, rank in zip(plan.places, ranks, strict=True):
        shown = {k: v for k, v in (rank["defaults"] | rank["env"]).items() if k not in hidden}
        words = ["env", *(f"{name}={value}" for name, value in sorted(shown.items()))]
        lines.append(f"  {on_host(place.host, [*words, *plan.command])} &")
    if asked:
        lines.append(f"  (and with {', '.join(sorted(asked))}, from -x)")
    return lines
