"""Run the ranks of one start with their output, and tell the user how they ended."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.launch import open_files, output_folder
from hvdkit.launch.job import Outcome
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Plan
from hvdkit.launch.starts import Start

#: Starts the ranks, and returns the outcome. The arguments are those of `Launcher.run`.
RunRanks = Callable[[Output, Callable[[str], None]], Outcome]


def run_job(plan: Plan, options: argparse.Namespace, run_ranks: RunRanks) -> Outcome:
    """Run the ranks, show their output and the outcome, and return the outcome."""
    _raise_file_limit(plan)
    shown = range(plan.size) if options.all_output else None
    folder = None if options.output_dir is None else output_folder.make(options.output_dir)
    if folder is None:
        return _run_shown(plan, options, shown, None, run_ranks)
    start = Start.of(plan)
    output_folder.write_start(folder, start, say)
    try:
        outcome = _run_shown(plan, options, shown, folder, run_ranks)
    except HvdkitError as error:
        output_folder.write_start(folder, start.end(Outcome(1, str(error), restartable=True)), say)
        raise
    output_folder.write_start(folder, start.end(outcome), say)
    if (failure := outcome.failure) is not None:
        causes, suspects = outcome.possible_causes, outcome.suspects
        output_folder.write_error(folder, failure, causes, suspects, plan, say)
    return outcome


def _run_shown(
    plan: Plan,
    options: argparse.Namespace,
    shown: Sequence[int] | None,
    folder: Path | None,
    run_ranks: RunRanks,
) -> Outcome:
    """Run the ranks, and show their output and the outcome."""
    with Output(plan.size, shown, folder, say=say, progress=options.debug_rank is None) as output:
        outcome = run_ranks(output, say)
    if outcome.report:
        say(outcome.report)
    return outcome


def say(text: str) -> None:
    """Print a message of `hvdkit run`."""
    # Do not use sys.stderr, because a signal handler may call this during another write. Ignore
    # errors, because a closed terminal must not prevent the ranks from saving.
    with contextlib.suppress(OSError):
        os.write(2, f"hvdkit run: {text}\n".encode(errors="surrogateescape"))


def _raise_file_limit(plan: Plan) -> None:
    """Raise the limit on open files to the needs of the job, or warn."""
    needed = open_files.needed_by_launcher(plan.size, len(plan.hosts))
    if (limit := open_files.raise_limit(needed)) < needed:
        say(
            f"this process may open {limit:,} files, but may need {needed:,} for a job of "
            f"{plan.size} ranks; if the job fails, raise the limit (`ulimit -Hn`)"
        )
