"""A host on the list of an elastic job, and its agent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.connection import Connection
from hvdkit.launch.control.messages import Message
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.hosts.hosts import Host


@dataclass
class Member:
    """A host of the list of hosts, and its agent.

    Attributes:
        host: the host, with its current slots.
        folder: the name of its folders for commits.
        connection: the connection to its agent; None without one.
        fit: whether the agent has answered that the host can take part.
        kept: whether the agent has made the folders for commits.
        folders: the paths of these folders. The next agent of the host keeps the same folders.
        deadline: the time until which its agent must answer; infinite if no answer is expected.
        retry_at: the time of the next attempt to start an agent, or to ask an agent that stays.
        problem: the last problem that was printed; empty if the agent has answered since.
    """

    host: Host
    folder: str
    connection: Connection | None = None
    fit: bool = False
    kept: bool = False
    folders: Sequence[str] = ()
    deadline: float = float("inf")
    retry_at: float = 0.0
    problem: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether its agent has answered, and the host can take part."""
        return self.fit and self.kept

    @property
    def is_starting(self) -> bool:
        """Whether an answer of its agent is expected, for the first time or after the last one."""
        return not self.is_ready and not self.problem and self.deadline < float("inf")

    @property
    def lacks_agent(self) -> bool:
        """Whether its agent has just been lost, and the next one starts."""
        is_lost = self.connection is not None and self.connection.ended
        return bool(self.folders) and (self.is_starting or is_lost)

    def start(self, agents: AgentPool, settings: Settings, task: Message) -> None:
        """Start its agent, and ask it.

        Raises:
            HvdkitError: the agent cannot be started.
        """
        agents.start({self.host: bool(self.host.local)}, settings.ssh, settings.python)
        self.connection = agents.connections[-1]
        self.kept = False
        # Nobody waits for a host with a problem. The host joins when it answers.
        self.deadline = min(self.deadline, time.monotonic() + settings.timeouts.start)
        self.ask(task)
        self.connection.send("keep", name=self.folder)

    def ask(self, task: Message) -> None:
        """Ask its agent whether the host can take part."""
        assert self.connection is not None
        self.fit = False
        self.connection.send("task", **task)

    def expect_again(self, seconds: float) -> None:
        """Expect another agent on the host, because maybe only the last one was killed."""
        self.problem, self.retry_at = "", 0.0
        self.deadline = time.monotonic() + seconds

    def drop(self, agents: AgentPool) -> None:
        """End its agent."""
        connection, self.connection = self.connection, None
        if connection is not None:
            agents.drop([connection])
