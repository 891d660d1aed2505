"""The end of a job: one pure function of the job's events.

`outcome` says who is to blame, the exit status, whether to restart, and what the user reads. It has
no state, and nothing else decides. See `events` for the list of events, and `failure` for the rules
of blame among ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from hvdkit.errors import HOSTS_CHANGED, RESUMABLE, HvdkitError
from hvdkit.exit_statuses import signal_of
from hvdkit.faults.names import shortened
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.reachability import best_connected, describe_broken
from hvdkit.launch.control.start_error import BrokenConnection, StartError
from hvdkit.launch.ending.events import Event, JobPlan
from hvdkit.launch.ending.facts import Facts
from hvdkit.launch.ending.failure import Failure, in_order, suspects, tail_of
from hvdkit.launch.ending.failure_report import failure_report
from hvdkit.launch.hosts.hosts import Host
from hvdkit.system.processes import exit_text

# The beginning of the line with the broken connections.
_BROKEN = "Connections that fail now: "
#: The most ranks whose last lines are shown if srun has ended them.
_SHOWN = 3


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        status: the exit status of the job. After a failure: that of the rank that caused it. After
            signal n: 128 + n.
        report: the message for the user; empty after a success.
        failure: the failure that ended the job; None if there is none.
        suspects: the ranks that may have caused it, see `failure.suspects`.
        failed_agents: the names of the hosts whose agents have failed. Not those of lost hosts.
        restartable: whether the job failed by itself; False after a stop on request.
        saved: whether a new checkpoint or a new commit was saved.
        committed: whether the hosts have the newest commit of an elastic job.
        lost: the names of the hosts that could not be reached any more.
        hosts_changed: whether the ranks have ended to be started on other hosts.
        is_verdict: whether the report is a verdict on a stall.
        possible_causes: the possible causes of a failure that only reports a lost peer, with which
            the report begins; empty for others.
        unfailed: the last sentence of these causes if it names ranks that had not failed; otherwise
            not part of them.
        broken: the connections between hosts that failed after the end of the ranks. They were only
            tried if the failure does not show its host.
        interrupted: the stop signal that arrived after the failure, for example while these
            connections were tried; None for none. It forbids a restart, but the failure stays the
            end of this start.
        start_error: the error if the ranks could not be started because of certain hosts; None for
            other ends.
    """

    status: int
    report: str = ""
    failure: Failure | None = None
    restartable: bool = False
    saved: bool = False
    committed: bool = False
    lost: tuple[str, ...] = ()
    hosts_changed: bool = False
    suspects: tuple[int, ...] = ()
    is_verdict: bool = False
    possible_causes: str = ""
    unfailed: str = ""
    broken: tuple[BrokenConnection, ...] = ()
    interrupted: signal.Signals | None = None
    failed_agents: tuple[str, ...] = ()
    start_error: StartError | None = None

    @classmethod
    def not_started(cls, error: HvdkitError) -> Outcome:
        """Return the outcome of a start that failed before its ranks were started."""
        start_error = error if isinstance(error, StartError) else None
        return cls(1, str(error), restartable=True, start_error=start_error)

    def unfit(self, hosts: Sequence[Host], proven: Collection[str]) -> list[Host]:
        """Return those of the hosts because of which the ranks could not be started.

        Args:
            hosts: the hosts of the start.
            proven: the names of the hosts on which ranks of the job have been started.
        """
        if self.start_error is None:
            return []
        names = self.start_error.unfit(proven)
        others = [host for host in hosts if host.name not in names]
        names |= {host.name for host in best_connected(others, self.start_error.broken, proven)[1]}
        found = [host for host in hosts if host.name in names]
        # If no host is fit, the cause is something else, such as the user's arguments.
        return found if len(found) < len(hosts) else []

    def failing_host(self, plan: Plan) -> str | None:
        """Return the host on which the failure began; None if this is not known."""
        names = {plan.places[rank].host.name for rank in self.suspects} or {*self.failed_agents}
        return names.pop() if len(names) == 1 else None

    def shows_host(self, plan: Plan) -> bool:
        """Return whether the end of the job has a cause that belongs to certain hosts."""
        return self.hosts_changed or bool(self.lost) or self.failing_host(plan) is not None

    def with_broken(self, broken: Sequence[BrokenConnection]) -> Outcome:
        """Return the outcome with broken connections, which are part of the report."""
        if not broken:
            return self
        found = f"{_BROKEN}{describe_broken(broken)}."
        # They are the cause if each rank only reports a lost peer. No rank was stopped, or hung.
        causes = self.possible_causes.removesuffix(self.unfailed).rstrip()
        failure = self.report.removeprefix(self.possible_causes).lstrip("\n")
        report = "\n".join([causes, found, failure] if causes else [failure, found])
        return replace(self, report=report, possible_causes=causes, broken=tuple(broken))

    @property
    def network(self) -> str:
        """The broken connections, in one line; empty if there are none."""
        return describe_broken(self.broken) if self.broken else ""

    @property
    def reason(self) -> str:
        """The failure in one line, without the broken connections."""
        if self.failure is None:
            # The first line alone does not name the hosts or the ranks.
            return " ".join(line.strip() for line in self.report.splitlines())
        if self.possible_causes:
            lines = [line for line in self.report.splitlines() if not line.startswith(_BROKEN)]
            return " ".join(lines[:2])
        line = self.report.partition("\n")[0]
        exception = self.failure.exception
        if exception and self.failure.status < 0:
            return f"{line} Earlier, the rank had written a traceback: {exception}"
        return f"{line} {exception}" if exception else line


def outcome(plan: JobPlan, events: Iterable[Event]) -> Outcome:
    """Return the outcome of a job from its events. All ranks have ended, or their agents are lost.

    The first row that is true decides:

    | the job | status | restart |
    |---|---|---|
    | was asked to stop first, and all ranks have saved or succeeded | 75 | no |
    | failed, and mpirun or srun was killed | 1 | yes |
    | has a rank that failed, unless only because of a host that was lost | the rank's | yes |
    | failed by no rank: ranks end because the hosts have changed | 85 | yes |
    | failed by no rank, and some rank has saved of itself | 1, or the signal's | no |
    | succeeded on every rank | 0 | no |
    | was asked to stop by a signal first | 128 + signal | no |
    | has a problem of an agent, a host, the start, or a verdict | 1 | yes |

    After a request to stop that came before the failure, there is no restart in any row.

    Args:
        events: what has happened, in any order.
    """
    facts = Facts(plan, events)
    found = _decided(facts)
    return replace(
        found,
        lost=tuple(facts.lost_hosts),
        failed_agents=(*facts.failed_agents, *found.failed_agents),
        interrupted=facts.stopped_by if found.restartable else None,
        saved=facts.saved,
        committed=facts.committed,
    )


def _decided(facts: Facts) -> Outcome:
    stopped = facts.stops_first and _all_stopped(facts)
    problem = _problem(facts, stopped)
    if stopped:
        # A problem, such as a rank that has stopped late, was earlier.
        report = f"stopped; start the job again to resume it (exit status {RESUMABLE})"
        return Outcome(RESUMABLE, _joined(_remarks(facts), problem, report))
    if (facts.unsuccessful or problem) and facts.stop is None and facts.found.killed:
        # The ranks then end with errors that differ between MPIs, and lose their agents.
        report = f"{facts.found.killed}. This ends all ranks."
        return Outcome(1, report, restartable=not facts.stops_first)
    if facts.failures and not facts.lost_host_explains:
        return _failed(facts, problem)
    if facts.unsuccessful and not facts.failures:
        return _orderly(facts, problem)
    # A rank has no status if its agent was lost while the launcher ended the ranks.
    if not (problem or facts.running or any(facts.statuses.values())):
        done = "all ranks have ended with 0: the script is complete (exit status 0)"
        return Outcome(0, done if facts.stop is not None else "")
    # After a stop signal, the signal is the outcome, also if the launcher had to kill ranks.
    if facts.stopped_by is not None and not facts.failed_first:
        return _ended_by(facts.stopped_by, facts, problem)
    report = _joined(_remarks(facts), problem)
    return Outcome(1, report, restartable=True, is_verdict=facts.is_verdict)


def _all_stopped(facts: Facts) -> bool:
    """Return whether ranks have ended with RESUMABLE, and all others with it or with 0.

    Also true if a rank has ended in this way because the launcher has ended it.
    """
    ends = {facts.statuses.get(rank) for rank in range(facts.plan.size)}
    return RESUMABLE in ends and ends <= {0, *facts.plan.orderly}


def _problem(facts: Facts, stopped: bool) -> str:
    """Return the problems that are not the end of a rank; empty for none."""
    problem = facts.first_problem
    if (by := facts.found.aborted_by) and not facts.lost_hosts and facts.lost_agent:
        # Only the agents have ended, not their hosts.
        problem = "" if stopped or facts.failures else _explain_abort(facts, by)
    return _joined(problem, *facts.later_problems)


def _explain_abort(facts: Facts, by: str) -> str:
    """Return the report if srun has ended all ranks, and none has reported its end."""
    text = (
        f"{by} has ended all ranks of the job step: see its messages above. Over MPI, Slurm "
        f"does this if a rank ends before MPI_Finalize. For example, a rank was killed because "
        f"its memory was full (`dmesg`, `sacct`)."
    )
    raised = sorted(facts.raised)[:_SHOWN]
    return "\n".join([text, *(tail_of(r, facts.raised[r].report.traceback) for r in raised)])


def _remarks(facts: Facts) -> str:
    """Sentences that may explain the end of the job, but are no failures; empty for none."""
    crashes = [
        f"{facts.plan.describe(ranks)} had reached the end of the script, and "
        f"{'were' if len(ranks) > 1 else 'was'} then {exit_text(-number)}. Check the script's "
        f"functions of `atexit`, and the libraries that it uses"
        for number, ranks in facts.crashes.items()
    ]
    return _joined(_describe_agent_signals(facts), *crashes)


def _describe_agent_signals(facts: Facts) -> str:
    """Return which agents got stop signals; empty for none."""
    # A batch system may send a signal to all processes of the job.
    if not facts.agent_signals or facts.stop is not None:
        return ""
    hosts = [host for host in dict.fromkeys(facts.plan.hosts) if host in facts.agent_signals]
    signals = " or ".join(sorted({number.name for number in facts.agent_signals.values()}))
    return f"the agent{'s' if len(hosts) > 1 else ''} on {shortened(hosts)} got {signals}"


def _orderly(facts: Facts, problem: str) -> Outcome:
    """Return the outcome if some ranks have made an orderly stop, and none has failed."""
    changed = any(each.status == HOSTS_CHANGED for each in facts.unsuccessful)
    if changed and not facts.rank_stopped:
        report = _joined(_remarks(facts), problem)
        return Outcome(HOSTS_CHANGED, report, restartable=True, hosts_changed=True)
    if facts.stopped_by is not None and not facts.failed_first:
        return _ended_by(facts.stopped_by, facts, problem)
    report = _joined(_remarks(facts), _partial_stop(facts), problem)
    restartable = not facts.stops_first
    return Outcome(1, report, restartable=restartable, is_verdict=facts.is_verdict)


def _failed(facts: Facts, problem: str) -> Outcome:
    """Return the outcome if ranks have failed."""
    ordered = in_order(facts.failures)
    cause, restartable = ordered[0], not facts.stops_first
    code = 128 - cause.status if cause.status < 0 else cause.status
    if facts.stopped_by is not None and -cause.status in facts.fatal:
        return _ended_by(facts.stopped_by, facts, problem)
    if cause.status == -signal.SIGTERM and facts.lost_agent:
        # If an agent of mpirun ends, mpirun sends SIGTERM to the other ranks.
        ended = [rank for rank, status in facts.statuses.items() if status == -signal.SIGTERM]
        sigterm = f"SIGTERM then ended {facts.plan.describe(ended)}."
        return Outcome(1, _joined(_remarks(facts), problem, sigterm), restartable=restartable)
    if cause.exception is None and cause.rank in (ended := _ended_by_agents(facts)):
        report = _joined(_remarks(facts), f"SIGTERM then ended {facts.plan.describe(ended)}.")
        agents = tuple(facts.agent_signals)
        return Outcome(code, report, restartable=restartable, failed_agents=agents)
    unfailed = _not_failed(facts, problem)
    remarks = [*facts.found.silent, *filter(None, [unfailed])]
    causes, report = failure_report(facts, remarks)
    report = _joined(causes, report, facts.found.mismatch, _remarks(facts), problem)
    return Outcome(
        code,
        report,
        cause,
        restartable=restartable,
        suspects=tuple(suspects(ordered)),
        possible_causes=causes,
        unfailed=unfailed,
    )


def _ended_by_agents(facts: Facts) -> list[int]:
    """Return the ranks that have ended with SIGTERM because their agents got a stop signal."""
    if facts.stop is not None:
        return []
    return [
        rank
        for rank, status in facts.statuses.items()
        if signal_of(status) == signal.SIGTERM and facts.plan.hosts[rank] in facts.agent_signals
    ]


def _not_failed(facts: Facts, problem: str) -> str:
    """Return a sentence about the ranks that the launcher ended because of a failure.

    Empty if the failure has another possible cause.
    """
    others_ended = any(status in (0, *facts.plan.orderly) for status in facts.statuses.values())
    if not facts.ended_by_launcher or problem or others_ended or facts.stop is not None:
        return ""
    ranks = facts.plan.describe(facts.ended_by_launcher)
    return f"R{ranks[1:]} had not failed: check whether a process was stopped, or hung."


def _ended_by(number: signal.Signals, facts: Facts, problem: str) -> Outcome:
    """Return the outcome of a stop signal. Its forwarded signal may be another one."""
    # After SIGPIPE, other programs end with this status and without a message.
    report = "" if number == signal.SIGPIPE else f"ended by {number.name}"
    if report and (partial := _partial_stop(facts)):
        report = f"{report}; {partial}"
    return Outcome(128 + number, _joined(report, _remarks(facts), problem))


def _partial_stop(facts: Facts) -> str:
    """Return which ranks have made an orderly stop, if not all have; empty if none has."""
    stopped = [rank for rank, status in facts.statuses.items() if status == RESUMABLE]
    if not stopped:
        return ""
    ranks = facts.plan.describe(stopped)
    return f"only {ranks} made an orderly stop (exit status {RESUMABLE})"


def _joined(*texts: str) -> str:
    """Return the texts that are not empty, each on its own line."""
    return "\n".join(filter(None, texts))
