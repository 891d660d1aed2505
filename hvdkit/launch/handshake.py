"""How nodes of a job recognize each other, before one becomes an agent of the other's launcher.

Both sides prove that they know the job's key, and neither sends it: each answers the other's nonce
with an HMAC-SHA-256 (RFC 2104) of both nonces. After that the connection is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from hvdkit.errors import HvdkitError
from hvdkit.launch.arrivals import read_line
from hvdkit.launch.hosts import own_addresses
from hvdkit.launch.membership import Membership

#: Seconds for each step of it.
STEP_SECONDS = 5.0

_LONGEST_LINE = 10_000
_MOST_REFUSED = 8


@dataclass(frozen=True)
class Member:
    """What a node says of itself.

    Attributes:
        number: which one it is.
        hostname: what it calls itself.
        slots: the number of ranks that it takes.
        machine: the same for two nodes where they have the same network interfaces.
    """

    number: int
    hostname: str
    slots: int
    machine: str


def member(mine: Membership) -> Member:
    """Return what this node says of itself."""
    addresses = " ".join(reachable(own_addresses())).encode()
    machine = hashlib.sha256(addresses).hexdigest()
    return Member(mine.node, socket.gethostname(), mine.slots, machine)


def reachable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that other machines may reach."""
    return sorted(a for a in addresses if not ip_address(a).is_link_local)


class Refused(HvdkitError):
    """Node 0 is there, and does not take this one."""


class Gate:
    """Lets in nodes that know the job's key, each once.

    Attributes:
        refused: why others were not let in, shortened.
    """

    def __init__(self, key: bytes, nodes: int) -> None:
        self._key = key
        self._nodes = nodes
        self._come: set[int] = set()
        self._lock = threading.Lock()
        self.refused: list[str] = []

    def admit(self, line: socket.socket) -> Member | None:
        """Talk with a node that has connected; None where it is not of this job."""
        ours = secrets.token_hex(16)
        line.settimeout(STEP_SECONDS)
        line.sendall(f"hvdkit-nodes {ours}\n".encode())
        try:
            said = json.loads(read_line(line, _LONGEST_LINE))
            theirs, proof = str(said["nonce"]), str(said["proof"])
            node = Member(
                int(said["node"]), str(said["hostname"]), int(said["slots"]), str(said["machine"])
            )
            nodes = int(said["nodes"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None  # a stranger
        if hmac.compare_digest(_proof(self._key, "node", ours, theirs).encode(), proof.encode()):
            reason = self._misfit(node, nodes)
        else:
            reason = "its key is another one"
        if reason is not None:
            self._note(f"{node.hostname} (node {node.number}): {reason}")
            line.sendall(json.dumps({"refused": reason}).encode() + b"\n")
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

    def _misfit(self, member: Member, nodes: int) -> str | None:
        """Return why a node that knows the key cannot take part; else count it as there."""
        if nodes != self._nodes:
            return f"it says --nodes {nodes}, node 0 says --nodes {self._nodes}"
        if not 0 < member.number < self._nodes:
            return f"it is node {member.number}; expected 1 to {self._nodes - 1}, because 0 is here"
        with self._lock:
            if member.number in self._come:
                return f"there is a node {member.number} already; give each its own --node-rank"
            self._come.add(member.number)
        return None

    def _note(self, refused: str) -> None:
        text = "".join(character for character in refused if character.isprintable())[:200]
        if text not in self.refused and len(self.refused) < _MOST_REFUSED:
            self.refused.append(text)


def introduce(line: socket.socket, mine: Membership, key: bytes) -> None:
    """Prove to node 0 that this node is of the job, and let it prove the same.

    Raises:
        OSError: it does not answer as node 0 does.
        Refused: it does not take this node.
    """
    greeting, _, theirs = read_line(line, _LONGEST_LINE).partition(" ")
    if greeting != "hvdkit-nodes":
        raise OSError("something else listens there")
    ours = secrets.token_hex(16)
    own = member(mine)
    said = {
        "nonce": ours,
        "proof": _proof(key, "node", theirs, ours),
        "node": own.number,
        "nodes": mine.nodes,
        "hostname": own.hostname,
        "slots": own.slots,
        "machine": own.machine,
    }
    line.settimeout(STEP_SECONDS)
    line.sendall(json.dumps(said).encode() + b"\n")
    answer = read_line(line, _LONGEST_LINE)
    try:
        found = json.loads(answer)
        refused, proof = found.get("refused"), str(found.get("proof"))
    except (ValueError, AttributeError):
        raise OSError("it closed the connection") from None
    if refused is not None:
        raise Refused(f"node 0 at {mine} does not take node {mine.node}: {refused}")
    if not hmac.compare_digest(proof, _proof(key, "launcher", ours, theirs)):
        raise Refused(f"who listens at {mine} does not know the job's key")
    line.settimeout(None)


def _proof(key: bytes, role: str, first: str, second: str) -> str:
    return hmac.digest(key, f"{role} {first} {second}".encode(), "sha256").hex()
