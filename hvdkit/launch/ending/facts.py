"""The facts that follow from the events of a job: which ranks have failed, and what came first.

No fact depends on the order in which the events have arrived.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from hvdkit.errors import RESUMABLE
from hvdkit.exit_statuses import signal_of
from hvdkit.launch.agent.hook._hvdkit_self_report import LOST_PEER
from hvdkit.launch.ending import events as e
from hvdkit.launch.ending.events import Event, JobPlan
from hvdkit.launch.ending.failure import Failure, Kind
from hvdkit.launch.ending.rank_ends import ENDING_SIGNALS, RankEnd, orderly_scripts, rank_ends

_E = TypeVar("_E")
_NEVER = float("inf")


class Facts:
    """The facts of a job.

    Args:
        events: its events, in any order.
    """

    def __init__(self, plan: JobPlan, events: Iterable[Event]) -> None:
        self.plan = plan
        self._by_kind: dict[type, list[Any]] = {}
        for event in sorted(events, key=_order):
            self._by_kind.setdefault(type(event), []).append(event)

    def _all(self, kind: type[_E]) -> list[_E]:
        return self._by_kind.get(kind, [])

    def _first(self, kind: type[_E]) -> _E | None:
        return next(iter(self._all(kind)), None)

    # What the launcher did

    @cached_property
    def end_began(self) -> float:
        """When the launcher has begun to end the ranks; infinite if it has not."""
        first = self._first(e.EndBegan)
        return _NEVER if first is None else first.at

    @cached_property
    def killed_at(self) -> float:
        """When the ranks that are ended get SIGKILL; infinite if the launcher ends none."""
        return min((each.at + each.grace for each in self._all(e.EndBegan)), default=_NEVER)

    @property
    def saved(self) -> bool:
        """Whether a new checkpoint or a new commit was saved."""
        return bool(self._all(e.Saved))

    @property
    def committed(self) -> bool:
        """Whether the hosts have the newest commit of an elastic job."""
        return bool(self._all(e.Committed))

    @cached_property
    def stop(self) -> e.StopAsked | None:
        """The first stop signal that the launcher got; None for none."""
        return self._first(e.StopAsked)

    @cached_property
    def stopped_by(self) -> signal.Signals | None:
        """The first stop signal."""
        return None if self.stop is None else signal.Signals(self.stop.number)

    @cached_property
    def interrupted_at(self) -> float:
        """When the launcher got its first SIGINT; infinite for never."""
        times = (each.at for each in self._all(e.StopAsked) if each.number == signal.SIGINT)
        return min(times, default=_NEVER)

    @cached_property
    def resumed(self) -> e.Resumed | None:
        """The last pause of the launcher; None for none."""
        return next(reversed(self._all(e.Resumed)), None)

    @cached_property
    def found(self) -> e.Found:
        """The results of the examination after the end of all ranks."""
        return self._first(e.Found) or e.Found(_NEVER)

    # The ends of ranks

    @cached_property
    def scripts(self) -> Mapping[int, e.Reported]:
        """Rank -> the first report of the orderly end of its script. The process may still run."""
        return orderly_scripts(self._all(e.Reported), self.plan.orderly)

    @cached_property
    def ends(self) -> Mapping[int, RankEnd]:
        """Rank -> its end. If its agent was lost, its output may be incomplete."""
        ends, exits, lost = self._all(e.Ended), self._all(e.Exited), self._all(e.AgentLost)
        return rank_ends(ends, exits, lost, self.scripts)

    @cached_property
    def statuses(self) -> Mapping[int, int]:
        """Rank -> the status that counts, of ranks that have ended."""
        return {rank: end.status for rank, end in sorted(self.ends.items())}

    @cached_property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self.plan.size) if rank not in self.ends]

    @cached_property
    def reports(self) -> Mapping[int, e.Reported]:
        """Rank -> its last report."""
        return {each.rank: each for each in self._all(e.Reported)}

    @cached_property
    def raised(self) -> Mapping[int, e.Reported]:
        """Rank -> its report of an exception that it did not handle."""
        return {rank: each for rank, each in self.reports.items() if each.report.how == "exception"}

    @cached_property
    def failed_collectives(self) -> Mapping[int, e.CollectiveFailed]:
        """Rank -> its last collective, if that has failed."""
        return {each.rank: each for each in self._all(e.CollectiveFailed)}

    def _failure(self, end: RankEnd, by_launcher: bool = False) -> Failure:
        rank, report = end.rank, self.reports.get(end.rank)
        collective = self.failed_collectives.get(rank)
        raised = report is not None and report.report.how == "exception"
        # Python's status after an exception.
        status = 1 if by_launcher else end.status
        return Failure(
            rank=rank,
            status=status,
            ended=end.at,
            began=report.at if report is not None and raised else end.at,
            tail=end.tail,
            report=None if report is None else report.report,
            hint=end.hint,
            stack=end.stack,
            engine_error="" if collective is None else collective.error,
            awaited="" if collective is None else collective.name,
            by_controller=status in self.plan.ends_others_with,
            by_launcher=by_launcher,
            lost_first=report is not None and self._lost_before(report),
        )

    def _lost_before(self, report: e.Reported) -> bool:
        """Return whether a rank had lost another one before it has written its report.

        Not if it has shut Horovod down itself, which ends its own collectives with an error.
        """
        lost = self.failed_collectives.get(report.rank)
        if lost is None or not any(words in lost.error for words in LOST_PEER):
            return False
        return lost.at < report.at and not self._shut_down.get(report.rank)

    @cached_property
    def _own_ends(self) -> list[Failure]:
        """The ends other than successes that the launcher did not cause, also orderly ones."""
        found = []
        for end in self.ends.values():
            report = self.raised.get(end.rank)
            raised_at = _NEVER if report is None else report.at
            by_launcher = end.at > self.end_began
            if end.script is not None:
                found.append(self._failure(end))
            elif (by_launcher and raised_at < self.end_began) or (
                self.stop is not None
                and raised_at < self.stop.at < end.at
                and signal_of(end.status) in ENDING_SIGNALS
            ):
                found.append(self._failure(end, by_launcher=True))
            elif not by_launcher and end.status != 0:
                found.append(self._failure(end))
        orderly = (0, *self.plan.orderly)
        if self.found.aborted_by and all(each.status in orderly for each in found):
            # srun has ended the agents, maybe before they could send the output of the ranks.
            exits = [each for each in self._all(e.Exited) if each.status not in orderly]
            found += [self._failure(RankEnd(x.rank, x.status, x.at)) for x in exits[:1]]
        return found

    @cached_property
    def failed_first(self) -> bool:
        """Whether the job had failed before the first stop signal."""
        if self.stop is None:
            return False
        failed = (
            each.began if each.by_launcher else each.ended
            for each in self._own_ends
            if each.status not in self.plan.orderly
        )
        return any(at < self.stop.at for at in (*failed, self.problem_at))

    @cached_property
    def failures(self) -> list[Failure]:
        """The ranks that have failed."""
        return [each for each in self.unsuccessful if each.status not in self.plan.orderly]

    @cached_property
    def unsuccessful(self) -> list[Failure]:
        """The ranks that have failed, or have made an orderly stop."""
        # After a failure, a rank that a stop signal has ended is not the cause.
        return [
            each
            for each in self._own_ends
            if not (
                self.failed_first
                and -each.status in self.fatal
                and self.stop is not None
                and each.ended > self.stop.at
            )
        ]

    @cached_property
    def failed_at(self) -> float:
        """When the first rank has failed, or the first problem has occurred; infinite for never."""
        return min([self.problem_at, *(each.ended for each in self.failures)])

    @cached_property
    def fatal(self) -> tuple[int, ...]:
        """The signals that end a rank because of a stop signal; empty without one."""
        return () if self.stopped_by is None else (self.stopped_by, signal.SIGTERM)

    @cached_property
    def stops_first(self) -> bool:
        """Whether the user or the script has asked to stop before any failure: no restart."""
        by_signal = self.stop is not None and not self.failed_first
        return by_signal or self.rank_stopped

    @cached_property
    def rank_stopped(self) -> bool:
        """Whether a rank has made an orderly stop before any failure: the script wanted it."""
        first = min(self.failed_at, self.end_began)
        return any(
            (end.at if end.script is None else end.script.at) < first
            for end in self.ends.values()
            if end.status == RESUMABLE
        )

    @cached_property
    def ended_by_launcher(self) -> list[int]:
        """The ranks that the launcher has ended, and that had not failed."""
        if self.end_began == _NEVER:
            return []
        own = {each.rank for each in self._own_ends}
        return [
            rank
            for rank in range(self.plan.size)
            if rank not in own and (rank not in self.ends or self.ends[rank].at > self.end_began)
        ]

    @cached_property
    def crashes(self) -> Mapping[int, list[int]]:
        """The signal of a crash -> the ranks that it has ended after the end of their scripts."""
        found: dict[int, list[int]] = {}
        for rank, end in sorted(self.ends.items()):
            if end.crash:
                found.setdefault(end.crash, []).append(rank)
        return found

    @cached_property
    def departed(self) -> list[str]:
        """For each rank that has called `hvd.shutdown()`, where, as a sentence."""
        return [text for text in self._shut_down.values() if text]

    @cached_property
    def _shut_down(self) -> Mapping[int, str]:
        return {each.rank: each.text for each in self._all(e.ShutDown)}

    # Agents and hosts

    def have_succeeded(self, ranks: Iterable[int], at: float = _NEVER) -> bool:
        """Return whether all of the ranks had ended with exit status 0 at a time.

        Then the loss of their agent does not make the job fail. A restart would repeat the job.
        """
        ends = [self.ends.get(rank) for rank in ranks]
        return all(end is not None and end.status == 0 and end.at <= at for end in ends)

    def _is_late(self, event: e.AgentLost | e.AgentFailed) -> bool:
        """Return whether the ranks of an agent had succeeded before."""
        return self.have_succeeded(event.ranks, event.at)

    @cached_property
    def _losses(self) -> list[e.AgentLost]:
        return [each for each in self._all(e.AgentLost) if not self._is_late(each)]

    @cached_property
    def lost_hosts(self) -> list[str]:
        """The hosts that do not answer, in the order of their loss."""
        return list(dict.fromkeys(each.host for each in self._host_losses))

    @cached_property
    def _host_losses(self) -> list[e.AgentLost]:
        return [each for each in self._losses if each.with_host]

    @cached_property
    def lost_host_explains(self) -> bool:
        """Whether the loss of a host has ended the job, and no rank shows a cause of its own.

        MPI ends a rank that waits in MPI_Init for the host, without a report of the rank.
        """
        lost = isinstance(self._problem, e.AgentLost) and bool(self.lost_hosts)
        return lost and not any(each.is_before(Kind.UNEXPLAINED) for each in self.failures)

    @cached_property
    def lost_agent(self) -> bool:
        """Whether an agent was lost before the launcher began to end the ranks."""
        return any(each.at <= self.end_began and not each.silent for each in self._losses)

    @cached_property
    def agent_signals(self) -> Mapping[str, signal.Signals]:
        """The name of a host -> the last stop signal that its agent got."""
        # The signal may be a consequence of the end of another agent, or a rank.
        if -signal.SIGTERM in self.plan.ends_others_with:
            return {}
        return {each.host: signal.Signals(each.number) for each in self._all(e.AgentSignalled)}

    @cached_property
    def _agent_failures(self) -> list[e.AgentFailed]:
        return [each for each in self._all(e.AgentFailed) if not self._is_late(each)]

    @cached_property
    def _unstarted(self) -> list[e.AgentDone]:
        """The agents that got SIGTERM before they started their ranks."""
        return [
            each
            for each in self._all(e.AgentDone)
            if any(rank not in self.ends for rank in each.ranks)
        ]

    @cached_property
    def _problem(self) -> Event | None:
        """The first problem, other than the end of a rank, that the launcher did not cause.

        It causes no loss of a host, which may be noticed long after other ranks have ended of it.
        """
        others: list[Event] = [
            *self._losses,
            *self._agent_failures,
            *self._unstarted,
            *self._all(e.LateStart),
            *self._all(e.LateStop),
            *(each for each in self._all(e.Judged) if each.is_final),
        ]
        early = [each for each in others if each.at <= self.end_began or each in self._host_losses]
        return min(early, key=lambda each: each.at, default=None)

    @property
    def problem_at(self) -> float:
        """When the first problem has occurred; infinite for never."""
        return _NEVER if self._problem is None else self._problem.at

    @cached_property
    def is_verdict(self) -> bool:
        """Whether the first problem is a verdict on a stall."""
        return isinstance(self._problem, e.Judged)

    @cached_property
    def _late_agent_failures(self) -> list[e.AgentFailed]:
        found: dict[str, e.AgentFailed] = {}
        for each in self._agent_failures:
            if each is not self._problem and each.host not in found:
                found[each.host] = each
        first = self._problem
        blamed = first.host if isinstance(first, e.AgentFailed | e.AgentLost | e.AgentDone) else ""
        return [each for host, each in found.items() if host != blamed or not self._blames(first)]

    def _blames(self, problem: Event | None) -> bool:
        """Return whether a problem counts for the host of its agent."""
        if isinstance(problem, e.AgentLost):
            # If this process was stopped, all agents end.
            others = problem.with_host or self.plan.ends_others_with or problem.paused
            return problem.silent or not others
        if isinstance(problem, e.AgentDone):
            return not self.plan.ends_others_with
        return isinstance(problem, e.AgentFailed)

    @cached_property
    def failed_agents(self) -> list[str]:
        """The names of the hosts whose agents have failed. Not those of lost hosts."""
        if self.found.aborted_by:
            return []  # srun has ended the agents
        first = self._problem
        names = [each.host for each in self._late_agent_failures if self.end_began < _NEVER]
        if isinstance(first, e.AgentFailed | e.AgentLost | e.AgentDone) and self._blames(first):
            names.insert(0, first.host)
        return names

    @cached_property
    def first_problem(self) -> str:
        """The text of the first problem, other than the end of a rank; empty for none."""
        first = self._problem
        if self.lost_agent:
            # After the loss of a host, mpirun may have ended an agent on another host before.
            first = next(iter(self._host_losses), first)
        match first:
            case e.AgentFailed():
                return f"{first.host}: {first.reason}"
            case e.AgentDone():
                missing = [rank for rank in first.ranks if rank not in self.ends]
                return (
                    f"{first.host}: its agent got SIGTERM or SIGHUP before it started "
                    f"{self.plan.describe(missing)}. Check what sends signals to the processes of "
                    f"the job"
                )
            case e.AgentLost() | e.LateStart() | e.LateStop() | e.Judged():
                return first.text
        return ""

    @cached_property
    def later_problems(self) -> list[str]:
        """Problems while the launcher ended the ranks."""
        texts = [f"{each.host}: {each.reason}" for each in self._late_agent_failures]
        for each in self._all(e.Unconfirmed):
            names = ", ".join(each.hosts)
            texts.append(f"{names} did not confirm that its ranks have ended; look with `ps` there")
        return texts

    # When the launcher acts

    @cached_property
    def end_due(self) -> float:
        """When to end the other ranks because a rank has failed; infinite for never."""
        return min((each.ended + each.wait for each in self.failures), default=_NEVER)

    @cached_property
    def stop_due(self) -> float:
        """When the ranks that run must have made their orderly stop; infinite for no limit."""
        starts = [each.at for each in self._all(e.StopAsked)]
        starts += [each.at for each in self._all(e.AgentSignalled)]
        # The other ranks are ending too, maybe saving, and must not be interrupted.
        orderly = (each for each in self.unsuccessful if each.status in self.plan.orderly)
        starts += [each.ended for each in orderly if each.ended <= self.end_began]
        starts += [each.at for rank, each in self.scripts.items() if rank not in self.ends]
        return min(starts, default=_NEVER) + self.plan.stop_seconds


def _order(event: Event) -> tuple[float, str, str]:
    """Return the time of an event. At the same time, the order must not be that of the arrival."""
    source = getattr(event, "rank", getattr(event, "host", ""))
    return event.at, type(event).__name__, str(source)
