"""Plan a job: assign each rank to a host. The plan depends only on the hosts and the size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdkit.errors import UsageError
from hvdkit.faults.names import shortened
from hvdkit.launch.hosts.hosts import Host, describe_slots, name_slots, total_slots

MOST_RANKS = 100_000
#: The most ranks in a text.
_SHOWN = 8


@dataclass(frozen=True)
class Place:
    """One rank's place in the job, in Horovod's terms.

    Attributes:
        rank: the rank in the whole job.
        host: the host of the rank.
        local_rank: the index of the rank on its host.
        local_size: the number of ranks on its host.
        cross_rank: the index of the rank among the ranks of all hosts with the same local rank.
        cross_size: the number of ranks of all hosts with the same local rank.
    """

    rank: int
    host: Host
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclass(frozen=True)
class Plan:
    """The command and the ranks of a job.

    Attributes:
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
        return list(self._by_host)

    def on(self, host: Host) -> list[Place]:
        """Return the places on `host`, in the order of ranks."""
        return self._by_host.get(host, [])

    def by_agent(self, agents: int) -> list[list[Place]]:
        """Return the places of each agent. There is one agent for each host, or for each rank."""
        groups = [self.on(host) for host in self.hosts]
        return [[place] for group in groups for place in group] if agents == self.size else groups

    def node(self, host: Host) -> int:
        """Return the index of `host` in `hosts`."""
        return self._nodes[host]

    def describe(self, ranks: Sequence[int]) -> str:
        """Return a text for ranks, such as `ranks 1 on host1, 2 on host2 and 3 more`."""
        return describe_ranks(ranks, [place.host.name for place in self.places])

    @cached_property
    def _nodes(self) -> dict[Host, int]:
        return {host: number for number, host in enumerate(self._by_host)}

    @cached_property
    def _by_host(self) -> dict[Host, list[Place]]:
        found: dict[Host, list[Place]] = {}
        for place in self.places:
            found.setdefault(place.host, []).append(place)
        return found


def describe_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return a text for ranks, such as `ranks 1 on host1, 2 on host2 and 3 more`.

    Args:
        hosts: the host of each rank of the job.
    """
    named = [f"{rank} on {hosts[rank]}" for rank in ranks]
    return f"rank{'s' if len(ranks) > 1 else ''} {shortened(named, _SHOWN)}"


def check_command(command: Sequence[str]) -> None:
    """Raise UsageError if `command` is empty."""
    if not command:
        raise UsageError("there is no command to run; expected e.g. `hvdkit run -np 2 python x.py`")


def shares(hosts: Sequence[Host], size: int) -> list[tuple[Host, int]]:
    """Return the hosts that get ranks, each up to its slots, and their numbers of ranks."""
    found: list[tuple[Host, int]] = []
    left = size
    for host in hosts:
        if count := min(host.slots, left):
            found.append((host, count))
            left -= count
    return found


def make_plan(command: Sequence[str], directory: str, hosts: Sequence[Host], size: int) -> Plan:
    """Assign ranks to the hosts in order, each host up to its slots, as Horovod does.

    Raises:
        UsageError: there are fewer slots than ranks, `size` is out of range, or the command is
            empty.
    """
    check_command(command)
    if size < 1:
        raise UsageError(f"-np is {size}; expected at least 1")
    if size > MOST_RANKS:
        raise UsageError(f"-np is {size}; expected at most {MOST_RANKS}")
    if total_slots(hosts) < size:
        raise UsageError(
            f"-np is {size}, but the hosts have {name_slots(total_slots(hosts))} "
            f"({describe_slots(hosts)}). Lower -np, add hosts, or give them more slots: HOST:SLOTS."
        )
    counts = shares(hosts, size)
    # For each local rank, the number of hosts that have it.
    across = Counter(local_rank for _, count in counts for local_rank in range(count))
    before: Counter[int] = Counter()
    places: list[Place] = []
    for host, count in counts:
        for local_rank in range(count):
            places.append(
                Place(
                    rank=len(places),
                    host=host,
                    local_rank=local_rank,
                    local_size=count,
                    cross_rank=before[local_rank],
                    cross_size=across[local_rank],
                )
            )
            before[local_rank] += 1
    return Plan(list(command), directory, places)
