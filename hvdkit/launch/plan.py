"""Which rank runs where. Computed before anything is started, from the hosts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import UsageError
from hvdkit.launch.hosts import Host, total_slots


@dataclass(frozen=True)
class Place:
    """One rank's place in the job, in Horovod's words.

    Attributes:
        rank: the rank in the whole job.
        host: the host that it runs on.
        local_rank: its number on that host.
        local_size: the number of ranks on that host.
        cross_rank: its number among the ranks with the same local rank, one on each host.
        cross_size: how many those are.
    """

    rank: int
    host: Host
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Plan:
    """The ranks of a job and what they run.

    Attributes:
        command: what every rank runs.
        directory: the ranks' working directory, on every host.
        places: one per rank, in the order of ranks.
    """

    command: Sequence[str]
    directory: str
    places: Sequence[Place]

    @property
    def size(self) -> int:
        return len(self.places)

    @property
    def hosts(self) -> list[Host]:
        """The hosts that have ranks, in the order of ranks."""
        return list(dict.fromkeys(place.host for place in self.places))

    def on(self, host: Host) -> list[Place]:
        """The places on `host`, in the order of ranks."""
        return [place for place in self.places if place.host == host]


def make_plan(command: Sequence[str], directory: str, hosts: Sequence[Host], size: int) -> Plan:
    """Fill the hosts one after the other, each up to its slots, as horovodrun does.

    Raises:
        UsageError: there are fewer slots than ranks, or there is nothing to run.
    """
    if not command:
        raise UsageError("there is no command to run; expected e.g. `hvdkit run -np 2 python x.py`")
    if size < 1:
        raise UsageError(f"-np is {size}; expected at least 1")
    if total_slots(hosts) < size:
        given = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(
            f"-np is {size}, and the hosts have {total_slots(hosts)} slots ({given}). "
            "Lower -np, add hosts, or give them more slots: HOST:SLOTS."
        )
    counts: list[tuple[Host, int]] = []
    left = size
    for host in hosts:
        if count := min(host.slots, left):
            counts.append((host, count))
            left -= count
    places: list[Place] = []
    for number, (host, count) in enumerate(counts):
        for local_rank in range(count):
            places.append(
                Place(
                    rank=len(places),
                    host=host,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=sum(local_rank < before for _, before in counts[:number]),
                    cross_size=sum(local_rank < other for _, other in counts),
                )
            )
    return Plan(list(command), directory, places)
