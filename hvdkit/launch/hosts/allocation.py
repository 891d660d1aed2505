"""The hosts of a batch job: the allocation of Slurm, and the lists of other batch systems.

To add a batch system, add a row to `BATCH_SYSTEMS`. Ranks are started over ssh, or by an MPI. Only
in Slurm, srun starts them.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import UsageError
from hvdkit.launch.hosts.hosts import Host, describe_slots, shortened, total_slots
from hvdkit.system.plain_files import parse_json, read_named

# Slurm's first step number for steps that srun did not start, such as the batch script.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# The most nodes of an allocation.
_MOST_NODES = 100_000
_RANGE = "[0-9]{1,18}(?:-[0-9]{1,18})?"
_NODE = re.compile(rf"(?:[\w.-]|\[{_RANGE}(?:,{_RANGE})*\])+")
_FLUX_SECONDS = 60.0


@dataclass(frozen=True)
class Allocation:
    """An allocation of Slurm.

    Attributes:
        hosts: the nodes. The slots of a node are its tasks.
        cpus: node -> the number of its CPUs.
        cpus_per_task: the user's --cpus-per-task; None for Slurm's default.
        pins_gpus: whether each task sees its own GPUs only.
        inside_step: whether srun has started this process (`srun --pty bash`). The ranks' step must
            then share the resources of this one.
    """

    hosts: Sequence[Host]
    cpus: Mapping[Host, int]
    cpus_per_task: int | None = None
    pins_gpus: bool = False
    inside_step: bool = False


def inside(env: Mapping[str, str]) -> bool:
    """Return whether `env` is that of a process inside a Slurm allocation."""
    return "SLURM_JOB_ID" in env


def read(env: Mapping[str, str]) -> Allocation:
    """Return the allocation in `env`; inside a step, the nodes and tasks of that step.

    Raises:
        UsageError: there is no allocation, it is heterogeneous, its variables are malformed, or
            srun has started several processes of hvdkit.
    """
    if not inside(env):
        raise UsageError(
            "--launcher slurm: there is no allocation here (SLURM_JOB_ID is not set). Get one with "
            "`salloc` or `sbatch`; `hvdkit generate slurm` writes a script for sbatch"
        )
    step = _is_step(env)
    if step and env.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PTY_PORT" not in env:
        raise UsageError(
            f"srun has started hvdkit run {env['SLURM_STEP_NUM_TASKS']} times. Start it once, "
            "without srun, in the allocation: it calls srun itself"
        )
    if "SLURM_HET_SIZE" in env and not step:
        # Without this check, a batch script would use the nodes of the first component only.
        raise UsageError(
            f"the Slurm job is heterogeneous, with {env['SLURM_HET_SIZE']} components: expected "
            "one allocation. Ask for it without `:` and `hetjob`, or use --launcher gloo with -H"
        )
    of = "SLURM_STEP_" if step else "SLURM_JOB_"
    names = expand_nodes(_needed(env, f"{of}NODELIST"))
    variable = "SLURM_STEP_TASKS_PER_NODE" if step else "SLURM_TASKS_PER_NODE"
    tasks = expand_counts(_needed(env, variable), variable)
    if len(tasks) != len(names):
        raise UsageError(
            f"{of}NODELIST has {len(names)} nodes, but {variable}={env[variable]} is for "
            f"{len(tasks)}; check whether one of the two variables was set by hand"
        )
    hosts = [Host(name, count) for name, count in zip(names, tasks, strict=True)]
    # These variables have all nodes of the job, also within a step.
    variable = "SLURM_JOB_CPUS_PER_NODE"
    counts = expand_counts(_needed(env, variable), variable)
    cpus = dict(zip(expand_nodes(_needed(env, "SLURM_JOB_NODELIST")), counts, strict=False))
    per_task = env.get("SLURM_CPUS_PER_TASK", "")
    return Allocation(
        hosts,
        {host: cpus.get(host.name, host.slots) for host in hosts},
        int(per_task) if _is_number(per_task) else None,
        pins_gpus="SLURM_GPUS_PER_TASK" in env,
        inside_step=step,
    )


def _is_step(env: Mapping[str, str]) -> bool:
    number = env.get("SLURM_STEP_ID", "")
    return _is_number(number) and int(number) < _FIRST_SPECIAL_STEP


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]{1,18}", text) is not None


def _needed(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise UsageError(
            f"SLURM_JOB_ID is set, but {name} is not: expected both in a Slurm allocation. Outside "
            f"of one, unset SLURM_JOB_ID or use --launcher gloo"
        )
    return env[name]


def expand_nodes(text: str) -> list[str]:
    """Return the names in a node list of Slurm: `a[1-3,05],b07,rack[1-2]n[1-4]`.

    Raises:
        UsageError: the list is malformed.
    """
    # Commas within brackets do not separate nodes.
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text)
    for part in parts:
        if not _NODE.fullmatch(part):
            raise UsageError(
                f"the node list is {shortened(text)!r}, but {shortened(part)!r} is not a node; "
                "expected e.g. node[01-04,7]"
            )
    found = list(itertools.islice(itertools.chain.from_iterable(map(_names, parts)), _MOST_NODES))
    if not 0 < len(found) < _MOST_NODES:
        raise UsageError(
            f"the node list is {shortened(text)!r}; expected e.g. node[01-04], and fewer than "
            f"{_MOST_NODES:,} nodes"
        )
    return found


def _names(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    choices = [
        itertools.islice(_numbers(piece), _MOST_NODES) if number % 2 else [piece]
        for number, piece in enumerate(pieces)
    ]
    return map("".join, itertools.product(*choices))


def expand_ranges(text: str) -> list[int]:
    """Return the numbers in a text such as `0-3,7`; none for "".

    Raises:
        ValueError: the text is malformed.
    """
    return [int(number) for number in _numbers(text)] if text else []


def _numbers(ranges: str) -> Iterator[str]:
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        yield from (f"{n:0{len(first)}}" for n in range(int(first), int(last or first) + 1))


def expand_counts(text: str, variable: str) -> list[int]:
    """Return a number per node, from a list of Slurm: `2(x3),1` is 2, 2, 2, 1.

    Args:
        variable: the variable that contains it.

    Raises:
        UsageError: the list is malformed.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        nodes = 0 if match is None else int(match[2] or 1)
        if match is None or len(counts) + nodes > _MOST_NODES:
            raise UsageError(
                f"{variable} is {shortened(text)!r}: expected a number for each node, such as "
                f"2(x3),1, and at most {_MOST_NODES:,} nodes"
            )
        counts += [int(match[1])] * nodes
    return counts


def check_size(allocation: Allocation, size: int) -> None:
    """Raise UsageError if `size` ranks are more than the tasks of the allocation."""
    tasks = total_slots(allocation.hosts)
    if size > tasks:
        kind = "step" if allocation.inside_step else "allocation"
        raise UsageError(
            f"-np is {size}, but the {kind} has {tasks} tasks "
            f"({describe_slots(allocation.hosts)}). Lower -np, or ask Slurm for more: "
            f"--ntasks={size}. To use this node only: --launcher gloo"
        )


@dataclass(frozen=True)
class BatchSystem:
    """A batch system.

    Attributes:
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
        except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError) as error:
            raise UsageError(f"{self.variable}={value} cannot be read: {error}") from error
        if not slots:
            raise UsageError(
                f"{self.variable}={value} has no hosts: expected those of a job of {self.name}. "
                f"Give the hosts with -H, or unset the variable to use this machine"
            )
        try:
            return [Host(host, count) for host, count in slots.items()]
        except UsageError as error:
            raise UsageError(f"{self.variable}: {error}") from error


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
    return Counter(read_named(Path(path)).split())


def _lsf(text: str) -> dict[str, int]:
    """Parse the variable of LSF: `host1 4 host2 4`. A launch node may come first, with one slot."""
    words = text.split()
    return _added(zip(words[::2], words[1::2], strict=True))


def _sge(path: str) -> dict[str, int]:
    """Parse the file of SGE, with lines `host slots queue processors`."""
    lines = map(str.split, read_named(Path(path)).splitlines())
    return _added((line[0], line[1]) for line in lines if line)


def _added(counts: Iterable[tuple[str, str]]) -> dict[str, int]:
    slots: Counter[str] = Counter()
    for name, count in counts:
        slots[name] += int(count)
    return slots


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
    for each in execution["R_lite"]:
        children = each["children"]
        count = len(expand_ranges(children.get("gpu") or children.get("core", "")))
        for rank in expand_ranges(each["rank"]):
            slots[of_rank[rank]] += count
    return {name: count for name, count in slots.items() if count}


BATCH_SYSTEMS = (
    BatchSystem("PBS or Torque", "PBS_NODEFILE", ("PBS_",), _pbs),
    BatchSystem("LSF", "LSB_MCPU_HOSTS", ("LSB_",), _lsf),
    BatchSystem("SGE", "PE_HOSTFILE", ("SGE_",), _sge),
    BatchSystem("Flux", "FLUX_URI", ("FLUX_",), _flux),
)
