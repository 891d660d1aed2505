"""The sbatch script of `hvdkit generate slurm`, from `templates/slurm.sh`."""

from __future__ import annotations

import argparse
import operator
import re
import shlex

from hvdkit.console.flags import add_options, check_least, flag
from hvdkit.errors import RESUMABLE, UsageError
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.generate.options import RESTARTS, fill, restarts, script_name

HELP = "write a commented sbatch script for a job that resumes after preemption or its time limit"
EXAMPLE = """\
  hvdkit generate slurm --nodes 2 --gpus-per-node 4 --time 8:00:00 -o job.sh python train.py
  sbatch job.sh"""
COMMAND = "slurm --nodes 2"

_OPTIONS = f"""
--nodes N              (default: 1)
--tasks-per-node N     ranks on each node (default: one per GPU, else 1)
--cpus-per-task N      cores of each rank
--gpus-per-node N      (default: none)
--time T               the time limit in sbatch's format (default: 24:00:00)
--partition NAME       (default: the cluster's)
--account NAME         (default: yours)
--job-name NAME        (default: the script's)
{RESTARTS}
--grace N              seconds for saving before the time limit (default: %(default)s)
"""

# minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on.
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")
_WORD = re.compile(r"[\w.,@%+-]+")
# Slurm may send the signal before the time limit so many seconds early.
_EARLY_SECONDS = 60


def add_arguments(action: argparse.ArgumentParser) -> None:
    """Add the arguments of `hvdkit generate slurm`."""
    add_options(action, _OPTIONS, nodes=1, time="24:00:00", grace=round(Timeouts.stop))


def text(options: argparse.Namespace) -> str:
    """Return the script.

    Raises:
        UsageError: a number or a name is not valid.
    """
    _check(options)
    values = {
        "name": options.job_name or re.sub(r"[^\w.-]", "_", script_name(options.command)),
        "partition": options.partition and f"#SBATCH --partition={options.partition}",
        "account": options.account and f"#SBATCH --account={options.account}",
        "nodes": options.nodes,
        "tasks": options.tasks_per_node or options.gpus_per_node or 1,
        # Slurm ignores a line that begins with ##SBATCH.
        "cpus": f"#SBATCH --cpus-per-task={options.cpus_per_task}"
        if options.cpus_per_task
        else "##SBATCH --cpus-per-task=8",
        "gpus": f"#SBATCH --gpus-per-node={options.gpus_per_node}"
        if options.gpus_per_node
        else "##SBATCH --gpus-per-node=4",
        "time": options.time,
        "grace": options.grace,
        "command": shlex.join([*restarts(options), *options.command]),
        "resumable": RESUMABLE,
    }
    return fill("slurm.sh", values)


def _check(options: argparse.Namespace) -> None:
    numbers = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "grace")
    check_least(options, dict.fromkeys(numbers, 1) | {"restarts": 0})
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
