"""The connections of a rank to the runner of a benchmark.

A rank opens two connections: one for the rank's commands, and one for its guard (`guard`). Both
are sealed with the token of the job, and have a number: r for rank r, and size + r for its guard.
`rank_listener` is the other side.

This module runs in ranks that may have another hvdkit (`--before`), so it uses the standard library
and `hvdkit.system.sealed` only.
"""

import json
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.system.sealed import Refused, SealedConnection, WrongKey, introduce

#: The environment variable with the token. `hvdkit run` forwards it only on request.
TOKEN_VARIABLE = "HVDKIT_BENCH_TOKEN"

RANK, GUARD = "rank", "guard"

_CONNECT_SECONDS = 4.0
# All ranks connect at once, and may have fewer cores than ranks.
_GREETING_SECONDS = 30.0
_READ_BYTES = 1 << 16


class Peer:
    """The connection to a rank or to its guard. Each message is a line of JSON."""

    def __init__(self, connection: SealedConnection) -> None:
        self._connection = connection
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._connection.fileno()

    @property
    def has_message(self) -> bool:
        """Whether this object has a whole message already. `select` does not report it."""
        return b"\n" in self._received

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: the other side has ended.
        """
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[self._connection.write(data) or 0 :]

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message and return it; None if the other side has ended."""
        while not self.has_message:
            try:
                data = self._connection.read(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._received.extend(data)
        end = self._received.index(b"\n")
        message: dict[str, Any] = json.loads(self._received[:end])
        del self._received[: end + 1]
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def connect(spec: Mapping[str, Any], role: str, rank: int) -> Peer:
    """Connect to the runner, from a rank or its guard.

    Raises:
        SystemExit: none of the runner's addresses can be reached.
    """
    host = socket.gethostname()
    number = rank + (spec["size"] if role == GUARD else 0)
    token = os.environ[TOKEN_VARIABLE].encode()
    reasons = []
    for address in spec["addresses"]:
        try:
            connection = socket.create_connection((address, spec["port"]), _CONNECT_SECONDS)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return Peer(introduce(connection, token, {"rank": number}, _GREETING_SECONDS))
            except BaseException:
                connection.close()
                raise
        except (OSError, WrongKey, Refused) as error:
            reasons.append(f"{address}: {str(error) or 'it has another token'}")
    raise SystemExit(
        f"rank {rank} on {host} cannot reach the machine on which `hvdkit bench` runs, at port "
        f"{spec['port']}: {'; '.join(reasons)}. Let {host} connect to this port of that machine"
    )


def answers(peers: Sequence[Peer], seconds: float) -> list[dict[str, Any]] | None:
    """Return a message from each peer, in the order of `peers`.

    Return None if a peer has ended, or has sent no message within `seconds`.
    """
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
