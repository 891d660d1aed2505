"""The sbatch script of `hvdkit generate slurm`."""

from __future__ import annotations

import argparse
import operator
import re
import shlex
from collections.abc import Iterator

from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.flags import flag
from hvdkit.launch.generate.options import (
    add_restarts,
    check_command,
    check_numbers,
    restarts,
    script_name,
)
from hvdkit.launch.timeouts import Timeouts

HELP = "write a commented sbatch script for a job that resumes after preemption or its time limit"
EXAMPLE = """\
  hvdkit generate slurm --nodes 2 --gpus-per-node 4 --time 8:00:00 -o job.sh python train.py
  sbatch job.sh"""

# minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_WORD = re.compile(r"[\w.,@%+-]+")
# Slurm may send the signal before the time limit so many seconds early.
_EARLY_SECONDS = 60


def add_arguments(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit generate slurm`."""
    action.add_argument("--nodes", type=int, default=1, metavar="N", help="(default: 1)")
    action.add_argument(
        "--tasks-per-node",
        type=int,
        metavar="N",
        help="ranks on each node (default: one per GPU, else 1)",
    )
    action.add_argument("--cpus-per-task", type=int, metavar="N", help="cores of each rank")
    action.add_argument("--gpus-per-node", type=int, metavar="N", help="(default: none)")
    action.add_argument(
        "--time",
        default="24:00:00",
        metavar="T",
        help="the time limit in sbatch's format (default: 24:00:00)",
    )
    action.add_argument("--partition", metavar="NAME", help="(default: the cluster's)")
    action.add_argument("--account", metavar="NAME", help="(default: yours)")
    action.add_argument("--job-name", metavar="NAME", help="(default: the script's)")
    add_restarts(action)
    action.add_argument(
        "--grace",
        type=int,
        default=round(Timeouts.stop),
        metavar="S",
        help="seconds for saving before the time limit (default: %(default)s)",
    )


def text(options: argparse.Namespace) -> str:
    """Return the script.

    Raises:
        UsageError: a number or a name is not valid, or there is no command.
    """
    _check(options)
    body = _BODY.format(
        grace=options.grace,
        command=shlex.join([*restarts(options), *options.command]),
        resumable=RESUMABLE,
    )
    return "\n".join(["#!/bin/bash", *_directives(options), body])


def _check(options: argparse.Namespace) -> None:
    check_command(options, "slurm --nodes 2")
    numbers = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "grace")
    check_numbers(options, dict.fromkeys(numbers, 1) | {"restarts": 0})
    if not _TIME.fullmatch(options.time):
        raise UsageError(
            f"--time is {options.time}: expected for example 90 (minutes), 8:00:00 (hours) or 2-12 "
            f"(2 days and 12 hours)"
        )
    # Slurm takes 0 for no limit.
    if 0 < _seconds(options.time) <= options.grace + _EARLY_SECONDS:
        raise UsageError(
            f"--time is {options.time}, and --grace is {options.grace} seconds: Slurm may ask the "
            f"job to stop as soon as it has started, again after each requeue. Expected a time of "
            f"more than {options.grace + _EARLY_SECONDS} seconds (--grace and a minute)"
        )
    for name in ("partition", "account", "job_name"):
        given = getattr(options, name)
        if given is not None and not _WORD.fullmatch(given):
            raise UsageError(f"{flag(name)} is {given!r}; expected one word")


def _seconds(time: str) -> int:
    """Return the seconds of a time in sbatch's format."""
    days, dash, rest = time.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(map(operator.mul, numbers, units))


def _directives(options: argparse.Namespace) -> Iterator[str]:
    name = options.job_name or re.sub(r"[^\w.-]", "_", script_name(options.command))
    yield f"#SBATCH --job-name={name}"
    if options.partition is not None:
        yield f"#SBATCH --partition={options.partition}"
    if options.account is not None:
        yield f"#SBATCH --account={options.account}"
    yield f"#SBATCH --nodes={options.nodes}"
    yield "# A task is a rank: one per GPU where there are GPUs."
    yield f"#SBATCH --ntasks-per-node={options.tasks_per_node or options.gpus_per_node or 1}"
    yield "# Cores of each rank, for computing, data loading and communication. The default of 1 is"
    yield "# rarely enough. OMP_NUM_THREADS is set to this number."
    yield _directive("--cpus-per-task", options.cpus_per_task, 8)
    yield "# Every rank sees all GPUs of its node; hvd.init() selects that of its local rank."
    yield _directive("--gpus-per-node", options.gpus_per_node, 4)
    yield f"#SBATCH --time={options.time}"
    yield "# %x is the job's name, %j its number. A job that resumes appends to its file."
    yield "#SBATCH --output=%x-%j.out"
    yield "#SBATCH --open-mode=append"


def _directive(option: str, given: int | None, example: int) -> str:
    # Slurm ignores a line that begins with ##SBATCH.
    return f"##SBATCH {option}={example}" if given is None else f"#SBATCH {option}={given}"


_BODY = """\
# Slurm may put the job back into the queue after a preemption or the failure of a node.
#SBATCH --requeue
# Slurm sends SIGUSR1 {grace} s (up to a minute more) before the time limit. With `B:`, it sends the
# signal to this script only. The script forwards it to hvdkit, and hvdkit to the ranks' main
# processes. Without `B:`, all processes get it, and helpers (data loaders) and mpirun may die.
#SBATCH --signal=B:USR1@{grace}

# sbatch forwards your environment. If hvdkit is in another environment:
# source /path/to/env/bin/activate

# hvdkit runs in the background, because a shell handles no signal before a foreground command has
# ended. `scancel` and preemption send SIGTERM.
trap 'again=yes; kill -USR1 "$!"' USR1
trap 'again=yes; kill -TERM "$!"' TERM
hvdkit run --stop-grace {grace} {command} &
again=yes
status=127
while [ -n "$again" ]; do
    again=
    wait "$!"
    found=$?
    # 127: hvdkit had ended before this wait, because a signal came at the very end.
    [ "$found" -eq 127 ] || status=$found
done

# {resumable}: the job has saved, or has lost a node. The same command resumes, if your script does
# so (with --resume or the like).
# A cancelled job is not RUNNING, and is not requeued. In a job array, SLURM_JOB_ID of one task is
# also the number of the whole array.
job=${{SLURM_ARRAY_TASK_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
if [ "$status" -eq {resumable} ] &&
    [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; then
    echo "requeueing (restart $((${{SLURM_RESTART_COUNT:-0}} + 1)))"
    scontrol requeue "$job"
fi
exit "$status"
"""
