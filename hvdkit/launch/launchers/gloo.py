"""Start ranks over Gloo: an agent on each host, and a rendezvous server on this machine."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import ClassVar, Self

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control import prepare
from hvdkit.launch.control.agent_command import agent_command
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.controller import Controller, over_gloo
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.reachability import broken_connections
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.launchers.launcher import Launcher, Workers
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

    def commands(self, plan: Plan, workers: Workers) -> Sequence[Sequence[str]]:  # noqa: ARG002
        local, settings = prepare.local_hosts(plan), self.settings
        return [agent_command(h, local[h], settings.ssh, settings.python) for h in plan.hosts]


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
