"""The controllers with which ranks find each other: Gloo's rendezvous, or MPI."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hvdkit.exit_statuses import MPI_LOST_DAEMON
from hvdkit.launch.control.messages import Message
from hvdkit.launch.control.network import Interface
from hvdkit.launch.control.plan import Place, Plan
from hvdkit.launch.hosts.hosts import Host
from hvdkit.rendezvous.server import KEY_REVISION, RendezvousServer, gloo_environment

#: The variables with which a Horovod with both Gloo and MPI uses MPI.
MPI_VARIABLES = {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"}


@dataclass(frozen=True)
class Controller:
    """The way in which the ranks of one start find each other.

    Attributes:
        variables: returns the variables for a rank's place.
        registered: returns the ranks that have registered until now; None if ranks do not register,
            but note how far they are (see `start_watch`).
        ends_others_with: the exit statuses with which it ends other ranks and agents after one of
            them has ended; empty if it ends none.
    """

    variables: Callable[[Place, Interface], Mapping[str, str]]
    registered: Callable[[], set[int]] | None
    ends_others_with: tuple[int, ...] = ()


def over_mpi(variables: Mapping[str, str]) -> Controller:
    """Return the controller of ranks over MPI.

    mpirun and srun start these ranks, and end all of them with SIGTERM after one has ended. mpirun
    uses another status if it has lost its daemon on a host.

    Args:
        variables: the ranks' variables besides `MPI_VARIABLES`.
    """
    ends = (-signal.SIGTERM, MPI_LOST_DAEMON)
    return Controller(lambda *_: {**MPI_VARIABLES, **variables}, None, ends)


@contextmanager
def over_gloo(plan: Plan, facts: Mapping[Host, Message], address: str) -> Iterator[Controller]:
    """Run the rendezvous of a start, and yield the controller.

    Args:
        facts: host -> its facts (`host_facts.facts`).
        address: this machine's address for the rendezvous.
    """
    have_key = all(found["engine"] >= KEY_REVISION for found in facts.values())
    with RendezvousServer(address, size=plan.size, stores_without_key=not have_key) as server:

        def variables(place: Place, interface: Interface) -> dict[str, str]:
            return place_variables(place, interface, plan.size, server)

        def registered() -> set[int]:
            # If the engine of every host sends the key, ranks without it may not be of this job.
            strangers = set() if have_key else server.without_key() & set(range(plan.size))
            return server.registered() | strangers

        yield Controller(variables, registered)


def place_variables(
    place: Place, interface: Interface, size: int, server: RendezvousServer
) -> dict[str, str]:
    """Return the variables of a rank of a job of `size` ranks over Gloo."""
    return gloo_environment(
        place.rank,
        size,
        server.address,
        server.port,
        interface.name,
        place.host.address,
        place.local_rank,
        place.local_size,
        place.cross_rank,
        place.cross_size,
        server.key,
    )
