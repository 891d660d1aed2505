"""All agents of a job, on the launcher's side: start them, ask them, and queue their messages.

A `Connection` is the launcher's end of the connection to one agent.
"""

from __future__ import annotations

import queue
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Self

import hvdkit
from hvdkit.launch.control import messages
from hvdkit.launch.control.connection import Connection, Event, Events
from hvdkit.launch.control.messages import Message
from hvdkit.launch.control.process_connection import ProcessConnection
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.launch.launchers.external_command import ExternalLauncher
from hvdkit.system.signals import begin_to_note

#: A disconnected agent gives its ranks eight seconds between SIGTERM and SIGKILL.
_CLOSE_SECONDS = 15.0
# After this number of seconds, the process of a connection that was dropped is killed.
_DROP_SECONDS = 2.0
#: The most agents for which `Connection.explain` runs at the same time, after a timeout.
_EXPLAINING = 64
#: The most ssh processes that may connect at the same time. A slow one counts only for
#: `_CONNECTING_SECONDS`.
_CONNECTING = 64
_CONNECTING_SECONDS = 15.0
#: The delays before the restarts of an agent whose host refused it transiently.
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)


class AgentPool:
    """The agents of a job. A context manager that ends the agents and their ranks on exit.

    Attributes:
        connections: the connections to the agents.
        unused: the connections to agents of hosts without ranks in this start. Their messages are
            ignored, except signals.
        events: the queue of the agents' messages.
        external: the mpirun or srun that has started the agents; None for other agents.

    Args:
        silence: the seconds without an answer after which a host is lost (`--host-timeout`).
    """

    def __init__(self, silence: float) -> None:
        # The system detects the loss of a host only some time after a message that is not answered.
        self._heartbeat_seconds = messages.heartbeat_interval(silence)
        self.connections: list[Connection] = []
        self.unused: list[Connection] = []
        # Those that `only` leaves out.
        self._left_out: list[Connection] = []
        self.events: Events = queue.Queue()
        self.external: ExternalLauncher | None = None
        self._stop = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, daemon=True)

    @property
    def every(self) -> list[Connection]:
        """The connections to all agents, with those of hosts without ranks."""
        return [*self.connections, *self.unused, *self._left_out]

    @contextmanager
    def only(self, chosen: Sequence[Connection]) -> Iterator[None]:
        """Context in which `connections` are `chosen`. The other agents still get heartbeats."""
        before = self.connections
        self._left_out = [connection for connection in before if connection not in chosen]
        self.connections = list(chosen)
        try:
            yield
        finally:
            self.connections, self._left_out = before, []

    def __enter__(self) -> Self:
        self._heartbeat.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            # A signal must not replace the error.
            begin_to_note()
        self._stop.set()
        self._heartbeat.join()
        every = self.every
        for connection in every:
            connection.disconnect()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in every:
            connection.close(max(0.1, deadline - time.monotonic()))

    def start(
        self, hosts: Mapping[Host, bool], ssh: Ssh, python: str, terminal: Host | None = None
    ) -> None:
        """Start an agent on each host.

        Args:
            hosts: host -> whether it is this machine.
            ssh: how to reach other hosts.
            python: the Python of agents on other hosts.
            terminal: the host whose agent gets this process's standard streams, for a rank.
        """
        for host, local in hosts.items():
            while not local and not self.places():
                time.sleep(0.01)
            self.connections.append(
                ProcessConnection(host, local, ssh, python, self.events, host == terminal)
            )

    def drop(self, connections: Iterable[Connection]) -> None:
        """Forget agents, and end them."""
        for connection in list(connections):
            for known in (self.connections, self.unused):
                if connection in known:
                    known.remove(connection)
            connection.close(_DROP_SECONDS)

    def places(self) -> int:
        """Return the number of ssh processes that may begin to connect now."""
        recent = time.monotonic() - _CONNECTING_SECONDS
        waiting = [c for c in self.connections if not (c.greeted or c.ended)]
        return max(0, _CONNECTING - sum(each.opened_at > recent for each in waiting))

    def next_event(self, timeout: float) -> Event | None:
        """Return the next message of an agent; None if none arrives within `timeout` seconds.

        If a user sent a signal to a node of `--nodes`, the signal is raised in this process.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if event.connection.disconnected:
                continue
            event.connection.acknowledge(event)
            # Also from a node without ranks: a signal on any node stops the job.
            if event.message["kind"] == "signal":
                number = event.message["number"]
                # This process may ignore SIGINT and SIGHUP, as in the background of a script.
                if signal.getsignal(number) is signal.SIG_IGN:
                    number = signal.SIGTERM
                signal.raise_signal(number)
                continue
            if event.connection in self.unused:
                continue  # not of this start
            return event

    def require_facts(self, task: Message, timeout: float) -> dict[Connection, Message]:
        """Return the facts of every agent's host (`host_facts.facts`).

        Args:
            task: the fields of the `task` message, which is sent to every agent.
            timeout: seconds for all agents together.

        Raises:
            StartError: hosts do not answer or cannot run the task, with a line for each.
        """
        facts, problems = self.collect_facts(task, timeout)
        if problems:
            hosts = [connection.host.name for connection in problems]
            raise StartError(_report(problems, len(self.connections)), hosts)
        return facts

    def collect_facts(
        self, task: Message, timeout: float
    ) -> tuple[dict[Connection, Message], dict[Connection, str]]:
        """Return the facts of the agents that answer, and why agents cannot take part.

        An agent that answers but does not fit (`unfitness`) is in both.

        Args:
            task: the fields of the `task` message, which is sent to every agent.
            timeout: seconds for all agents together.
        """
        facts: dict[Connection, Message] = {}
        problems: dict[Connection, str] = {}
        for connection in self.connections:
            connection.send("task", **task)
        deadline = time.monotonic() + timeout
        attempts: Counter[Host] = Counter()
        restarts: dict[Connection, float] = {}  # an agent that failed transiently -> when
        while len(facts) + len(problems) < len(self.connections):
            event = self.next_event(
                max(0.0, min([deadline, *restarts.values()]) - time.monotonic())
            )
            for connection in [each for each, at in restarts.items() if at <= time.monotonic()]:
                del restarts[connection]
                restarted = connection.restart()
                restarted.send("task", **task)
                self.connections[self.connections.index(connection)] = restarted
            if event is None and time.monotonic() >= deadline:
                break
            if event is None:
                continue
            connection, message = event.connection, event.message
            if message["kind"] == "hello":
                reached_at = connection.peer or message["reached_at"]
                facts[connection] = message | {"reached_at": reached_at}
            elif message["kind"] not in ("lost", "failed"):
                continue  # a kept agent's message of the start before this one
            elif connection in problems:
                continue
            elif (count := attempts[connection.host]) < len(_RETRY_SECONDS) and (
                connection.failed_transiently()
            ):
                attempts[connection.host] += 1
                # Random, so that the restarts of many agents do not coincide.
                seconds = _RETRY_SECONDS[count] * random.uniform(0.5, 1.5)
                restarts[connection] = time.monotonic() + seconds
            else:
                # Also after its facts: the message is read here only.
                facts.pop(connection, None)
                problems[connection] = message.get("reason") or connection.explain()
        silent = [c for c in self.connections if c not in facts and c not in problems]
        for connection, why in zip(silent, _explanations(silent) if silent else (), strict=True):
            problems[connection] = f"did not answer within {timeout:g} s: {why}"
        for connection in problems:
            connection.idle = False  # it may answer later: another start needs another agent
        for connection, found in facts.items():
            if unfit := unfitness(found):
                problems[connection] = "; ".join(unfit)
        return facts, problems

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(self._heartbeat_seconds):
            for connection in self.every:
                connection.send_heartbeat()


def _explanations(connections: Sequence[Connection]) -> Sequence[str]:
    """Return why each agent does not answer."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and rarely needed

    # In threads, because each explanation may wait a moment for ssh's last output.
    with ThreadPoolExecutor(max_workers=_EXPLAINING) as pool:
        return list(pool.map(methodcaller("explain"), connections))


def _report(problems: Mapping[Connection, str], size: int) -> str:
    lines = [f"{connection.host.name}: {problem}" for connection, problem in problems.items()]
    if size == 1:
        return lines[0]
    count = f"{len(problems)} of {size} hosts cannot take part; nothing was started."
    return "\n  ".join([count, *lines])


def unfitness(facts: Message) -> Sequence[str]:
    """Return why a host that answers cannot take part; empty if it can."""
    problems: Sequence[str] = other_versions(facts) or facts["problems"]
    return problems


def other_versions(facts: Message) -> list[str]:
    """Return why the agent of a host cannot work with this launcher; empty if it can."""
    python = facts["python"].split(".")[:2]
    if python != [str(number) for number in sys.version_info[:2]]:
        here = ".".join(map(str, sys.version_info[:2]))
        return [
            f"it has Python {facts['python']}, but the launcher has {here}; install the same "
            "environment there, or give the path of its Python with --python"
        ]
    if facts["hvdkit"] != hvdkit.__version__:
        return [
            f"it has hvdkit {facts['hvdkit']}, but the launcher has {hvdkit.__version__}; install "
            "the same version there"
        ]
    return []
