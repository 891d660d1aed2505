"""The connections between the runner of a benchmark and its ranks.

A rank opens two connections: one for the rank's commands, and one for its guard (`guard`). Both
begin with a line that has the token of the job, the number of the rank and the role.
"""

import hmac
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdkit.launch.listener import Listener, read_line

#: The environment variable with the token. `hvdkit run` forwards it only on request.
TOKEN_VARIABLE = "HVDKIT_BENCH_TOKEN"

RANK, GUARD = "rank", "guard"

_CONNECT_SECONDS = 4.0
_LINE_BYTES = 200
_READ_BYTES = 1 << 16


class Peer:
    """The connection to a rank or to its guard. Each message is a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._connection.fileno()

    @property
    def has_message(self) -> bool:
        """Whether a whole message has been received, which `select` cannot know."""
        return b"\n" in self._received

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: the other side has ended.
        """
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message and return it; None if the other side has ended."""
        while not self.has_message:
            try:
                data = self._connection.recv(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Control:
    """The runner's side: accept the connections of one job.

    Args:
        addresses: the addresses of this machine that ranks try, in this order.
        size: the number of ranks.
    """

    def __init__(self, addresses: Sequence[str], size: int) -> None:
        self._token = secrets.token_hex(16)
        self._size = size
        bind = addresses[0] if len(addresses) == 1 else ""
        server = socket.create_server((bind, 0), backlog=2 * size)
        self._port = server.getsockname()[1]
        self._addresses = list(addresses)
        self._listener = Listener(server, 2 * size, self._authenticate)

    @property
    def spec(self) -> dict[str, Any]:
        """The part of a rank's specification that `connect` needs."""
        return {"addresses": self._addresses, "port": self._port}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable with the token."""
        return {TOKEN_VARIABLE: self._token}

    def accept(
        self, seconds: float, running: Callable[[], bool]
    ) -> tuple[list[Peer], list[Peer]] | None:
        """Wait for all ranks.

        Args:
            seconds: the time until all ranks must have connected.
            running: returns whether the job still runs.

        Returns:
            The connections of the ranks and of the guards, both by rank; None if the job has ended
            or the time is over.
        """
        deadline = time.monotonic() + seconds
        found: dict[tuple[str, int], Peer] = {}
        try:
            while len(found) < 2 * self._size:
                accepted = self._listener.accept()
                if accepted is not None:
                    found[accepted[0]] = Peer(accepted[1])
                elif not running() or time.monotonic() > deadline:
                    for peer in found.values():
                        peer.close()
                    return None
        finally:
            self._listener.close()
        ranks = range(self._size)
        return [found[RANK, r] for r in ranks], [found[GUARD, r] for r in ranks]

    def close(self) -> None:
        """Stop listening. May be called again."""
        self._listener.close()

    def _authenticate(self, connection: socket.socket) -> tuple[str, int] | None:
        token, _, rest = read_line(connection, _LINE_BYTES).partition(" ")
        role, _, rank = rest.partition(" ")
        known = hmac.compare_digest(token.encode(), self._token.encode())
        fits = rank.isascii() and rank.isdigit() and int(rank) < self._size
        return (role, int(rank)) if known and fits and role in (RANK, GUARD) else None


def connect(spec: Mapping[str, Any], role: str, rank: int) -> Peer:
    """Connect to the runner, from a rank or its guard.

    Raises:
        SystemExit: none of the runner's addresses can be reached.
    """
    reasons = []
    for address in spec["addresses"]:
        try:
            connection = socket.create_connection((address, spec["port"]), _CONNECT_SECONDS)
        except OSError as error:
            reasons.append(f"{address}: {error}")
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(f"{os.environ[TOKEN_VARIABLE]} {role} {rank}\n".encode())
        return Peer(connection)
    raise SystemExit(
        f"rank {rank} on {socket.gethostname()} cannot reach the machine on which `hvdkit bench` "
        f"runs, at port {spec['port']}: {'; '.join(reasons)}. Allow connections from this host"
    )


def answers(peers: Sequence[Peer], seconds: float) -> list[dict[str, Any]] | None:
    """Return a message from each peer, in their order; None if one has ended or is too late."""
    received: dict[Peer, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    while len(received) < len(peers):
        waiting = [peer for peer in peers if peer not in received]
        ready = [peer for peer in waiting if peer.has_message]
        if not ready:
            ready, _, _ = select.select(waiting, (), (), max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        for peer in ready:
            message = peer.receive()
            if message is None:
                return None
            received[peer] = message
    return [received[peer] for peer in peers]
