"""Run the ranks of one start with their output, and tell the user how they ended."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults.start_folders import Start
from hvdkit.launch.agent import open_files
from hvdkit.launch.control import output_folder, readers
from hvdkit.launch.control.output import Output
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.launchers.launcher import Launcher
from hvdkit.system.signals import status_before_start


class Runner:
    """Runs the starts of one job.

    The first start fails if the folder for its output cannot be made. Later starts continue
    without it, because a full disk must not end a job that can resume.
    """

    def __init__(self, options: argparse.Namespace, launcher: Launcher) -> None:
        self._options = options
        self._launcher = launcher
        self._is_restart = False

    def run(self, plan: Plan, elastic: Callable[[Host], Mapping[str, str]] | None) -> Outcome:
        """Run the ranks, and show their output and the outcome. Return the outcome.

        The start and its end are written to the output folder. The outcome is shown and written
        before the agents are closed, which may take many seconds.

        Args:
            elastic: as for `Launcher.run`.

        Raises:
            HvdkitError: the ranks could not be started, or the first start has no folder.
            KeyboardInterrupt: a stop signal arrived before any rank was started.
        """
        _raise_file_limit(plan)
        output = self._output(plan)
        start = output_folder.describe_start(plan)
        _write(start, output.directory)
        found = None
        try:
            with output, self._launcher.run(plan, output, elastic) as found:
                output.close()
                if found.report:
                    readers.say(found.report)
                ended = output_folder.describe_end(start, found)
                _write(ended, output.directory)
                if output.directory and (found.failure is not None or ended.failed):
                    output_folder.write_error(output.directory, found, plan)
        except (HvdkitError, KeyboardInterrupt) as error:
            if found is None:
                _write(output_folder.describe_end(start, _without_job(error)), output.directory)
            raise
        return found

    def _output(self, plan: Plan) -> Output:
        """Return the output of one start, with a new folder if `--output-dir` is given."""
        is_restart, self._is_restart = self._is_restart, True
        shown = range(plan.size) if self._options.all_output else None
        make = partial(
            self._options.make_output or Output,
            plan.size,
            shown,
            progress=self._options.debug_rank is None,
        )
        if (parent := self._options.output_dir) is None:
            return make()
        try:
            return make(output_folder.make(parent))
        except UsageError as error:
            if not is_restart:
                raise
            readers.say(f"{error}. The output of this start is not kept")
            return make()


def _without_job(error: HvdkitError | KeyboardInterrupt) -> Outcome:
    """Return the outcome if the ranks could not be started, or a signal came before that."""
    if isinstance(error, HvdkitError) or not error.args:
        return Outcome(1, str(error), restartable=True)
    number = signal.Signals(error.args[0])
    return Outcome(status_before_start(number), f"ended by {number.name}")


def _write(start: Start, folder: Path | None) -> None:
    """Write the description of a start, if it has a folder."""
    if folder is not None:
        output_folder.write_start(folder, start)


def _raise_file_limit(plan: Plan) -> None:
    """Raise the limit on open files to the needs of the job, or warn."""
    needed = open_files.needed_by_launcher(plan.size, len(plan.hosts))
    if (limit := open_files.raise_limit(needed)) < needed:
        readers.say(
            f"this process can open {limit:,} files, but a job of {plan.size} ranks may need "
            f"{needed:,}; if the job fails, raise the limit (`ulimit -Hn`)"
        )
