"""Agents that stay connected between the starts of one job (`hvdkit run --restarts`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Self

from hvdkit.launch import prepare
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.connection import Connection
from hvdkit.launch.hosts import Host
from hvdkit.launch.launcher import Settings
from hvdkit.launch.plan import Plan
from hvdkit.launch.ssh import HOST_SECONDS
from hvdkit.launch.start_error import StartError

# After this number of seconds, the process of a closed connection is killed.
_CLOSE_SECONDS = 1.0


class KeptAgents:
    """The agents of the hosts of a job, for all its starts. A context manager that ends them.

    Args:
        agents: the agents of nodes that users have started (`--nodes`); default a new pool, to
            which this class adds agents.
        silence: the seconds without an answer after which a host is lost.
    """

    def __init__(self, agents: AgentPool | None = None, silence: float = HOST_SECONDS) -> None:
        self._can_start = agents is None
        self._agents = AgentPool(silence) if agents is None else agents
        self._checked: set[str] = set()

    def __enter__(self) -> Self:
        if self._can_start:
            self._agents.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._can_start:
            self._agents.__exit__(*exc)

    def of(self, plan: Plan, settings: Settings) -> AgentPool:
        """Return the agents of the plan's hosts, in their order. Start those that are missing."""
        self._start(plan, settings)
        return self._agents

    def problems(self, probe: Plan, settings: Settings, timeout: float) -> dict[Host, str]:
        """Return the hosts of a plan that do not answer or cannot take part, and why.

        Args:
            probe: the plan.
            settings: how its ranks are started.
            timeout: seconds for the hosts to answer.
        """
        self._start(probe, settings)
        _, problems = self._agents.collect_facts(prepare.task(probe, settings), timeout)
        self._drop(problems)
        return {connection.host: problem for connection, problem in problems.items()}

    def connected(self) -> list[Host]:
        """Return the hosts whose agents are connected."""
        return [c.host for c in self._agents.every if c.idle and not c.ended]

    def settings_for(self, plan: Plan, settings: Settings) -> Settings:
        """Return the settings for a start: without a preflight if all hosts were checked before."""
        checked = {host.name for host in plan.hosts} <= self._checked
        return replace(settings, preflight=settings.preflight and not checked)

    def mark_checked(self, plan: Plan) -> None:
        """Remember that the plan's hosts have passed the preflight check."""
        self._checked |= {host.name for host in plan.hosts}

    def _start(self, plan: Plan, settings: Settings) -> None:
        self._drop(c for c in self._agents.every if c.ended or not c.idle)
        kept = {c.host.name: c for c in self._agents.every}
        local = prepare.local_hosts(plan)
        self._agents.connections = []
        self._agents.unused = list(kept.values())
        missing = {host: local[host] for host in plan.hosts if host.name not in kept}
        if missing and not self._can_start:
            names = [host.name for host in missing]
            lost = f"lost {', '.join(names)}: a node cannot join a running job again"
            raise StartError(lost, names)
        self._agents.start(missing, settings.ssh, settings.python)
        started = {connection.host.name: connection for connection in self._agents.connections}
        by_name = kept | started
        chosen: list[Connection] = []
        for host in plan.hosts:
            connection = by_name[host.name]
            connection.host = host
            chosen.append(connection)
        self._agents.connections = chosen
        self._agents.unused = [c for c in kept.values() if c not in chosen]

    def _drop(self, connections: Iterable[Connection]) -> None:
        for connection in list(connections):
            for known in (self._agents.connections, self._agents.unused):
                if connection in known:
                    known.remove(connection)
            connection.close(_CLOSE_SECONDS)
