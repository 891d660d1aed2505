"""Which CPUs each rank of a host is bound to (`--bind`): cores of one NUMA node.

A core is the group of CPUs (hardware threads) that share it. A core is never split between ranks
while there are as many cores as ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: The cores of each NUMA node; a core is the numbers of its CPUs.
Topology = list[list[list[int]]]

_SYSTEM = Path("/sys/devices/system")


def topology(usable: set[int] | None = None, system: Path = _SYSTEM) -> Topology:
    """Return this host's NUMA nodes, without CPUs that this process may not use.

    Args:
        usable: the CPUs that it may use; None for its affinity.
        system: where the kernel describes them.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    nodes = []
    left = set(usable)
    for path in sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        with suppress(OSError, ValueError):
            cpus = parse_list((path / "cpulist").read_text()) & left
            left -= cpus
            if cpus:
                nodes.append(_cores(cpus, system))
    if left:  # without NUMA
        nodes.append(_cores(left, system))
    return nodes


def _cores(cpus: set[int], system: Path) -> list[list[int]]:
    cores: list[list[int]] = []
    left = set(cpus)
    while left:
        first = min(left)
        siblings = {first}
        with suppress(OSError, ValueError):
            path = system / f"cpu/cpu{first}/topology/thread_siblings_list"
            siblings |= parse_list(path.read_text()) & left
        cores.append(sorted(siblings))
        left -= siblings
    return cores


def parse_list(text: str) -> set[int]:
    """Return the numbers of the kernel's lists: `0-3,8`.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def show_list(numbers: Sequence[int]) -> str:
    """Return numbers as the kernel writes them: `0-3,8`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def assign(nodes: Topology, ranks: int) -> list[list[int]]:
    """Return the CPUs of each rank, in the order of local ranks.

    Ranks are spread over the NUMA nodes by their numbers of cores, and share the cores of a node
    evenly. Where a node has fewer cores than ranks, all its ranks get all of it.

    Args:
        nodes: the host's, as `topology` returns them.
        ranks: the number of ranks there.
    """
    counts = [0] * len(nodes)
    for _ in range(ranks):
        # Where a rank would have the largest share.
        best = max(range(len(nodes)), key=lambda node: len(nodes[node]) / (counts[node] + 1))
        counts[best] += 1
    found = []
    for cores, count in zip(nodes, counts, strict=True):
        for rank in range(count):
            share = cores
            if len(cores) >= count:
                share = cores[len(cores) * rank // count : len(cores) * (rank + 1) // count]
            found.append(sorted(cpu for core in share for cpu in core))
    return found
