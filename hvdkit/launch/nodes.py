"""Node 0 of a job whose nodes come together by themselves (`hvdkit run --nodes`), without ssh.

Node 0 listens at the rendezvous (`--rdzv HOST:PORT`, or a free port that it writes into
`--rdzv-file`). The other nodes (`joining`) connect to it, and become agents of the launcher on node
0. Each node runs the command that it was started with, in its own environment.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from hvdkit.errors import HvdkitError, UsageError, status_before_start
from hvdkit.launch.agents import Agents
from hvdkit.launch.arrivals import Listener
from hvdkit.launch.connection import Connection, SocketConnection
from hvdkit.launch.handshake import Gate, Member, is_node_0, member, reachable
from hvdkit.launch.hosts import Host, own_addresses
from hvdkit.launch.job import Outcome
from hvdkit.launch.joining import QUIET_SECONDS, line_to, read_file
from hvdkit.launch.membership import Membership
from hvdkit.launch.ssh import Ssh

_SHOWN_NODES = 8


class Nodes:
    """The nodes of a job, all of which have come. A context manager, on node 0.

    Attributes:
        agents: an agent on each node, in their order.
        hosts: the nodes as the job's hosts.
    """

    def __init__(self, mine: Membership, say: Callable[[str], None]) -> None:
        self._mine = mine
        self._say = say
        self.agents = Agents()
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        self.agents.__enter__()
        try:
            with _listening(self._mine) as (server, key):
                come = self._gather(server, key)
        except BaseException as error:
            self.close(_outcome_of(error))
            raise
        self._make_hosts(come)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(_outcome_of(exc))

    def tell(self, outcome: Outcome) -> None:
        """Tell the other nodes how the job ended."""
        for connection in self.agents.connections:
            connection.send("outcome", status=outcome.status, report=outcome.report)

    def close(self, outcome: Outcome) -> None:
        """End what is left of the job; nodes that know no outcome take this one."""
        self.tell(outcome)
        self.agents.__exit__(None, None, None)

    def _gather(self, server: socket.socket, key: bytes) -> dict[int, tuple[Member, Connection]]:
        mine = self._mine
        come: dict[int, tuple[Member, Connection]] = {}
        gate = Gate(mine, key)
        listener = Listener(server, mine.nodes, gate.admit)
        try:
            deadline = time.monotonic() + mine.timeout
            said_at = time.monotonic() + QUIET_SECONDS
            while len(come) < mine.nodes - 1:
                if time.monotonic() > said_at:
                    said_at = float("inf")
                    self._say(f"waiting at {mine} for {self._missing(come)}")
                if time.monotonic() > deadline:
                    self._fail(come, gate.refused)
                if (arrival := listener.accept()) is not None:
                    node, line = arrival
                    host = Host(node.hostname, node.slots)
                    connection = SocketConnection(host, line, self.agents.events)
                    come[node.number] = node, connection
                    self.agents.connections.append(connection)
                while (event := self.agents.next(0)) is not None:
                    if event.connection in self.agents.connections:
                        # A node that is gone again; it may come back.
                        (number,) = (n for n in come if come[n][1] is event.connection)
                        self.agents.connections.remove(event.connection)
                        event.connection.close(timeout=1)
                        del come[number]
                        gate.forget(number)
        finally:
            listener.close()
        return come

    def _missing(self, come: Collection[int]) -> str:
        missing = [node for node in range(1, self._mine.nodes) if node not in come]
        shown = ", ".join(map(str, missing[:_SHOWN_NODES]))
        more = f" and {len(missing) - _SHOWN_NODES} more" if len(missing) > _SHOWN_NODES else ""
        return f"node{'s' if len(missing) > 1 else ''} {shown}{more} of {self._mine.nodes}"

    def _fail(self, come: Collection[int], wrong: Sequence[str]) -> NoReturn:
        refused = "".join(f"\n  refused: {each}" for each in wrong[:_SHOWN_NODES])
        raise HvdkitError(
            f"{self._missing(come)} did not come to {self._mine} within {self._mine.timeout:g} s "
            f"(--start-timeout). Does the same `hvdkit run` run there, and does a firewall let it "
            f"through?{refused}"
        )

    def _make_hosts(self, come: Mapping[int, tuple[Member, Connection]]) -> None:
        """Make the hosts, and the agents' connections in their order."""
        own = member(self._mine)
        members = [own, *(come[node][0] for node in sorted(come))]
        named = Counter(each.hostname for each in members)
        for each in members:
            alone = named[each.hostname] == 1
            name = each.hostname if alone else f"{each.hostname}-{each.number}"
            self.hosts.append(Host(name, each.slots, each.machine == own.machine))
        for node, (_, connection) in come.items():
            connection.host = self.hosts[node]
        others = [come[node][1] for node in sorted(come)]
        self.agents.connections = []
        self.agents.dial({self.hosts[0]: True}, Ssh(), sys.executable)
        self.agents.connections += others


def _outcome_of(exc: BaseException | None) -> Outcome:
    """Return what the other nodes are told where node 0 ends without an outcome of the job."""
    if isinstance(exc, KeyboardInterrupt) and exc.args:
        number = signal.Signals(exc.args[0])
        return Outcome(
            status_before_start(number), f"node 0 got {number.name} before any rank was started"
        )
    return Outcome(2 if isinstance(exc, UsageError) else 1, str(exc or "node 0 ended the job"))


def _is_in_use(path: Path) -> bool:
    """Return whether a node 0 listens where a file says."""
    try:
        addresses, _ = read_file(path)
        with line_to(addresses, timeout=1.0) as line:
            return is_node_0(line)
    except (OSError, HvdkitError):
        return False


@contextmanager
def _listening(mine: Membership) -> Iterator[tuple[socket.socket, bytes]]:
    """Listen for the other nodes; gives the server and the job's key."""
    port = 0 if mine.address is None else mine.address[1]
    try:
        if socket.has_dualstack_ipv6():
            server = socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=mine.nodes
            )
        else:
            server = socket.create_server(("", port), backlog=mine.nodes)
    except OSError as error:
        raise HvdkitError(
            f"{mine}: this node cannot listen on port {port}: {error.strerror}. Is another job "
            f"there? Choose another port"
        ) from error
    key = mine.key or secrets.token_hex(16).encode()
    with server:
        if mine.file is None:
            yield server, key
            return
        where = {
            "addresses": reachable(own_addresses()),
            "port": server.getsockname()[1],
            "key": "" if mine.key else key.decode(),
        }
        text = json.dumps(where)
        _write_privately(mine.file, text)
        try:
            yield server, key
        finally:
            with suppress(OSError):
                if mine.file.read_text() == text:
                    mine.file.unlink()


def _write_privately(path: Path, text: str) -> None:
    """Write a file that only this user can read, whole at once."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if _is_in_use(path):
            raise UsageError(f"--rdzv-file {path}: another job's nodes meet there now")
        with suppress(FileNotFoundError):
            path.unlink()  # of a job before
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise UsageError(f"--rdzv-file {path}: {error.strerror}") from error
