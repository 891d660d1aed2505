"""The handshake of two nodes, before one becomes an agent of the other's launcher.

Both sides prove that they know the job's key, and neither sends it: each answers the other's nonce
with an HMAC-SHA-256 (RFC 2104) of both nonces. After that the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.launch.arrivals import read_line
from hvdkit.launch.membership import Membership

#: Seconds for each step of it.
STEP_SECONDS = 5.0

_GREETING = "hvdkit-nodes"
_LONGEST_LINE = 10_000
_LONGEST_REASON = 300
_MOST_REFUSED = 8
_MOST_STRANGERS = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Raised by answers that are not a node's.
_NOT_OURS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Member:
    """A node, as it describes itself.

    Attributes:
        number: which one it is.
        hostname: what it calls itself.
        slots: the number of ranks that it takes.
        machine: the same for two nodes on one machine and in one network namespace.
    """

    number: int
    hostname: str
    slots: int
    machine: str


def member(mine: Membership) -> Member:
    """Describe this node."""
    network = os.stat("/proc/self/ns/net").st_ino
    machine = f"{_BOOT_ID.read_text().strip()} {network}"
    return Member(mine.node, socket.gethostname(), mine.slots, machine)


def reachable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that other machines may reach."""
    return sorted(a for a in addresses if not ip_address(a).is_link_local)


class Refused(HvdkitError):
    """Node 0 is there, and does not take this one."""


class WrongKey(Refused):
    """The process at the address of node 0 has another key."""


class Gate:
    """Lets in nodes that know the job's key, each once.

    Args:
        mine: node 0's part.
        key: the job's.

    Attributes:
        refused: why others were not let in, shortened.
    """

    def __init__(self, mine: Membership, key: bytes) -> None:
        self._mine = mine
        self._key = key
        self._come: set[int] = set()
        self._lock = threading.Lock()
        self.refused: list[str] = []

    def admit(self, line: socket.socket) -> Member | None:
        """Talk with a node that has connected; None where it is not of this job."""
        ours = secrets.token_hex(16)
        line.settimeout(STEP_SECONDS)
        line.sendall(f"{_GREETING} {ours}\n".encode())
        try:
            said = json.loads(read_line(line, _LONGEST_LINE))
            theirs, proof = str(said["nonce"]), str(said["proof"])
            known = _equal(proof, _proof(self._key, "node", ours, theirs))
            node = Member(
                int(said["node"]), str(said["hostname"]), int(said["slots"]), str(said["machine"])
            )
            nodes, size = int(said["nodes"]), said["size"]
        except _NOT_OURS:
            return None  # a stranger
        reason = self._misfit(node, nodes, size) if known else "its key is another one"
        if reason is not None:
            self._note(f"{node.hostname} (node {node.number}): {reason}", known)
            answer = {"refused": reason, "known": known}
            line.sendall(json.dumps(answer).encode() + b"\n")
            return None
        answer = {"proof": _proof(self._key, "launcher", theirs, ours)}
        try:
            line.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self.forget(node.number)
            raise
        return node

    def forget(self, node: int) -> None:
        """Let a node in again."""
        with self._lock:
            self._come.discard(node)

    def _misfit(self, node: Member, nodes: int, size: object) -> str | None:
        """Return why a node that knows the key cannot take part; else count it as there."""
        mine = self._mine
        if nodes != mine.nodes:
            return f"it says --nodes {nodes}, node 0 says --nodes {mine.nodes}"
        if size != mine.size:
            return f"it says {_as_said(size)}, node 0 says {_as_said(mine.size)}"
        if not 0 < node.number < mine.nodes:
            return f"it is node {node.number}; expected 1 to {mine.nodes - 1}, because 0 is here"
        with self._lock:
            if node.number in self._come:
                return f"there is a node {node.number} already; give each its own --node-rank"
            self._come.add(node.number)
        return None

    def _note(self, refused: str, known: bool) -> None:
        text = _printable(refused)
        # Of those that do not know the key, who may be strangers, a few.
        most = _MOST_REFUSED if known else _MOST_STRANGERS
        if text not in self.refused and len(self.refused) < most:
            self.refused.append(text)


def introduce(line: socket.socket, mine: Membership, key: bytes) -> None:
    """Prove to node 0 that this node is of the job, and let it prove the same.

    Raises:
        OSError: it does not answer as node 0 does.
        Refused: it does not take this node.
    """
    greeting, _, theirs = read_line(line, _LONGEST_LINE).partition(" ")
    if greeting != _GREETING:
        raise OSError("something else listens there")
    ours = secrets.token_hex(16)
    own = member(mine)
    said = {
        "nonce": ours,
        "proof": _proof(key, "node", theirs, ours),
        "node": own.number,
        "nodes": mine.nodes,
        "size": mine.size,
        "hostname": own.hostname,
        "slots": own.slots,
        "machine": own.machine,
    }
    line.settimeout(STEP_SECONDS)
    line.sendall(json.dumps(said).encode() + b"\n")
    try:
        found = json.loads(read_line(line, _LONGEST_LINE))
        refused, known = found.get("refused"), found.get("known")
        proven = _equal(str(found.get("proof")), _proof(key, "launcher", ours, theirs))
    except _NOT_OURS:
        raise OSError("it closed the connection") from None
    if refused is not None:
        kind = Refused if known else WrongKey
        raise kind(f"node 0 at {mine} does not take node {mine.node}: {_printable(str(refused))}")
    if not proven:
        raise WrongKey(f"who listens at {mine} does not know the job's key")
    line.settimeout(None)


def is_node_0(line: socket.socket) -> bool:
    """Return whether a node 0 is at the other end of a new connection.

    Raises:
        OSError: nobody says anything.
    """
    return read_line(line, _LONGEST_LINE).startswith(_GREETING)


def _as_said(size: object) -> str:
    return "nothing of -np" if size is None else f"-np {size}"


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())[:_LONGEST_REASON]


def _equal(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(errors="replace"), second.encode())


def _proof(key: bytes, role: str, first: str, second: str) -> str:
    return hmac.digest(key, f"{role} {first} {second}".encode(errors="replace"), "sha256").hex()
