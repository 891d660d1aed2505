"""The batch systems other than Slurm: one record for each.

To add one, add a row to `BATCH_SYSTEMS`. Ranks are started over ssh, or by an MPI. For Slurm, see
`allocation`.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import UsageError
from hvdkit.launch.allocation import expand_nodes, expand_ranges
from hvdkit.launch.hosts import Host
from hvdkit.plain_files import parse_json

_FLUX_SECONDS = 60.0


@dataclass(frozen=True)
class BatchSystem:
    """A batch system.

    Attributes:
        name: its name.
        variable: the variable that a job of it has, and that leads to the job's hosts.
        prefixes: the beginnings of the names of variables that must not reach other hosts.
        slots: returns host -> slots from the value of the variable.
    """

    name: str
    variable: str
    prefixes: Sequence[str]
    slots: Callable[[str], Mapping[str, int]]

    def hosts(self, env: Mapping[str, str]) -> list[Host]:
        """Return the hosts of a job.

        Raises:
            UsageError: the variable is malformed, or there are no hosts.
        """
        value = env[self.variable]
        try:
            slots = self.slots(value)
        except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as error:
            raise UsageError(f"{self.variable}={value} cannot be read: {error}") from error
        if not slots:
            raise UsageError(
                f"{self.variable}={value} has no hosts: expected those of a job of {self.name}. "
                f"Give the hosts with -H, or unset the variable to use this machine"
            )
        return [Host(host, count) for host, count in slots.items()]


def batch_hosts(env: Mapping[str, str]) -> tuple[str, list[Host]] | None:
    """Return the name of the variable of a batch job, and the hosts of the job.

    Return None outside of a job of `BATCH_SYSTEMS`.

    Raises:
        UsageError: the variable is malformed, or there are no hosts.
    """
    found = next((system for system in BATCH_SYSTEMS if env.get(system.variable)), None)
    return None if found is None else (found.variable, found.hosts(env))


def _pbs(path: str) -> dict[str, int]:
    """Parse the file of PBS or Torque: a line with the host for each slot."""
    return dict(Counter(Path(path).read_text(encoding="utf-8").split()))


def _lsf(text: str) -> dict[str, int]:
    """Parse the variable of LSF: `host1 4 host2 4`. A launch node may come first, with one slot."""
    words = text.split()
    slots: Counter[str] = Counter()
    for name, count in zip(words[::2], words[1::2], strict=True):
        slots[name] += int(count)
    return dict(slots)


def _sge(path: str) -> dict[str, int]:
    """Parse the file of SGE, with lines `host slots queue processors`."""
    slots: Counter[str] = Counter()
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.strip():
            name, count, *_ = line.split()
            slots[name] += int(count)
    return dict(slots)


def _flux(uri: str) -> dict[str, int]:  # noqa: ARG001
    """Ask the Flux instance of FLUX_URI for its resources.

    A slot is a GPU, or a core on a node without GPUs. See flux-environment(7), flux-resource(1),
    and the resource set format of Flux (RFC 20).
    """
    done = subprocess.run(
        ["flux", "resource", "R"], capture_output=True, text=True, timeout=_FLUX_SECONDS, check=True
    )
    return flux_slots(parse_json(done.stdout))


def flux_slots(resources: Mapping[str, Any]) -> dict[str, int]:
    """Return host -> slots from a resource set of Flux."""
    execution = resources["execution"]
    names = [name for part in execution["nodelist"] for name in expand_nodes(part)]
    ranks = [rank for each in execution["R_lite"] for rank in expand_ranges(each["rank"])]
    # The list of nodes is in the order of Flux's own ranks.
    of_rank = dict(zip(sorted(ranks), names, strict=True))
    slots = dict.fromkeys(names, 0)
    for rank, count in _counts(execution["R_lite"]):
        slots[of_rank[rank]] += count
    return {name: count for name, count in slots.items() if count}


def _counts(resources: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Yield a rank of Flux, and the number of its GPUs, or else of its cores."""
    for each in resources:
        children = each["children"]
        ids = expand_ranges(children.get("gpu") or children.get("core", ""))
        for rank in expand_ranges(each["rank"]):
            yield rank, len(ids)


BATCH_SYSTEMS = (
    BatchSystem("PBS or Torque", "PBS_NODEFILE", ("PBS_",), _pbs),
    BatchSystem("LSF", "LSB_MCPU_HOSTS", ("LSB_",), _lsf),
    BatchSystem("SGE", "PE_HOSTFILE", ("SGE_",), _sge),
    BatchSystem("Flux", "FLUX_URI", ("FLUX_",), _flux),
)
