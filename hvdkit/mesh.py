"""The addresses of a job's ranks, given to each other mesh by mesh.

A mesh is a set of ranks that all connect with each other: the whole job, the ranks of one host, or
the ranks with the same local rank. Each rank listens at an address of its own for every other one.
It gives all of them at once, and gets those that are meant for it once all ranks of the mesh have
given theirs. So a mesh of N ranks takes 2 N requests, and Horovod's own way N².

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


class Incomplete(HvdkitError):
    """Not all ranks of a mesh came in time. The message names those that are missing."""


class Place(NamedTuple):
    """A rank's place in a mesh.

    Attributes:
        scope: the name of the mesh.
        size: the number of its ranks.
        rank: within the mesh.
        attempt: different each time that a rank joins, so that requests may be repeated.
    """

    scope: str
    size: int
    rank: int
    attempt: str


@dataclass
class _Mesh:
    attempts: dict[int, str] = field(default_factory=dict)
    addresses: dict[int, bytes] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    done: float = float("inf")
    complete: threading.Event = field(default_factory=threading.Event)


class Meshes:
    """The meshes of one job. Threads may share it.

    Ranks that call `hvd.init()` again form a mesh of the same name again. No rank can be in a third
    one while another is still in the first, so two of each name are kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._growing: dict[tuple[str, int], _Mesh] = {}
        self._complete: dict[tuple[str, int], _Mesh] = {}
        self._registered: set[int] = set()
        self._closed = False

    def put(self, place: Place, addresses: bytes) -> None:
        """Take the addresses of the rank at `place`.

        Args:
            place: the rank's.
            addresses: where it listens for each of the other ranks, in their order: `size - 1`
                addresses of equal length.

        Raises:
            ValueError: there is no such place, or not as many addresses.
        """
        others = place.size - 1
        fits = 0 <= place.rank <= others and addresses and len(addresses) % others == 0
        wrong = ValueError(f"rank {place.rank} of {place.size}: {len(addresses)} bytes")
        if not fits:
            raise wrong
        name = place.scope, place.size
        with self._lock:
            if self._of(self._complete, place) is not None:
                return  # a repeated request, whose answer was lost
            mesh = self._growing.setdefault(name, _Mesh())
            # All that were taken before have the same length.
            if len(next(iter(mesh.addresses.values()), addresses)) != len(addresses):
                raise wrong
            mesh.attempts[place.rank] = place.attempt
            mesh.addresses[place.rank] = addresses
            if place.scope == GLOBAL_SCOPE:
                self._registered.add(place.rank)
            if len(mesh.addresses) == place.size:
                self._complete[name] = self._growing.pop(name)
                mesh.complete.set()

    def get(self, place: Place, seconds: float) -> bytes:
        """Wait for all ranks, and return the addresses of the others meant for this rank.

        Args:
            place: as given to `put`.
            seconds: how long to wait.

        Raises:
            LookupError: `put` was not called before with this place.
            Incomplete: ranks have not come.
        """
        with self._lock:
            mesh = self._of(self._complete, place) or self._of(self._growing, place)
        if mesh is None:
            raise LookupError(place)
        if not mesh.complete.wait(0 if self._closed else seconds) or self._closed:
            with self._lock:
                if self._closed or not mesh.complete.is_set():
                    missing = [rank for rank in range(place.size) if rank not in mesh.attempts]
                    if self._closed:
                        raise Incomplete("the rendezvous ends, because the job does")
                    if mesh.attempts.get(place.rank) == place.attempt:
                        # This rank gives up: nobody is to connect to it.
                        del mesh.attempts[place.rank], mesh.addresses[place.rank]
                    raise Incomplete(_missing(place, missing, seconds))
        width = len(mesh.addresses[place.rank]) // (place.size - 1)
        column = bytearray()
        for other in range(place.size):
            if other != place.rank:
                at = (place.rank - (place.rank > other)) * width
                column += mesh.addresses[other][at : at + width]
        return bytes(column)

    def left(self, place: Place) -> None:
        """Note that the rank at `place` has been answered."""
        with self._lock:
            mesh = self._of(self._complete, place)
            if mesh is not None:
                mesh.left.add(place.rank)
                if len(mesh.left) == place.size:
                    mesh.done = time.monotonic()

    def forget(self) -> None:
        """Forget meshes whose ranks were all answered a minute ago."""
        oldest = time.monotonic() - _KEPT_SECONDS
        with self._lock:
            for name in [name for name, mesh in self._complete.items() if mesh.done < oldest]:
                del self._complete[name]

    def registered(self) -> set[int]:
        """Return the ranks that have joined the mesh of all ranks, now or before."""
        with self._lock:
            return set(self._registered)

    def close(self) -> None:
        """Let no rank wait any longer."""
        with self._lock:
            self._closed = True
            growing = list(self._growing.values())
        for mesh in growing:
            mesh.complete.set()

    @staticmethod
    def _of(meshes: dict[tuple[str, int], _Mesh], place: Place) -> _Mesh | None:
        """Return the mesh among these that the rank has joined with this attempt."""
        mesh = meshes.get((place.scope, place.size))
        joined = mesh is not None and mesh.attempts.get(place.rank) == place.attempt
        return mesh if joined else None


def _missing(place: Place, missing: list[int], seconds: float) -> str:
    shown = ", ".join(map(str, missing[:_SHOWN_RANKS]))
    more = len(missing) - _SHOWN_RANKS
    return (
        f"rank{'s' if len(missing) > 1 else ''} {shown or 'none'}"
        f"{f' and {more} more' if more > 0 else ''} of {place.size} did not come to the mesh "
        f"'{place.scope}' within {seconds:g} s (HOROVOD_GLOO_TIMEOUT_SECONDS)"
    )
