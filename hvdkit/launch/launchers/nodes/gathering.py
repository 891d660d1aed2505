"""Node 0: it waits until the other nodes have connected, and runs the launcher with them as agents.

Node 0 listens at `--rdzv HOST:PORT`, or at a free port that it writes into `--rdzv-file`. Each node
runs the command that it was started with, in its own environment.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn, Self

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults.names import shortened
from hvdkit.launch.agent import open_files
from hvdkit.launch.control import readers
from hvdkit.launch.control.connection import Connection
from hvdkit.launch.control.listener import BACKLOG, Listener
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.socket_connection import SocketConnection
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host, own_addresses
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.launch.launchers.gloo import Gloo
from hvdkit.launch.launchers.nodes.handshake import (
    Authenticator,
    NodeInfo,
    authenticate_to_node_0,
    describe_node,
    machine,
)
from hvdkit.launch.launchers.nodes.joining import QUIET_SECONDS, connect_to_any, read_file
from hvdkit.launch.launchers.nodes.settings import NodeSettings
from hvdkit.system.plain_files import read_text
from hvdkit.system.sealed import Refused, WrongKey
from hvdkit.system.signals import begin_to_note, status_before_start
from hvdkit.system.whole_files import beside, create

_SHOWN_NODES = 8


class Nodes(Gloo):
    """Start ranks over Gloo on nodes where users have started the agents, on node 0.

    On entry, the context waits for all nodes.

    Args:
        node: node 0's options.
    """

    # A node cannot join a running job again.
    hosts_return = False

    def __init__(self, node: NodeSettings, settings: Settings) -> None:
        super().__init__(settings)
        self._node = node
        # The nodes as the job's hosts, in the order of nodes.
        self._hosts: list[Host] = []

    def hosts(self, size: int | None) -> Sequence[Host]:  # noqa: ARG002
        return self._hosts

    def next_hosts(self, plan: Plan) -> Sequence[Host]:  # noqa: ARG002
        return [c.host for c in self.agents.every if c.idle and not c.ended]

    def __enter__(self) -> Self:
        # Before the nodes connect, because each connection needs a descriptor.
        settings = self._node
        open_files.raise_limit(open_files.needed_by_launcher(settings.size or 0, settings.nodes))
        self.agents.__enter__()
        try:
            with _listening(settings) as (server, key):
                connected = self._gather(server, key)
        except BaseException as error:
            self.close(_outcome_of(error))
            raise
        self._make_hosts(connected)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close(_outcome_of(exc[1]))

    def send_outcome(self, outcome: Outcome) -> None:
        """Send the job's outcome to the other nodes. A node keeps the first outcome it gets."""
        for connection in self.agents.every:
            connection.send("outcome", status=outcome.status, report=outcome.report)

    def close(self, outcome: Outcome) -> None:
        """Send `outcome`, and end the agents."""
        # A signal must not replace the outcome or the error.
        begin_to_note()
        self.send_outcome(outcome)
        self.agents.__exit__(None, None, None)

    def _gather(self, server: socket.socket, key: bytes) -> dict[int, tuple[NodeInfo, Connection]]:
        settings = self._node
        connected: dict[int, tuple[NodeInfo, Connection]] = {}
        authenticator = Authenticator(settings, key)
        listener = Listener(
            server, settings.nodes, authenticator.authenticate, self.settings.ssh.silence
        )
        try:
            deadline = time.monotonic() + settings.timeout
            said = ""
            say_at = time.monotonic() + QUIET_SECONDS
            while len(connected) < settings.nodes - 1:
                if time.monotonic() > say_at:
                    say_at = time.monotonic() + QUIET_SECONDS
                    missing = self._missing(connected)
                    if missing != said:
                        readers.say(f"waiting at {settings.rendezvous} for {missing}")
                        said = missing
                if time.monotonic() > deadline:
                    self._fail(connected, authenticator.refused, listener.problem)
                if (accepted := listener.accept()) is not None:
                    node, connected_to = accepted
                    host = Host(node.hostname, node.slots)
                    connection = SocketConnection(host, connected_to, self.agents.events)
                    connected[node.number] = node, connection
                    self.agents.connections.append(connection)
                while (event := self.agents.next_event(0)) is not None:
                    if event.connection in self.agents.connections:
                        # The node has disconnected, and may connect again.
                        (number,) = (n for n in connected if connected[n][1] is event.connection)
                        self.agents.drop([event.connection])
                        del connected[number]
                        authenticator.forget(number)
        finally:
            listener.close()
        return connected

    def _missing(self, connected: Collection[int]) -> str:
        missing = [node for node in range(1, self._node.nodes) if node not in connected]
        shown = shortened(missing, _SHOWN_NODES)
        return f"node{'s' if len(missing) > 1 else ''} {shown} of {self._node.nodes}"

    def _fail(self, connected: Collection[int], refused: Sequence[str], own: str) -> NoReturn:
        settings = self._node
        lines = "".join(f"\n  refused: {each}" for each in refused[:_SHOWN_NODES])
        if own:
            lines += f"\n  this machine has closed connections: {own}"
        raise HvdkitError(
            f"{self._missing(connected)} did not connect to {settings.rendezvous} within "
            f"{settings.timeout:g} s (--start-timeout). Check that the same `hvdkit run` runs "
            f"there, and that no firewall blocks it{lines}"
        )

    def _make_hosts(self, connected: Mapping[int, tuple[NodeInfo, Connection]]) -> None:
        """Make the hosts, start this node's agent, and sort the connections by node."""
        own = describe_node(self._node)
        nodes = [own, *(connected[node][0] for node in sorted(connected))]
        count = Counter(node.hostname for node in nodes)
        for node in nodes:
            unique = count[node.hostname] == 1
            name = node.hostname if unique else f"{node.hostname}-{node.number}"
            self._hosts.append(Host(name, node.slots, node.machine == own.machine))
        for number, (_, connection) in connected.items():
            connection.host = self._hosts[number]
        others = [connected[number][1] for number in sorted(connected)]
        self.agents.connections = []
        self.agents.start({self._hosts[0]: True}, Ssh(), sys.executable)
        self.agents.connections += others


def _outcome_of(exc: object) -> Outcome:
    """Return what the other nodes get if node 0 ends before the job has an outcome."""
    if isinstance(exc, KeyboardInterrupt) and exc.args:
        number = signal.Signals(exc.args[0])
        return Outcome(status_before_start(number), f"node 0 got {number.name}")
    return Outcome(2 if isinstance(exc, UsageError) else 1, str(exc or "node 0 ended the job"))


@contextmanager
def _listening(settings: NodeSettings) -> Iterator[tuple[socket.socket, bytes]]:
    """Listen for the other nodes. Yields the listening socket and the job's key."""
    port = 0 if settings.address is None else settings.address[1]
    try:
        if socket.has_dualstack_ipv6():
            server = socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
            )
        else:
            server = socket.create_server(("", port), backlog=BACKLOG)
    except OSError as error:
        raise HvdkitError(
            f"{settings.rendezvous}: this node cannot listen on port {port}: {error.strerror}. "
            f"Choose another port if another job uses it"
        ) from error
    key = settings.key or secrets.token_hex(16).encode()
    with server:
        if settings.file is None:
            yield server, key
            return
        content = {
            "addresses": sorted(a for a in own_addresses() if not ip_address(a).is_link_local),
            "port": server.getsockname()[1],
            "machine": machine(),
            "key": "" if settings.key else key.decode(),
        }
        text = json.dumps(content)
        _check_not_in_use(settings, settings.file)
        _write_privately(settings.file, text)
        try:
            yield server, key
        finally:
            with suppress(OSError):
                if read_text(settings.file) == text:
                    settings.file.unlink()


def _write_privately(path: Path, text: str) -> None:
    """Write a file that only this user can read, in one atomic step."""
    new = beside(path)
    try:
        create(new, text.encode(), 0o600)
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise UsageError(f"--rdzv-file {path}: {error.strerror}") from error


def _check_not_in_use(settings: NodeSettings, path: Path) -> None:
    """Check that no node 0 waits at the address in an `--rdzv-file`.

    A node 0 proves that it knows the key in the file. Another program, which has got the port of an
    earlier job, cannot.

    Raises:
        UsageError: there is such a node 0.
    """
    try:
        addresses, key = read_file(path)
        key = key or settings.key
        if key:
            authenticate = partial(authenticate_to_node_0, settings=settings, key=key)
            connect_to_any(addresses, authenticate, timeout=1.0).close()
    except (OSError, WrongKey):
        pass
    except Refused as error:
        problem = f"--rdzv-file {path} is in use by another job; choose another file"
        raise UsageError(problem) from error
    except HvdkitError:
        pass  # the file of another user
