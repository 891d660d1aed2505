"""Ask all agents of a job questions (`inspection`), before or between the starts of its ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.faults.names import shortened
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.hosts.hosts import Host


class Questions:
    """Ask agents, and return their answers by host."""

    def __init__(self, agents: AgentPool, timeout: float) -> None:
        self._agents = agents
        self._timeout = timeout
        self.hosts = [connection.host for connection in agents.connections]

    def all(self, question: str, arguments: Mapping[str, Any]) -> dict[Host, Any]:
        """Return the answers of all hosts to the same question.

        Raises:
            StartError: a host does not answer.
        """
        return self.each(question, dict.fromkeys(self.hosts, arguments))

    def each(self, question: str, arguments: Mapping[Host, Mapping[str, Any]]) -> dict[Host, Any]:
        """Return the answers of the hosts in `arguments`.

        Raises:
            StartError: a host does not answer.
        """
        self._send(question, arguments)
        answers: dict[Host, Any] = {}
        deadline = time.monotonic() + self._timeout
        while len(answers) < len(arguments):
            event = self._agents.next_event(max(0.0, deadline - time.monotonic()))
            if event is None:
                silent = [host for host in arguments if host not in answers]
                raise StartError(
                    f"{named(silent)} did not answer the question `{question}` within "
                    f"{self._timeout:g} s (--start-timeout)",
                    [host.name for host in silent],
                )
            if event.message["kind"] != "answer":
                why = event.message.get("reason") or event.connection.explain()
                host = event.connection.host.name
                raise StartError(f"{host}: {why}", [host])
            answers[event.connection.host] = event.message["answer"]
        return {host: answers[host] for host in self.hosts if host in answers}

    def end(self, question: str) -> None:
        """Ask all hosts, and do not wait for the answers, because no other question follows."""
        self._send(question, {host: {} for host in self.hosts})

    def _send(self, question: str, arguments: Mapping[Host, Mapping[str, Any]]) -> None:
        for connection in self._agents.connections:
            if connection.host in arguments:
                connection.send("ask", question=question, arguments=arguments[connection.host])


def named(hosts: Sequence[Host]) -> str:
    """Return a text such as `host1, host2 and 3 more`."""
    return shortened([host.name for host in hosts])
