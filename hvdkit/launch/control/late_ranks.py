"""Explain to the user that ranks did not start, or did not stop, within their time."""

from __future__ import annotations

from collections.abc import Collection

from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.start_watch import LateStart
from hvdkit.launch.ending.facts import Facts


def explain_late_stop(plan: Plan, facts: Facts, seconds: float) -> str:
    """Return why the launcher ends the ranks that run after the time for an orderly stop.

    Args:
        seconds: the time for an orderly stop.
    """
    ended = [rank for rank in facts.running if rank in facts.scripts]
    late = [rank for rank in facts.running if rank not in facts.scripts]
    within = f"within {seconds:g} s (--stop-grace)"
    causes = []
    if late:
        causes.append(
            f"{plan.describe(late)} did not stop {within}. Give a longer time if saving needs it"
        )
    if ended:
        one = len(ended) == 1
        process, it = ("its process", "it") if one else ("their processes", "them")
        causes.append(
            f"{plan.describe(ended)} had reached the end of the script, but {process} "
            f"did not end {within}, so the launcher ended {it}. Python waits for threads that "
            f"are not daemons, and for processes of multiprocessing. End these before the "
            f"script ends, or start them with daemon=True"
        )
    return "\n".join(causes)


def explain_late_start(
    plan: Plan, facts: Facts, late: LateStart, all_stopped: Collection[int], seconds: float
) -> tuple[str, int]:
    """Return why the launcher ends a job whose ranks are late in `hvd.init()`, and a late rank.

    Args:
        all_stopped: the ranks that are stopped (SIGSTOP).
        seconds: the time for the start.
    """
    statuses = facts.statuses
    ended = [rank for rank in late.ranks if rank in statuses]
    silent = [rank for rank in late.ranks if rank not in statuses]
    within = f"within {seconds:g} s"
    if late.registered:
        parts = []
        if silent:
            parts.append(f"MPI did not connect {plan.describe(silent)}")
        if ended:
            parts.append(f"{plan.describe(ended)} ended in hvd.init()")
        text = (
            f"all ranks have called hvd.init(), but {' and '.join(parts)} {within} "
            f"(--start-timeout)."
        )
        advice = "Check the network of the hosts (`hvdkit doctor --hosts`)."
    else:
        parts = []
        if silent:
            parts.append(f"{plan.describe(silent)} did not register")
        if ended:
            parts.append(f"{plan.describe(ended)} ended without registering")
        text = f"{' and '.join(parts)} {within} of the first rank (--start-timeout)."
        advice = "Ranks register in hvd.init(): check that the script calls it on every rank."
    stopped = [rank for rank in facts.running if rank in all_stopped]
    if stopped:
        named, verb = plan.describe(stopped), "are" if len(stopped) > 1 else "is"
        advice = f"R{named[1:]} {verb} stopped (SIGSTOP). SIGCONT continues a process."
    return f"{text} {advice}", (stopped or late.ranks)[0]
