"""All agents of a job: their hosts are asked, and what they say comes together here."""

from __future__ import annotations

import queue
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import hvdkit
from hvdkit.errors import HvdkitError
from hvdkit.launch import messages
from hvdkit.launch.connection import Connection, Event, Events, ProcessConnection
from hvdkit.launch.hosts import Host
from hvdkit.launch.messages import Message
from hvdkit.launch.ssh import Ssh

#: So many messages may wait for the launcher before it stops reading.
_QUEUED = 1000
#: An agent whose launcher hangs up gives its ranks ten seconds.
_CLOSE_SECONDS = 15.0
_EXPLAINING = 64
#: So many ssh processes may be about to connect at the same time, but each for so long at most.
_CONNECTING = 64
_CONNECTING_SECONDS = 15.0
#: After so many seconds an agent whose host refused for a moment is started again.
_AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)


class Agents:
    """The agents of a job. A context manager: on the way out it ends them, and they their ranks.

    Attributes:
        connections: the lines to them.
        events: where what they say is put.
    """

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.events: Events = queue.Queue(_QUEUED)
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._heart.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._heart.join()
        for connection in self.connections:
            connection.hang_up()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for connection in self.connections:
            connection.close(max(0.1, deadline - time.monotonic()))

    def dial(
        self, hosts: Mapping[Host, bool], ssh: Ssh, python: str, terminal: Host | None = None
    ) -> None:
        """Start an agent on each host.

        Args:
            hosts: the hosts, and whether each is this machine.
            ssh: how other hosts are reached.
            python: the Python that runs the agents there.
            terminal: the one that gets this process's standard streams, for a rank.
        """
        for host, local in hosts.items():
            self._wait_for_room()
            self.connections.append(
                ProcessConnection(host, local, ssh, python, self.events, host == terminal)
            )

    def _wait_for_room(self) -> None:
        while True:
            recent = time.monotonic() - _CONNECTING_SECONDS
            waiting = [c for c in self.connections if not (c.greeted or c.ended)]
            if sum(connection.began > recent for connection in waiting) < _CONNECTING:
                return
            time.sleep(0.01)

    def next(self, timeout: float) -> Event | None:
        """Return what an agent says next; None where none says anything for `timeout` seconds.

        A signal that a node's user has sent there is as if it had been sent to this process.
        """
        try:
            event = self.events.get(timeout=timeout)
        except queue.Empty:
            return None
        if event.message["kind"] == "signal":
            signal.raise_signal(event.message["number"])
            return None
        return event

    def contact(self, task: Message, timeout: float) -> dict[Connection, Message]:
        """Tell every agent what is going to be run, and hear what its host is like.

        Args:
            task: the fields of the `task` message.
            timeout: seconds that the agents may take, all together.

        Returns:
            By agent, what `agent.facts` found.

        Raises:
            HvdkitError: hosts do not answer or cannot run it; the message has a line for each.
        """
        facts, problems = self.ask(task, timeout)
        for connection, found in facts.items():
            if unfit := _unfit(found):
                problems[connection] = "; ".join(unfit)
        if problems:
            raise HvdkitError(_report(problems, len(self.connections)))
        return facts

    def ask(
        self, task: Message, timeout: float
    ) -> tuple[dict[Connection, Message], dict[Connection, str]]:
        """Return the facts of the agents that answer, and the reasons of those that do not."""
        facts: dict[Connection, Message] = {}
        problems: dict[Connection, str] = {}
        for connection in self.connections:
            connection.send("task", **task)
        deadline = time.monotonic() + timeout
        refused = _Refused()
        while len(facts) + len(problems) < len(self.connections):
            event = self.next(max(0.0, min(deadline, refused.due()) - time.monotonic()))
            for connection in refused.take_due():
                again = connection.again()
                again.send("task", **task)
                self.connections[self.connections.index(connection)] = again
            if event is None and time.monotonic() >= deadline:
                break
            if event is None:
                continue
            connection, message = event.connection, event.message
            if message["kind"] == "hello":
                reached_at = connection.peer or message["reached_at"]
                facts[connection] = message | {"reached_at": reached_at}
            elif connection not in facts and not refused.add(connection):
                problems[connection] = message.get("reason") or connection.explain()
        silent = [c for c in self.connections if c not in facts and c not in problems]
        # Each of them waits a moment for its last words.
        with ThreadPoolExecutor(max_workers=_EXPLAINING) as pool:
            for connection, why in zip(silent, pool.map(_explain, silent), strict=True):
                problems[connection] = f"did not come up within {timeout:g} s: {why}"
        return facts, problems

    def answer(
        self, connection: Connection, question: str, arguments: Mapping[str, Any], timeout: float
    ) -> Any:
        """Ask one agent one of `inspection.QUESTIONS`, while no other is asked anything.

        Raises:
            HvdkitError: it does not answer.
        """
        connection.send("ask", question=question, arguments=dict(arguments))
        deadline = time.monotonic() + timeout
        while (event := self.next(max(0.0, deadline - time.monotonic()))) is not None:
            if event.message["kind"] == "answer":
                return event.message["answer"]
            if event.message["kind"] in ("lost", "failed"):
                why = event.message.get("reason") or event.connection.explain()
                raise HvdkitError(f"{event.connection.host.name}: {why}")
        raise HvdkitError(f"{connection.host.name} did not answer within {timeout:g} s")

    def _beat(self) -> None:
        while not self._stop.wait(messages.ALIVE_SECONDS):
            for connection in list(self.connections):
                connection.send("alive")


class _Refused:
    """Agents whose hosts refused for a moment: which of them to start again, and when."""

    def __init__(self) -> None:
        self._tries: Counter[Host] = Counter()
        self._waiting: list[tuple[float, Connection]] = []

    def add(self, connection: Connection) -> bool:
        """Take an agent that could not be started; return whether to try it again."""
        tried = self._tries[connection.host]
        if tried == len(_AGAIN_SECONDS) or not connection.refused_for_now():
            return False
        self._tries[connection.host] += 1
        # Not all at the same time again.
        seconds = _AGAIN_SECONDS[tried] * random.uniform(0.5, 1.5)
        self._waiting.append((time.monotonic() + seconds, connection))
        return True

    def due(self) -> float:
        """Return when the next one is to be started; infinite where there is none."""
        return min((at for at, _ in self._waiting), default=float("inf"))

    def take_due(self) -> list[Connection]:
        """Return those that are to be started now, and forget them."""
        now = time.monotonic()
        found = [connection for at, connection in self._waiting if at <= now]
        self._waiting = [(at, connection) for at, connection in self._waiting if at > now]
        return found


def _explain(connection: Connection) -> str:
    return connection.explain()


def _report(problems: Mapping[Connection, str], size: int) -> str:
    lines = [f"{connection.host.name}: {problem}" for connection, problem in problems.items()]
    if size == 1:
        return lines[0]
    count = f"{len(problems)} of {size} hosts cannot take part; nothing was started."
    return "\n  ".join([count, *lines])


def _unfit(facts: Message) -> Sequence[str]:
    """Why a host that answers cannot take part."""
    python = facts["python"].split(".")[:2]
    if python != [str(number) for number in sys.version_info[:2]]:
        here = ".".join(map(str, sys.version_info[:2]))
        return [
            f"it has Python {facts['python']}, the launcher has {here}; install the same "
            "environment there, or name its Python with --python"
        ]
    if facts["hvdkit"] != hvdkit.__version__:
        return [
            f"it has hvdkit {facts['hvdkit']}, the launcher has {hvdkit.__version__}; install the "
            "same version there"
        ]
    problems: Sequence[str] = facts["problems"]
    return problems
