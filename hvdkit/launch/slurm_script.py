"""The script of `hvdkit generate slurm`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.launch.job import Limits
from hvdkit.launch.job_file import check_command, check_numbers, flag, script_name

HELP = "write a commented sbatch script, of a job that goes on when it was preempted or timed out"
EXAMPLE = """\
  hvdkit generate slurm --nodes 2 --gpus-per-node 4 --time 8:00:00 -o job.sh python train.py
  sbatch job.sh"""

# minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_WORD = re.compile(r"[\w.,@%+-]+")


def add_arguments(action: argparse.ArgumentParser) -> None:
    """The arguments of `hvdkit generate slurm`."""
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
        "--time", default="24:00:00", metavar="T", help="as sbatch takes it (default: 24:00:00)"
    )
    action.add_argument("--partition", metavar="NAME", help="(default: the cluster's)")
    action.add_argument("--account", metavar="NAME", help="(default: yours)")
    action.add_argument("--job-name", metavar="NAME", help="(default: the script's)")
    action.add_argument(
        "--grace",
        type=int,
        default=round(Limits.stop),
        metavar="S",
        help="seconds that saving may take before the time is up (default: %(default)s)",
    )


def text(options: argparse.Namespace) -> str:
    """The script.

    Raises:
        UsageError: a number or a name cannot be one, or there is no command.
    """
    _check(options)
    body = _BODY.format(
        grace=options.grace, command=shlex.join(options.command), resumable=RESUMABLE
    )
    return "\n".join(["#!/bin/bash", *_directives(options), body])


def _check(options: argparse.Namespace) -> None:
    check_command(options, "slurm --nodes 2")
    numbers = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "grace")
    check_numbers(options, dict.fromkeys(numbers, 1))
    if not _TIME.fullmatch(options.time):
        raise UsageError(f"--time is {options.time}; expected e.g. 90 (minutes), 8:00:00 or 2-12")
    for name in ("partition", "account", "job_name"):
        given = getattr(options, name)
        if given is not None and not _WORD.fullmatch(given):
            raise UsageError(f"{flag(name)} is {given!r}; expected one word")


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
    yield "# Cores of each rank, for its computing, data loading and communication. Slurm gives 1"
    yield "# where nothing is said, which is rarely enough. OMP_NUM_THREADS is set to it."
    yield _perhaps("--cpus-per-task", options.cpus_per_task, 8)
    yield "# Every rank sees all GPUs of its node; hvd.init() gives it that of its local rank."
    yield _perhaps("--gpus-per-node", options.gpus_per_node, 4)
    yield f"#SBATCH --time={options.time}"
    yield "# %x is the job's name, %j its number. A job that goes on appends to what it wrote."
    yield "#SBATCH --output=%x-%j.out"
    yield "#SBATCH --open-mode=append"


def _perhaps(option: str, given: int | None, example: int) -> str:
    # Slurm reads over a line that begins with two of them.
    return f"##SBATCH {option}={example}" if given is None else f"#SBATCH {option}={given}"


_BODY = """\
# Slurm may put the job back into the queue: when it was preempted, or when a node has failed.
#SBATCH --requeue
# SIGUSR1 comes {grace} s (up to a minute more) before the time is up. With `B:` it goes to this
# script alone, which passes it to hvdkit, and that to the ranks' main processes. Without, Slurm
# sends it to the processes of all steps, where helpers (data loaders) and mpirun may die of it.
#SBATCH --signal=B:USR1@{grace}

# sbatch passes your environment on. If it is not the one that has hvdkit:
# source /path/to/env/bin/activate

# hvdkit runs in the background because a shell that waits for a command hears no signal until
# that has ended. SIGTERM is what `scancel` and preemption send.
trap 'again=yes; kill -USR1 "$!"' USR1
trap 'again=yes; kill -TERM "$!"' TERM
hvdkit run --stop-grace {grace} {command} &
again=yes
status=127
while [ -n "$again" ]; do
    again=
    wait "$!"
    found=$?
    # It has been waited for already: a signal came at the very end.
    [ "$found" -eq 127 ] || status=$found
done

# {resumable}: saved. The same command goes on from there, if it tells your script to (with --resume
# or the like). A job that was cancelled does not count as running: it stays away.
if [ "$status" -eq {resumable} ] &&
    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    echo "saved; back into the queue (restart $((${{SLURM_RESTART_COUNT:-0}} + 1)))"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
