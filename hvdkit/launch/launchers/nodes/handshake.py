"""Accept the other nodes on node 0, before they become agents of the launcher.

The connections are those of `hvdkit.system.sealed`, with the job's key.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdkit.launch.launchers.nodes.settings import NodeSettings
from hvdkit.system.plain_files import printable
from hvdkit.system.sealed import MALFORMED, SealedConnection, greet, introduce

_LONGEST_REASON = 300
_MOST_REFUSED = 8
_MOST_STRANGERS = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class NodeInfo:
    """A node, as it describes itself.

    Attributes:
        number: the number of the node.
        hostname: its own host name.
        slots: the number of its ranks.
        machine: as `machine` returns it.
    """

    number: int
    hostname: str
    slots: int
    machine: str


def describe_node(settings: NodeSettings) -> NodeInfo:
    """Describe this node."""
    return NodeInfo(settings.node, socket.gethostname(), settings.slots, machine())


def machine() -> str:
    """Return a text that is the same for two nodes of one machine and network namespace only."""
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{_BOOT_ID.read_text().strip()} {network}"


class Authenticator:
    """Accept nodes that know the job's key, each number once.

    Args:
        settings: node 0's settings.

    Attributes:
        refused: why nodes were refused; the texts and their number are bounded.
    """

    def __init__(self, settings: NodeSettings, key: bytes) -> None:
        self._settings = settings
        self._key = key
        self._connected: set[int] = set()
        self._lock = threading.Lock()
        self.refused: list[str] = []

    def authenticate(self, connection: socket.socket) -> tuple[NodeInfo, SealedConnection] | None:
        """Return the node that has connected; None if it is not of this job."""
        hello = greet(connection, self._key)
        if hello is None:
            return None
        try:
            node, nodes, size = _read_fields(hello.fields)
        except MALFORMED:
            return None
        reason = self._register(node, nodes, size) if hello.known else "it has another key"
        if reason is not None:
            self._note(f"{node.hostname} (node {node.number}): {reason}", hello.known)
            hello.refuse(reason)
            return None
        try:
            return node, hello.accept()
        except OSError:
            self.forget(node.number)
            raise

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
        text = shown(refused)
        # Keep fewer refusals of nodes without the key, because they may be strangers.
        most = _MOST_REFUSED if known else _MOST_STRANGERS
        if text not in self.refused and len(self.refused) < most:
            self.refused.append(text)


def authenticate_to_node_0(
    connection: socket.socket, settings: NodeSettings, key: bytes
) -> SealedConnection:
    """Prove to node 0 that this node belongs to the job, and check that node 0 does, too.

    Raises:
        OSError, WrongKey, Refused: as `introduce`.
    """
    fields = asdict(describe_node(settings)) | {"nodes": settings.nodes, "size": settings.size}
    return introduce(connection, key, fields)


def _read_fields(fields: Any) -> tuple[NodeInfo, int, object]:
    """Return a node, its --nodes and its -np."""
    node = NodeInfo(
        int(fields["number"]),
        str(fields["hostname"]),
        int(fields["slots"]),
        str(fields["machine"]),
    )
    return node, int(fields["nodes"]), fields["size"]


def _size_option(size: object) -> str:
    return "no -np" if size is None else f"-np {size}"


def shown(reason: str) -> str:
    """Return why a node was refused, for a message. Another program may have written it."""
    return printable(reason, one_line=True)[:_LONGEST_REASON]
