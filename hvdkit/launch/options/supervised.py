"""The options of `hvdkit run --restarts`, and the job that is run with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from hvdkit.errors import UsageError
from hvdkit.launch.control import readers
from hvdkit.launch.control.plan import Plan, make_plan
from hvdkit.launch.control.restarting import RestartedJob
from hvdkit.launch.control.running import Runner
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host, total_slots
from hvdkit.launch.launchers.launcher import Launcher

# Time for hosts to answer before a restart.
_PROBE_SECONDS = 15.0


def check(options: argparse.Namespace, in_allocation: bool) -> None:
    """Check the options for restarts.

    Raises:
        UsageError: --min-np is out of range, or was given in a Slurm allocation.
    """
    if options.min_np is not None:
        if options.min_np < 1 or options.min_np > (options.num_proc or options.min_np):
            most = "-np" if options.num_proc is None else f"{options.num_proc} (-np)"
            raise UsageError(
                f"--min-np is {options.min_np}: expected at least 1, and at most {most}"
            )
        if in_allocation:
            raise UsageError(
                "--min-np was given in a Slurm allocation, whose nodes stay the same. Use "
                "`sbatch --requeue`, or remove --min-np"
            )


def run(
    plan: Plan,
    options: argparse.Namespace,
    launcher: Launcher,
    hosts: Callable[[], Sequence[Host]] | None,
) -> Outcome:
    """Run a job with its restarts, and return the last outcome.

    Args:
        plan: the plan of the first start.
        hosts: returns the hosts that the user names for the next start; None if none are named.
    """

    def answering(given: Sequence[Host]) -> Sequence[Host]:
        probe = make_plan(plan.command, plan.directory, given, total_slots(given))
        problems = launcher.problems(probe, _PROBE_SECONDS)
        for host, problem in problems.items():
            readers.say(f"left out: {host.name}: {problem}")
        left_out = {host.name for host in problems}
        return [host for host in given if host.name not in left_out]

    return RestartedJob(
        start=Runner(options, launcher).run,
        make_plan=lambda given, size: make_plan(plan.command, plan.directory, given, size),
        hosts=(lambda: launcher.next_hosts(plan)) if hosts is None else hosts,
        hosts_return=launcher.hosts_return,
        requeue=launcher.in_allocation,
        answering=answering,
        first=plan,
        min_size=options.min_np or plan.size,
        restarts=options.restarts,
    ).run()
