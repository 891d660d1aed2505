"""Record how the ranks, agents and hosts of a job have ended, and derive the job's outcome."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.errors import HOSTS_CHANGED, RESUMABLE
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.connection import Connection
from hvdkit.launch.failures import RAISED_SECONDS, Failure, Failures, end_of, tail_of
from hvdkit.launch.hosts import Host
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Plan
from hvdkit.launch.questions import named
from hvdkit.launch.stalls import Stalls
from hvdkit.processes import exit_text
from hvdkit.signals import STOP_SIGNALS

#: The most ranks whose last lines are shown if srun or the launcher has ended them.
_RAISED_SHOWN = 3
# Signals with which the launcher, the user or a batch system ends a process.
_ENDING_SIGNALS = (*STOP_SIGNALS, signal.SIGKILL)
# Signals of a crash.
_CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)


@dataclass(frozen=True)
class _ScriptEnd:
    """The orderly end of a script whose process still runs.

    Attributes:
        status: the exit status.
        at: the time (`time.monotonic`).
        after_failure: whether the job had failed before.
    """

    status: int
    at: float
    after_failure: bool


class Endings:
    """The ends of the ranks, agents and hosts of a job.

    Args:
        plan: the job.
        output: the ranks' output.
        over_mpi: whether the ranks run over MPI.
        elastic: whether ranks may end because the hosts have changed.

    Attributes:
        statuses: rank -> the exit status with which it has ended.
        exited: rank -> its agent, and the status with which it has ended. The agent then sends the
            last output of the rank.
        failures: the ranks that have failed.
        departed: rank -> a sentence about where it has called `hvd.shutdown()`.
        problem: the reason for the end of the job that is not the end of a rank; empty for none.
        is_verdict: whether the problem is a verdict on a stall.
        failed_agents: the names of the hosts whose agents have failed.
        lost_hosts: the hosts that do not answer.
        lost_agent: whether an agent was lost before the launcher began to end the ranks.
        stopped_by: the first stop signal; None for none.
        agent_signals: the name of a host -> the stop signal that its agent got.
        ends_ranks: whether the launcher has begun to end the ranks.
    """

    def __init__(self, plan: Plan, output: Output, over_mpi: bool, elastic: bool) -> None:
        self._plan = plan
        self._output = output
        self._orderly = (RESUMABLE, HOSTS_CHANGED) if elastic else (RESUMABLE,)
        self.statuses: dict[int, int] = {}
        self.exited: dict[int, tuple[Connection, int]] = {}
        self.failures = Failures(plan.describe, self._orderly, over_mpi)
        self.departed: dict[int, str] = {}
        self.problem = ""
        self.is_verdict = False
        self.failed_agents: list[str] = []
        self.lost_hosts: list[Host] = []
        self.lost_agent = False
        self.stopped_by: signal.Signals | None = None
        self.agent_signals: dict[str, signal.Signals] = {}
        self.ends_ranks = False
        # Whether the job had failed before the first stop signal.
        self._failed_first = False
        # Whether a rank has ended with RESUMABLE before any failure: the script has asked to stop.
        self._rank_stopped = False
        self._script_ends: dict[int, _ScriptEnd] = {}
        # The signal of a crash -> the ranks that it has ended after the end of their scripts.
        self._crashes: dict[int, list[int]] = {}
        self._ended_by_launcher: list[int] = []
        # The tracebacks of these ranks, before the launcher has ended them.
        self._raised: dict[int, tuple[float, str]] = {}

    # What has ended

    def add_rank(self, rank: int, status: int, stalls: Stalls, hint: str = "") -> bool:
        """Add the end of a rank, and return whether it is an orderly stop.

        Args:
            rank: the rank.
            status: its exit status.
            stalls: the stalls of the job.
            hint: as for `Failure`.
        """
        script_end = self._script_ends.get(rank)
        number = _signal_of(status)
        if script_end is not None and number in (*_ENDING_SIGNALS, *_CRASHES):
            self._add_ended_after_script(rank, script_end)
            if number in _CRASHES:
                self._crashes.setdefault(number, []).append(rank)
            return not self.ends_ranks
        self.statuses[rank] = status
        # After a failure, a rank that a stop signal has ended is not the cause.
        if self.ends_ranks or (self._failed_first and -status in self._fatal):
            return False
        tail, raised_at = self._output.tail(rank), self._output.raised_at(rank)
        if status == 0:
            self.failures.add_success(rank, tail, raised_at)
            return False
        if status == RESUMABLE and not self.have_failed:
            self._rank_stopped = True
        self.failures.add(
            rank, status, tail, raised_at, hint, lambda: stalls.failed_collective(rank)[1]
        )
        return status in self._orderly

    def _add_ended_after_script(self, rank: int, script_end: _ScriptEnd) -> None:
        """Add the end by a signal of a rank whose script has made an orderly end before."""
        self.statuses[rank] = script_end.status
        if script_end.status == RESUMABLE and not script_end.after_failure:
            self._rank_stopped = True
        self.failures.add(rank, script_end.status, self._output.tail(rank))

    def set_script_end(self, rank: int, status: int | None) -> None:
        """Set that the script of a rank has made an orderly end, although its process still runs.

        Args:
            rank: the rank.
            status: its exit status; None if the rank's command continues.
        """
        if status is not None and status in self._orderly:
            self._script_ends[rank] = _ScriptEnd(status, time.monotonic(), self.have_failed)
        else:
            self._script_ends.pop(rank, None)

    def add_signal(self, number: int) -> None:
        """Add a stop signal that this process has received. Only the first one counts."""
        if self.stopped_by is None:
            self._failed_first = self.have_failed
            self.stopped_by = signal.Signals(number)

    def add_problem(self, text: str) -> None:
        """Add a problem to the one that has ended the job."""
        self.problem = _joined(self.problem, text)

    def begin_to_end(self) -> None:
        """Note that the launcher begins to end the ranks."""
        if not self.ends_ranks:
            self._raised = self.tracebacks()
            self._ended_by_launcher = [rank for rank in self.running if rank not in self.exited]
            self.ends_ranks = True

    # The present state

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self._plan.size) if rank not in self.statuses]

    @property
    def first_script_end(self) -> float:
        """The time of the first orderly end of a script whose process runs; infinite for none."""
        times = [end.at for rank, end in self._script_ends.items() if rank not in self.statuses]
        return min(times, default=float("inf"))

    @property
    def have_failed(self) -> bool:
        """Whether the job has failed, and not only ranks that have made an orderly stop."""
        return bool(self.problem) or self.failures.deadline < float("inf")

    @property
    def raised_at(self) -> dict[int, float]:
        """Rank -> the time of its last traceback, for ranks that have not ended."""
        raised = self._output.raised
        return {rank: raised[rank] for rank in sorted(raised) if rank not in self.statuses}

    def tracebacks(self) -> dict[int, tuple[float, str]]:
        """Return rank -> the time and exception of its last traceback, as for `Stalls`."""
        if self.ends_ranks:
            return self._raised
        found = {}
        for rank, raised_at in self.raised_at.items():
            end = Failure(rank, 0, self._output.tail(rank))
            if end.exception is not None and not end.is_lost_peer:
                found[rank] = raised_at, end.exception
        return found

    @property
    def _fatal(self) -> tuple[int, ...]:
        """The signals that end a rank because of a stop signal; empty without one."""
        return () if self.stopped_by is None else (self.stopped_by, signal.SIGTERM)

    @property
    def _stops_first(self) -> bool:
        """Whether the user or the script has asked to stop before any failure: no restart."""
        by_signal = self.stopped_by is not None and not self._failed_first
        return by_signal or self._rank_stopped

    def explain_late_stop(self, seconds: float) -> str:
        """Return why the launcher ends the ranks that run after the time for an orderly stop.

        Args:
            seconds: this time.
        """
        ended = [rank for rank in self.running if rank in self._script_ends]
        late = [rank for rank in self.running if rank not in self._script_ends]
        within = f"within {seconds:g} s (--stop-grace)"
        causes = []
        if late:
            causes.append(
                f"{self._plan.describe(late)} did not stop {within}. Give a longer time if saving "
                f"needs it"
            )
        if ended:
            one = len(ended) == 1
            process, it = ("its process", "it") if one else ("their processes", "them")
            causes.append(
                f"{self._plan.describe(ended)} had reached the end of the script, but {process} "
                f"did not end {within}, so the launcher ended {it}. Python waits for threads that "
                f"are not daemons, and for processes of multiprocessing. End these before the "
                f"script ends, or start them with daemon=True"
            )
        return "\n".join(causes)

    # The outcome

    def outcome(self, agents: AgentPool, stalls: Stalls, silent_hosts: Sequence[str]) -> Outcome:
        """Return the outcome of the job. All ranks have ended, or their agents are lost.

        Args:
            agents: the agents of the job.
            stalls: the stalls of the job.
            silent_hosts: sentences about hosts that did not answer.
        """
        aborted_by = agents.aborted() if self.lost_agent and not self.lost_hosts else ""
        stopped = self._stops_first and self._all_stopped()
        if aborted_by:
            # Only the agents have ended, not their hosts.
            if self.failures.orderly:
                self._add_first_failure()
            is_clear = stopped or not self.failures.orderly
            self.problem = "" if is_clear else self._explain_abort(aborted_by)
            self.failed_agents = []
        if stopped:
            # A problem, such as a rank that has stopped late, was earlier.
            report = f"stopped; start the job again to resume it (exit status {RESUMABLE})"
            return Outcome(RESUMABLE, _joined(self._remarks, self.problem, report))
        failed = self.failures or self.problem
        if failed and self.stopped_by is None and (killed := agents.killed()):
            # The ranks then end with errors that differ between MPIs, and lose their agents.
            report = f"{killed}. This ends all ranks."
            return Outcome(1, report, restartable=not self._stops_first)
        if self.failures and self.failures.orderly:
            return self._orderly_outcome()
        if self.failures:
            return self._failure(stalls, silent_hosts, aborted_by)
        # A rank has no status if its agent was lost while the launcher ended the ranks.
        if not (self.problem or self.running or any(self.statuses.values())):
            done = "all ranks have ended with 0: the script is complete (exit status 0)"
            return Outcome(0, done if self.stopped_by is not None else "")
        # After a stop signal, the signal is the outcome, also if the launcher had to kill ranks.
        if self.stopped_by is not None and not self._failed_first:
            return self._ended_by(self.stopped_by)
        report = _joined(self._remarks, self.problem)
        return Outcome(1, report, restartable=True, is_verdict=self.is_verdict)

    @property
    def _remarks(self) -> str:
        """Sentences that may explain the end of the job, but are no failures; empty for none."""
        crashes = [
            f"{self._plan.describe(ranks)} had reached the end of the script, and "
            f"{'were' if len(ranks) > 1 else 'was'} then {exit_text(-number)}. Check the script's "
            f"functions of `atexit`, and the libraries that it uses"
            for number, ranks in self._crashes.items()
        ]
        return _joined(self._describe_agent_signals(), *crashes)

    def _describe_agent_signals(self) -> str:
        """Return which agents got stop signals; empty for none."""
        # A batch system may send a signal to all processes of the job.
        if not self.agent_signals or self.stopped_by is not None:
            return ""
        hosts = [host for host in self._plan.hosts if host.name in self.agent_signals]
        signals = " or ".join(sorted({number.name for number in self.agent_signals.values()}))
        return f"the agent{'s' if len(hosts) > 1 else ''} on {named(hosts)} got {signals}"

    def _all_stopped(self) -> bool:
        """Return whether ranks have ended with RESUMABLE, and all others with it or with 0.

        Also true if a rank has ended in this way because the launcher has ended it.
        """
        ends = {self.statuses.get(rank) for rank in range(self._plan.size)}
        return RESUMABLE in ends and ends <= {0, *self._orderly}

    def _add_first_failure(self) -> None:
        """Add the first rank that has failed, if an agent was lost before the rank's agent."""
        for rank, (_, status) in self.exited.items():
            if status not in (0, *self._orderly):
                self.failures.add(rank, status, self._output.tail(rank))
                return

    def _explain_abort(self, by: str) -> str:
        """Return the report if srun has ended all ranks, and none has reported its end."""
        text = (
            f"{by} has ended all ranks of the job step: see its messages above. Over MPI, Slurm "
            f"does this if a rank ends before MPI_Finalize. For example, a rank was killed because "
            f"its memory was full (`dmesg`, `sacct`)."
        )
        raised = list(self.raised_at)[:_RAISED_SHOWN]
        shown = [tail_of(rank, self._output.tail(rank)) for rank in raised]
        return "\n".join([text, *shown])

    def _orderly_outcome(self) -> Outcome:
        """Return the outcome if some ranks have made an orderly stop, and none has failed."""
        if not self._rank_stopped:
            report = _joined(self._remarks, self.problem)
            return Outcome(HOSTS_CHANGED, report, restartable=True, hosts_changed=True)
        if self.stopped_by is not None:
            return self._ended_by(self.stopped_by)
        report = _joined(self._remarks, self._partial_stop(), self.problem)
        return Outcome(1, report, is_verdict=self.is_verdict)

    def _failure(self, stalls: Stalls, silent_hosts: Sequence[str], aborted_by: str) -> Outcome:
        """Return the outcome if ranks have failed."""
        cause = self.failures.cause
        status = cause.status
        code = 128 - status if status < 0 else status
        if self.stopped_by is not None and -status in self._fatal:
            return self._ended_by(self.stopped_by)
        if status == -signal.SIGTERM and self.lost_agent:
            # If an agent of mpirun ends, mpirun sends SIGTERM to the other ranks.
            terminated = [rank for rank, s in self.statuses.items() if s == -signal.SIGTERM]
            sigterm = f"SIGTERM then ended {self._plan.describe(terminated)}."
            report = _joined(self._remarks, self.problem, sigterm)
            return Outcome(1, report, restartable=not self._stops_first)
        if not cause.traceback and cause.rank in (ended := self._ended_by_agents()):
            self.failed_agents += self.agent_signals
            report = _joined(self._remarks, f"SIGTERM then ended {self._plan.describe(ended)}.")
            return Outcome(code, report, restartable=not self._stops_first)
        finished = sorted(rank for rank, status in self.statuses.items() if status == 0)
        unfailed = self._not_failed()
        causes, report = self.failures.report(
            0 if aborted_by else len(self._ended_by_launcher),
            finished,
            stalls.verdict_on_failure(),
            list(self.departed.values()),
            [*silent_hosts, *filter(None, [unfailed])],
            aborted_by,
            {cause.rank: stalls.failed_collective(cause.rank)[0]},
        )
        earlier = self._raised_before(cause)
        report = _joined(causes, report, earlier, stalls.mismatch(), self._remarks, self.problem)
        return Outcome(
            code,
            report,
            cause,
            restartable=not self._stops_first,
            suspects=tuple(self.failures.suspects),
            possible_causes=causes,
            unfailed=unfailed,
        )

    def _ended_by_agents(self) -> list[int]:
        """Return the ranks that have ended with SIGTERM because their agents got a stop signal."""
        if self.stopped_by is not None:
            return []
        return sorted(
            rank
            for rank, status in self.statuses.items()
            if _signal_of(status) == signal.SIGTERM
            and self._plan.places[rank].host.name in self.agent_signals
        )

    def _not_failed(self) -> str:
        """Return a sentence about the ranks that the launcher ended because of a failure.

        Empty if the failure has another possible cause.
        """
        others_ended = any(status in (0, *self._orderly) for status in self.statuses.values())
        if not self._ended_by_launcher or self.problem or others_ended or self.stopped_by:
            return ""
        ranks = self._plan.describe(self._ended_by_launcher)
        if not self._raised:
            return f"R{ranks[1:]} had not failed: check whether a process was stopped, or hung."
        rank, (_, exception) = min(self._raised.items(), key=lambda each: each[1])
        named = self._plan.describe([rank])
        return f"R{named[1:]} had written a traceback, but not ended: {exception}"

    def _raised_before(self, cause: Failure) -> str:
        """Return the last lines of ranks that had raised an error before the first failure.

        The launcher has ended these ranks: their threads and functions of `atexit` took longer than
        those of the ranks that failed because of them. An older error was probably caught.
        """
        earlier = {
            rank: raised_at
            for rank, (raised_at, _) in self._raised.items()
            if 0 < cause.began - raised_at < RAISED_SECONDS
        }
        shown = [Failure(rank, 0, self._output.tail(rank)) for rank in sorted(earlier)]
        return _joined(
            *(
                f"Before this, {self._plan.describe([failure.rank])} had written a traceback, and "
                f"had not ended when the launcher ended it.\n{end_of(failure)}"
                for failure in sorted(shown, key=lambda each: earlier[each.rank])[:_RAISED_SHOWN]
            )
        )

    def _ended_by(self, number: signal.Signals) -> Outcome:
        """Return the outcome of a stop signal. Its forwarded signal may be another one."""
        # After SIGPIPE, other programs end with this status and without a message.
        report = "" if number == signal.SIGPIPE else f"ended by {number.name}"
        if report and (partial := self._partial_stop()):
            report = f"{report}; {partial}"
        return Outcome(128 + number, _joined(report, self._remarks, self.problem))

    def _partial_stop(self) -> str:
        """Return which ranks have made an orderly stop, if not all have; empty if none has."""
        stopped = sorted(rank for rank, status in self.statuses.items() if status == RESUMABLE)
        if not stopped:
            return ""
        return f"only {self._plan.describe(stopped)} made an orderly stop (exit status {RESUMABLE})"


def _signal_of(status: int) -> int:
    """Return the signal that has ended a process, or the program of a shell.

    The result is not a signal if the process has ended in another way.
    """
    return -status if status < 0 else status - 128


def _joined(*texts: str) -> str:
    """Return the texts that are not empty, each on its own line."""
    return "\n".join(filter(None, texts))
