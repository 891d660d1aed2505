"""The exchange of addresses between the ranks of a mesh, on the rendezvous server.

A mesh is a set of ranks that all connect to each other: the whole job, the ranks of one host, or
the ranks with the same local rank. Each rank listens at a separate address for every other rank. It
sends all these addresses in one request. In a second request, it gets the addresses where the other
ranks listen for it, once all ranks have sent theirs. A mesh of N ranks takes 2 N requests.
Horovod's own protocol takes N².

The engine's client is `hvdkit/engine/sources/mesh_rendezvous.h`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdkit.errors import HvdkitError

#: Horovod's name for the mesh of all ranks.
GLOBAL_SCOPE = "global"

_SHOWN_RANKS = 16
_KEPT_SECONDS = 60.0


class IncompleteMesh(HvdkitError):
    """Ranks of a mesh did not join in time. The message names them."""


class MeshMember(NamedTuple):
    """A rank of a mesh.

    Attributes:
        scope: the name of the mesh.
        size: the number of its ranks.
        rank: the rank within the mesh.
        attempt: a new text each time that a rank joins. A repeated request has the same text.
    """

    scope: str
    size: int
    rank: int
    attempt: str


@dataclass
class _Mesh:
    """The ranks that have joined a mesh, and the addresses that each has sent."""

    attempts: dict[int, str] = field(default_factory=dict)
    addresses: dict[int, bytes] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    all_answered_at: float = float("inf")
    complete: threading.Event = field(default_factory=threading.Event)


class Meshes:
    """The meshes of one job. Thread-safe.

    Ranks that call `hvd.init()` again form a new mesh with the same name. For each name, the last
    complete mesh and one incomplete mesh are kept. That suffices: a mesh becomes complete only when
    all ranks have left the mesh before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._incomplete: dict[tuple[str, int], _Mesh] = {}
        self._complete: dict[tuple[str, int], _Mesh] = {}
        self._registered: set[int] = set()
        self._closed = False

    def put(self, member: MeshMember, addresses: bytes) -> None:
        """Store the addresses of `member`.

        Args:
            addresses: the addresses where it listens for each of the other ranks, in their order:
                `size - 1` addresses of equal length.

        Raises:
            ValueError: the rank is out of range, or the addresses do not fit the size.
        """
        others = member.size - 1
        fits = 0 <= member.rank <= others and addresses and len(addresses) % others == 0
        wrong = ValueError(
            f"rank {member.rank} of {member.size}: {len(addresses)} bytes of addresses; expected a "
            f"rank from 0 to {others}, and {others} addresses as long as those of the other ranks"
        )
        if not fits:
            raise wrong
        name = member.scope, member.size
        with self._lock:
            if self._of(self._complete, member) is not None:
                return  # a repeated request, whose answer was lost
            mesh = self._incomplete.setdefault(name, _Mesh())
            # The addresses of all ranks have the same length.
            if len(next(iter(mesh.addresses.values()), addresses)) != len(addresses):
                raise wrong
            mesh.attempts[member.rank] = member.attempt
            mesh.addresses[member.rank] = addresses
            if member.scope == GLOBAL_SCOPE:
                self._registered.add(member.rank)
            if len(mesh.addresses) == member.size:
                self._complete[name] = self._incomplete.pop(name)
                mesh.complete.set()

    def get(self, member: MeshMember, seconds: float) -> bytes:
        """Wait for all ranks, and return the addresses where they listen for this rank.

        Args:
            member: as given to `put`.
            seconds: the longest time to wait, in seconds.

        Raises:
            LookupError: `put` was not called before with this member.
            IncompleteMesh: ranks have not joined within `seconds`, or the server stops.
        """
        with self._lock:
            mesh = self._of(self._complete, member) or self._of(self._incomplete, member)
        if mesh is None:
            raise LookupError(member)
        if not mesh.complete.wait(0 if self._closed else seconds) or self._closed:
            with self._lock:
                if self._closed or not mesh.complete.is_set():
                    missing = [rank for rank in range(member.size) if rank not in mesh.attempts]
                    if self._closed:
                        raise IncompleteMesh("the rendezvous server stops, because the job ends")
                    if mesh.attempts.get(member.rank) == member.attempt:
                        # This rank fails now, so other ranks must not connect to it.
                        del mesh.attempts[member.rank], mesh.addresses[member.rank]
                    raise IncompleteMesh(_missing(member, missing, seconds))
        width = len(mesh.addresses[member.rank]) // (member.size - 1)
        column = bytearray()
        for other in range(member.size):
            if other != member.rank:
                at = (member.rank - (member.rank > other)) * width
                column += mesh.addresses[other][at : at + width]
        return bytes(column)

    def mark_answered(self, member: MeshMember) -> None:
        """Record that `member` got its answer."""
        with self._lock:
            mesh = self._of(self._complete, member)
            if mesh is not None:
                mesh.answered.add(member.rank)
                if len(mesh.answered) == member.size:
                    mesh.all_answered_at = time.monotonic()

    def forget(self) -> None:
        """Delete meshes whose ranks all got their answers at least a minute ago."""
        oldest = time.monotonic() - _KEPT_SECONDS
        with self._lock:
            meshes = list(self._complete.items())
            for name in [name for name, mesh in meshes if mesh.all_answered_at < oldest]:
                del self._complete[name]

    def registered(self) -> set[int]:
        """Return the ranks that have ever joined the mesh of all ranks."""
        with self._lock:
            return set(self._registered)

    def close(self) -> None:
        """End all waits."""
        with self._lock:
            self._closed = True
            incomplete = list(self._incomplete.values())
        for mesh in incomplete:
            mesh.complete.set()

    @staticmethod
    def _of(meshes: dict[tuple[str, int], _Mesh], member: MeshMember) -> _Mesh | None:
        """Return the mesh that the rank has joined with this attempt; None if it has not."""
        mesh = meshes.get((member.scope, member.size))
        joined = mesh is not None and mesh.attempts.get(member.rank) == member.attempt
        return mesh if joined else None


def _missing(member: MeshMember, missing: list[int], seconds: float) -> str:
    shown = ", ".join(map(str, missing[:_SHOWN_RANKS]))
    more = len(missing) - _SHOWN_RANKS
    return (
        f"rank{'s' if len(missing) > 1 else ''} {shown or 'none'}"
        f"{f' and {more} more' if more > 0 else ''} of {member.size} did not join the mesh "
        f"'{member.scope}' within {seconds:g} s (HOROVOD_GLOO_TIMEOUT_SECONDS)"
    )
