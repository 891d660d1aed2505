"""The allocation of Slurm, read from environment variables. For others, see `batch_systems`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdkit.errors import UsageError
from hvdkit.launch.hosts import Host, total_slots

# Slurm's first step number for steps that srun did not start, such as the batch script.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: The most nodes of an allocation, and the most digits of a number in a node's name.
MOST_NODES = 100_000
_MOST_DIGITS = 18
# Longer texts are cut in errors.
_SHOWN = 200


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
    tasks_variable = "SLURM_STEP_TASKS_PER_NODE" if step else "SLURM_TASKS_PER_NODE"
    tasks = expand_counts(_needed(env, tasks_variable), tasks_variable)
    if len(tasks) != len(names):
        raise UsageError(
            f"{of}NODELIST has {len(names)} nodes, but {tasks_variable}={env[tasks_variable]} is "
            f"for {len(tasks)}; check whether one of the two variables was set by hand"
        )
    hosts = [Host(name, count) for name, count in zip(names, tasks, strict=True)]
    # This variable lists all nodes of the job, also within a step.
    all_names = expand_nodes(_needed(env, "SLURM_JOB_NODELIST"))
    cpus_variable = "SLURM_JOB_CPUS_PER_NODE"
    counts = expand_counts(_needed(env, cpus_variable), cpus_variable)
    cpus = dict(zip(all_names, counts, strict=False))
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
    names = itertools.chain.from_iterable(_names(part, text) for part in parts)
    found = list(itertools.islice(names, MOST_NODES + 1))
    if not found:
        raise UsageError("the node list is empty; expected e.g. node[01-04]")
    if len(found) > MOST_NODES:
        raise _too_many(text)
    return found


def _too_many(text: str) -> UsageError:
    return UsageError(
        f"the node list is {_shortened(text)}, with more than {MOST_NODES:,} nodes; expected fewer"
    )


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}…"


def _names(part: str, text: str) -> Iterator[str]:
    if not re.fullmatch(r"(?:[\w.-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+", part):
        raise UsageError(
            f"the node list is {_shortened(text)}, but {_shortened(part)} is not a node; expected "
            "e.g. node[01-04,7]"
        )
    pieces = re.split(r"\[([^\]]*)\]", part)
    choices = [_numbers(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MOST_NODES:
        raise _too_many(text)
    return map("".join, itertools.product(*choices))


def expand_ranges(text: str) -> list[int]:
    """Return the numbers in a text such as `0-3,7`; none for "".

    Raises:
        ValueError: the text is malformed.
    """
    return [int(number) for number in _numbers(text)] if text else []


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        width = len(first)
        if max(width, len(last)) > _MOST_DIGITS:
            raise UsageError(
                f"the node list has the number {_shortened(piece)}; expected at most "
                f"{_MOST_DIGITS} digits"
            )
        numbers = range(int(first), int(last or first) + 1)
        if len(found) + len(numbers) > MOST_NODES:
            raise _too_many(ranges)
        found += [f"{n:0{width}}" for n in numbers]
    return found


def expand_counts(text: str, variable: str) -> list[int]:
    """Return a number per node, from a list of Slurm: `2(x3),1` is 2, 2, 2, 1.

    Args:
        text: the list.
        variable: the variable that contains it.

    Raises:
        UsageError: the list is malformed.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        nodes = 0 if match is None else int(match[2] or 1)
        if match is None or len(counts) + nodes > MOST_NODES:
            raise UsageError(
                f"{variable} is {_shortened(text)}: expected a number for each node, such as "
                f"2(x3),1, and at most {MOST_NODES:,} nodes"
            )
        counts += [int(match[1])] * nodes
    return counts


def check_size(allocation: Allocation, size: int) -> None:
    """Raise UsageError if `size` ranks are more than the tasks of the allocation."""
    tasks = total_slots(allocation.hosts)
    if size > tasks:
        shown = ", ".join(f"{host.name}:{host.slots}" for host in allocation.hosts[:8])
        more = ", …" if len(allocation.hosts) > 8 else ""
        kind = "step" if allocation.inside_step else "allocation"
        raise UsageError(
            f"-np is {size}, but the {kind} has {tasks} tasks ({shown}{more}). Lower -np, or ask "
            f"Slurm for more: --ntasks={size}. To use this node only: --launcher gloo"
        )
