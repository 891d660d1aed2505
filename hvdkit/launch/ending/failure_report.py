"""Write the report on the ranks that have failed."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from hvdkit.errors import RESUMABLE
from hvdkit.launch.ending.facts import Facts
from hvdkit.launch.ending.failure import Failure, Kind, in_order, suspects

#: The most failures whose last lines are shown. Failures with the same error are shown once.
_SHOWN = 3


def failure_report(facts: Facts, remarks: Sequence[str]) -> tuple[str, str]:
    """Return the possible causes of failures, and the report for the user that follows them.

    The causes are empty unless every failure is only a consequence of another rank's end.

    Args:
        facts: the facts of a job in which ranks have failed.
        remarks: sentences about hosts that did not answer, and ranks that have not failed.
    """
    found = facts.found
    first, *others = in_order(facts.failures)
    if found.aborted_by:
        others = [failure for failure in others if failure.status != -signal.SIGKILL]
    ended = 0 if found.aborted_by else len(facts.ended_by_launcher)
    finished = sorted(rank for rank, status in facts.statuses.items() if status == 0)
    stopped = sorted(each.rank for each in facts.unsuccessful if each.status == RESUMABLE)
    alike = suspects([first, *others])
    # The first one to end is no more the cause than the others.
    all_alike = len(alike) == len(facts.unsuccessful) > 1 and not ended and not finished
    lines = [_first_line(facts, first, others, ended, all_alike)]
    causes = _causes(facts, first, finished, stopped, remarks)
    if causes:
        # The causes come first: the rank that failed is not at fault.
        lines = [f"Then {lines[0]}"]
    if first.by_mpi:
        lines.append(
            "If mpirun or srun gets a signal, or loses its daemon on a host, it ends all ranks."
        )
    lines.append(first.lines())
    shown = {first.error_text}
    similar = [f for f in others if f.kind is first.kind or not _is_consequence(f, first)]
    for failure in similar:
        if failure.error_text not in shown and len(shown) < _SHOWN:
            shown.add(failure.error_text)
            rank = _capitalized(facts.plan.describe([failure.rank]))
            lines += [f"{rank} failed, too: {failure.end}.", failure.lines()]
    same = sum(failure.error_text == first.error_text for failure in similar)
    if same and not all_alike:
        lines.append(f"{same} more rank{'s' if same > 1 else ''} failed like rank {first.rank}.")
    return causes, "\n".join(lines)


def _is_consequence(failure: Failure, first: Failure) -> bool:
    """Return whether the first failure explains another one."""
    by_mpi = failure.kind is Kind.TERMINATED and first.is_before(Kind.TERMINATED)
    return by_mpi or failure.is_consequence


def _first_line(
    facts: Facts, first: Failure, others: Sequence[Failure], ended: int, all_alike: bool
) -> str:
    if all_alike:
        parts = [f"all ranks failed with the same error: {first.end}"]
    else:
        parts = [f"{facts.plan.describe([first.rank])} failed: {first.end}"]
    after = [each for each in others if each.is_consequence and not first.is_consequence]
    if after:
        parts.append(f"{_count(len(after))} failed after it, because the connection was lost")
    line = "; ".join(parts) + "."
    if ended:
        line += f" The launcher ended {_others(ended)}."
    by_mpi = sum(each.kind is Kind.TERMINATED for each in others)
    if by_mpi and first.is_before(Kind.TERMINATED):
        line += f" MPI ended {_others(by_mpi)}."
    if facts.found.aborted_by:
        line += f" {facts.found.aborted_by} then ended all other ranks."
    return line


def _causes(
    facts: Facts,
    first: Failure,
    finished: Sequence[int],
    stopped: Sequence[int],
    remarks: Sequence[str],
) -> str:
    """Return the possible causes if every failure is a consequence; "" for others."""
    before, departed = facts.found.verdict, facts.departed
    # Without a stall or such ranks, the script has used a process set that it had not added.
    is_own = first.kind is Kind.REFUSED and not (before or departed or finished or stopped)
    if not first.is_consequence or is_own:
        return ""
    if departed:
        return _shut_down(departed)
    if before and not finished and not stopped:
        return before.replace("\n", " ")
    reports = {r: facts.reports[r].report for r in finished if r in facts.reports}
    raised = {rank: each.error for rank, each in reports.items() if each.kind == Kind.OWN.reported}
    return _without_cause(facts, finished, raised, stopped, remarks, first.awaited)


def _shut_down(departed: Sequence[str]) -> str:
    """Return what ranks have shut Horovod down."""
    more = len(departed) - _SHOWN
    return " ".join(
        [
            *departed[:_SHOWN],
            *([f"{more} more called it."] if more > 0 else []),
            "This shuts Horovod down on all ranks: call it only after the last collective of every "
            "rank.",
        ]
    )


def _without_cause(
    facts: Facts,
    finished: Sequence[int],
    raised: Mapping[int, str],
    stopped: Sequence[int],
    remarks: Sequence[str],
    awaited: str,
) -> str:
    """Return the possible causes where every failure is a consequence."""

    def named(ranks: list[int]) -> str:
        return _capitalized(facts.plan.describe(ranks))

    text = "Each rank that failed reported only that another rank had ended or did not answer."
    for rank, error in raised.items():
        text += (
            f" {named([rank])} had written a traceback, and had ended with exit status 0: "
            f"{error}. After an error, end the script with another exit status."
        )
    if finished and not raised:
        text += f" {named(list(finished))} had ended without an error"
        text += f", and the failed ranks waited for {awaited}" if awaited else ""
        text += ": check whether all ranks had the same number of batches"
        text += ", and have called hvd.join()." if awaited.startswith("join()") else "."
    if stopped:
        text += f" {named(list(stopped))} had made an orderly stop (exit status {RESUMABLE})."
    return " ".join([text, *remarks])


def _capitalized(text: str) -> str:
    """Return a text with which a sentence can begin."""
    return text[0].upper() + text[1:]


def _others(number: int) -> str:
    return f"{number} other rank{'' if number == 1 else 's'}"


def _count(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
