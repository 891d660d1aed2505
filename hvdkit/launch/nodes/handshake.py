"""The handshake of node 0 with another node, before that node becomes an agent of the launcher.

Each side proves that it knows the job's key, without sending it: each answers the other's nonce
with an HMAC-SHA-256 (RFC 2104) of both nonces. After the handshake the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.launch.listener import read_line
from hvdkit.launch.nodes.settings import NodeSettings

#: Seconds for each step of the handshake.
STEP_SECONDS = 5.0

_GREETING = "hvdkit-nodes"
_LONGEST_LINE = 10_000
_LONGEST_REASON = 300
_MOST_REFUSED = 8
_MOST_STRANGERS = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The exceptions of parsing a text that is not a node's answer.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class NodeInfo:
    """A node, as it describes itself.

    Attributes:
        number: the number of the node.
        hostname: its own host name.
        slots: the number of its ranks.
        machine: identifies its machine and network namespace. Two nodes that share both have the
            same text.
    """

    number: int
    hostname: str
    slots: int
    machine: str


def describe_node(settings: NodeSettings) -> NodeInfo:
    """Describe this node."""
    network = os.stat("/proc/self/ns/net").st_ino
    machine = f"{_BOOT_ID.read_text().strip()} {network}"
    return NodeInfo(settings.node, socket.gethostname(), settings.slots, machine)


class Refused(HvdkitError):
    """Node 0 answers, and refuses this node."""


class WrongKey(Refused):
    """The process at node 0's address has another key."""


class Authenticator:
    """Accept nodes that know the job's key, each number once.

    Args:
        settings: node 0's settings.
        key: the job's key.

    Attributes:
        refused: why nodes were refused; the texts and their number are bounded.
    """

    def __init__(self, settings: NodeSettings, key: bytes) -> None:
        self._settings = settings
        self._key = key
        self._connected: set[int] = set()
        self._lock = threading.Lock()
        self.refused: list[str] = []

    def authenticate(self, connection: socket.socket) -> NodeInfo | None:
        """Return the node that has connected; None if it is not of this job."""
        ours = secrets.token_hex(16)
        connection.settimeout(STEP_SECONDS)
        connection.sendall(f"{_GREETING} {ours}\n".encode())
        try:
            received = json.loads(read_line(connection, _LONGEST_LINE))
            theirs, proof = str(received["nonce"]), str(received["proof"])
            known = _equal(proof, _proof(self._key, "node", ours, theirs))
            node = NodeInfo(
                int(received["node"]),
                str(received["hostname"]),
                int(received["slots"]),
                str(received["machine"]),
            )
            nodes, size = int(received["nodes"]), received["size"]
        except _MALFORMED:
            return None
        reason = self._register(node, nodes, size) if known else "it has another key"
        if reason is not None:
            self._note(f"{node.hostname} (node {node.number}): {reason}", known)
            answer = {"refused": reason, "known": known}
            connection.sendall(json.dumps(answer).encode() + b"\n")
            return None
        answer = {"proof": _proof(self._key, "launcher", theirs, ours)}
        try:
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self.forget(node.number)
            raise
        return node

    def forget(self, node: int) -> None:
        """Accept this node number again."""
        with self._lock:
            self._connected.discard(node)

    def _register(self, node: NodeInfo, nodes: int, size: object) -> str | None:
        """Register a node that knows the key. Return the reason if it cannot take part."""
        expected = self._settings
        if nodes != expected.nodes:
            return f"it has --nodes {nodes}, node 0 has --nodes {expected.nodes}"
        if size != expected.size:
            return f"it has {_size_option(size)}, node 0 has {_size_option(expected.size)}"
        if not 0 < node.number < expected.nodes:
            return f"it is node {node.number}; expected 1 to {expected.nodes - 1}"
        with self._lock:
            if node.number in self._connected:
                return f"there is a node {node.number} already; give each its own --node-rank"
            self._connected.add(node.number)
        return None

    def _note(self, refused: str, known: bool) -> None:
        text = _printable(refused)
        # Keep fewer refusals of nodes without the key, because they may be strangers.
        most = _MOST_REFUSED if known else _MOST_STRANGERS
        if text not in self.refused and len(self.refused) < most:
            self.refused.append(text)


def authenticate_to_node_0(connection: socket.socket, settings: NodeSettings, key: bytes) -> None:
    """Prove to node 0 that this node belongs to the job, and check that node 0 does, too.

    Raises:
        OSError: the other side does not answer as node 0 does.
        Refused: node 0 refuses this node.
    """
    greeting, _, theirs = read_line(connection, _LONGEST_LINE).partition(" ")
    if greeting != _GREETING:
        raise OSError("another program listens there")
    ours = secrets.token_hex(16)
    own = describe_node(settings)
    message = {
        "nonce": ours,
        "proof": _proof(key, "node", theirs, ours),
        "node": own.number,
        "nodes": settings.nodes,
        "size": settings.size,
        "hostname": own.hostname,
        "slots": own.slots,
        "machine": own.machine,
    }
    connection.settimeout(STEP_SECONDS)
    connection.sendall(json.dumps(message).encode() + b"\n")
    try:
        answer = json.loads(read_line(connection, _LONGEST_LINE))
        refused, known = answer.get("refused"), answer.get("known")
        proven = _equal(str(answer.get("proof")), _proof(key, "launcher", ours, theirs))
    except _MALFORMED:
        raise OSError("it closed the connection") from None
    if refused is not None:
        kind = Refused if known else WrongKey
        raise kind(
            f"node 0 at {settings.rendezvous} refuses node {settings.node}: "
            f"{_printable(str(refused))}"
        )
    if not proven:
        raise WrongKey(f"the process at {settings.rendezvous} does not know the job's key")
    connection.settimeout(None)


def expect_node_0(connection: socket.socket) -> None:
    """Read the first line from the other end of a new connection.

    Raises:
        OSError: the other end does not answer as node 0 does.
    """
    if not read_line(connection, _LONGEST_LINE).startswith(_GREETING):
        raise OSError("another program listens there")


def _size_option(size: object) -> str:
    return "no -np" if size is None else f"-np {size}"


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())[:_LONGEST_REASON]


def _equal(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(errors="replace"), second.encode())


def _proof(key: bytes, role: str, first: str, second: str) -> str:
    return hmac.digest(key, f"{role} {first} {second}".encode(errors="replace"), "sha256").hex()
