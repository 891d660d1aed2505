"""The options of `hvdkit run --restarts`, and the job that is run with them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from hvdkit.errors import UsageError
from hvdkit.launch.hosts import Host, total_slots
from hvdkit.launch.kept_agents import KeptAgents
from hvdkit.launch.launcher import Settings
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import Plan, make_plan
from hvdkit.launch.restarting import Supervisor
from hvdkit.launch.running import say

# Time for hosts to answer before a restart.
_PROBE_SECONDS = 15.0
#: The smallest --host-timeout, in seconds. A busy host may need almost as long for an answer.
_LEAST_TIMEOUT = 2.0


def check(options: argparse.Namespace, in_slurm: bool) -> None:
    """Check the options for restarts.

    Raises:
        UsageError: a number is out of range, or --min-np was given in a Slurm allocation.
    """
    if options.restarts < 0:
        raise UsageError(f"--restarts is {options.restarts}: expected at least 0")
    check_host_timeout(options)
    if options.min_np is not None:
        if options.min_np < 1 or options.min_np > (options.num_proc or options.min_np):
            most = "-np" if options.num_proc is None else f"{options.num_proc} (-np)"
            raise UsageError(
                f"--min-np is {options.min_np}: expected at least 1, and at most {most}"
            )
        if in_slurm:
            raise UsageError(
                "--min-np was given in a Slurm allocation, whose nodes stay the same. Use "
                "`sbatch --requeue`, or remove --min-np"
            )


def check_host_timeout(options: argparse.Namespace) -> None:
    """Raise UsageError if --host-timeout is too short for the answer of a busy host."""
    if options.host_timeout < _LEAST_TIMEOUT:
        raise UsageError(
            f"--host-timeout is {options.host_timeout:g}: expected at least {_LEAST_TIMEOUT:g} "
            f"seconds"
        )


def run(
    plan: Plan,
    options: argparse.Namespace,
    settings: Settings,
    kept: KeptAgents,
    start: Callable[[Plan], Outcome],
    hosts: Callable[[], Sequence[Host]] | None = None,
    in_slurm: bool = False,
) -> Outcome:
    """Run a job with restarts, and return the last outcome.

    Args:
        plan: the plan of the first start.
        options: the user's options.
        settings: how the ranks are started.
        kept: the agents.
        start: starts the ranks of a plan, and returns the outcome.
        hosts: returns the hosts of the next start; None for nodes that users have started, which
            cannot join again.
        in_slurm: whether the job runs in a Slurm allocation.
    """

    def answering(given: Sequence[Host]) -> Sequence[Host]:
        probe = make_plan(plan.command, plan.directory, given, total_slots(given))
        problems = kept.problems(probe, settings, _PROBE_SECONDS)
        for host, problem in problems.items():
            say(f"left out: {host.name}: {problem}")
        left_out = {host.name for host in problems}
        return [host for host in given if host.name not in left_out]

    supervisor = Supervisor(
        start=start,
        make_plan=lambda given, size: make_plan(plan.command, plan.directory, given, size),
        hosts=kept.connected if hosts is None else hosts,
        hosts_return=hosts is not None,
        requeue=in_slurm,
        answering=answering,
        size=plan.size,
        min_size=options.min_np or plan.size,
        restarts=options.restarts,
        say=say,
    )
    return supervisor.run(plan)
