"""Choose the CPUs that each rank of a host is bound to (`--bind`): whole cores of one NUMA node.

A CPU is a hardware thread, and a core is a group of CPUs. Ranks share a core only if there are
fewer cores than ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdkit.launch.hosts.allocation import expand_ranges

#: The cores of each NUMA node; a core is a list of CPU numbers.
Topology = list[list[list[int]]]

_SYSTEM = Path("/sys/devices/system")


def topology(usable: set[int] | None = None, system: Path = _SYSTEM) -> Topology:
    """Return this host's NUMA nodes, without CPUs that this process may not use.

    Args:
        usable: the CPUs that this process may use; None for its affinity.
        system: the kernel's folder that describes the CPUs.
    """
    usable = os.sched_getaffinity(0) if usable is None else usable
    nodes = []
    left = set(usable)
    for path in sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        with suppress(OSError, ValueError):
            cpus = set(expand_ranges((path / "cpulist").read_text())) & left
            left -= cpus
            if cpus:
                nodes.append(_cores(cpus, system))
    if left:  # a kernel without NUMA
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
            siblings |= set(expand_ranges(path.read_text())) & left
        cores.append(sorted(siblings))
        left -= siblings
    return cores


def show_list(numbers: Sequence[int]) -> str:
    """Return numbers in the kernel's format, such as `0-3,8`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def assign(nodes: Topology, ranks: int) -> list[list[int]]:
    """Return the CPUs of each rank, in the order of local ranks.

    Each NUMA node gets ranks in proportion to its cores, and its ranks share its cores evenly. If a
    node has fewer cores than ranks, each of its ranks gets all its cores.

    Args:
        nodes: the NUMA nodes of the host, as `topology` returns them.
        ranks: the number of ranks on the host.
    """
    counts = [0] * len(nodes)
    for _ in range(ranks):
        # The node with the most cores per rank.
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
