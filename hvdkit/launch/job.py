"""Watch a running job in the launcher: the ranks' output, failures, signals and the outcome."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType

from hvdkit.errors import HOSTS_CHANGED, RESUMABLE
from hvdkit.faults.verdict import Verdict
from hvdkit.launch import readers
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.connection import Connection
from hvdkit.launch.failures import Failure, Failures, tail_of
from hvdkit.launch.hosts import Host
from hvdkit.launch.messages import Message, as_bytes
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.output import Output
from hvdkit.launch.pauses import Pauses
from hvdkit.launch.plan import Plan
from hvdkit.launch.silent_hosts import describe_silent_hosts
from hvdkit.launch.stalls import Stalls
from hvdkit.launch.start_watch import LateRanks, StartWatch
from hvdkit.launch.timeouts import Timeouts
from hvdkit.signals import handle_stop_signals, ignored

_POLL_SECONDS = 0.1
# Between SIGTERM and SIGKILL, when the user asks for an immediate end.
_NOW_SECONDS = 1.0
# The most ranks whose last lines are shown if srun has ended all ranks.
_RAISED_SHOWN = 3
# Time for SIGKILL and the agent's answer, after the grace.
_ANSWER_SECONDS = 15.0


class Job:
    """Watch the ranks of `plan` until all have ended. The agents were asked to start them.

    Args:
        plan: the job.
        agents: the agents of its hosts.
        output: gets the ranks' output.
        timeouts: the timeouts of the job.
        registered: returns the ranks that have registered at the rendezvous until now; None over
            MPI.
        say: prints a message for the user.
        elastic: whether ranks may end because the hosts have changed.
    """

    def __init__(
        self,
        plan: Plan,
        agents: AgentPool,
        output: Output,
        timeouts: Timeouts,
        registered: Callable[[], set[int]] | None,
        say: Callable[[str], None],
        elastic: bool = False,
    ) -> None:
        self._plan = plan
        self._agents = agents
        self._output = output
        self._timeouts = timeouts
        self._say = say
        self._started_at = time.monotonic()
        self._statuses: dict[int, int] = {}
        # Rank -> its agent and the status with which it has ended. The agent then sends its output.
        self._exited: dict[int, tuple[Connection, int]] = {}
        self._orderly = (RESUMABLE, HOSTS_CHANGED) if elastic else (RESUMABLE,)
        self._over_mpi = registered is None
        self._failures = Failures(self._ranks, self._orderly, self._over_mpi)
        groups = plan.by_agent(len(agents.connections))
        self._places = dict(zip(agents.connections, groups, strict=True))
        directory = output.directory
        hosts = [place.host.name for place in plan.places]
        self._stalls = Stalls(
            plan.size, directory, self._ask_for_records, timeouts.stall, hosts, self._tracebacks
        )
        self._start = StartWatch(plan.size, timeouts.start, registered, self._ask_for_records)
        # Rank -> where it has called `hvd.shutdown()`.
        self._departed: dict[int, str] = {}
        self._problem = ""
        # Whether the problem is a verdict on a stall.
        self._stalled = False
        self._ended_by_launcher: list[int] = []
        # The tracebacks of these ranks, before the launcher has ended them.
        self._raised: dict[int, tuple[float, str]] = {}
        self._finished: set[Connection] = set()
        # The names of the hosts whose agents have failed.
        self._failed_agents: list[str] = []
        # The first stop signal, and whether the job had failed before.
        self._stopped_by: signal.Signals | None = None
        self._failed_first = False
        # Whether a rank has ended with RESUMABLE before any failure: the script has asked to stop.
        self._rank_stopped = False
        self._interrupts = 0
        self._saved = self._committed = False
        self._lost: list[Host] = []
        self._lost_agent = False
        # The names of the hosts that did not confirm their end after a success of their ranks.
        self._unconfirmed: set[str] = set()
        self._pauses = Pauses(self._started_at)
        # Deadlines; infinite when inactive.
        self._stop_deadline = float("inf")
        self._end_deadline = float("inf")

    def run(self) -> Outcome:
        """Return when no process of the job is left on any host that still answers."""
        # A stopped launcher could not send heartbeats to the agents.
        with ignored(signal.SIGTSTP), handle_stop_signals(self._on_signal):
            while len(self._finished) < len(self._agents.connections):
                event = self._agents.next_event(_POLL_SECONDS)
                # One time for both: the process may be stopped between the two calls.
                now = time.monotonic()
                self._start.postpone(self._pauses.look(now))
                if event is not None:
                    self._handle(event.connection, event.message)
                self._pauses.note_read(now if event is None else event.received_at, now)
                self._check_deadlines(now)
                self._output.status(self._progress())
        outcome = self._outcome()
        self._agents.explained = outcome.status != 0 and not (self._lost or self._lost_agent)
        return replace(
            outcome,
            saved=self._saved,
            committed=self._committed,
            lost=tuple(self._lost),
            failed_agents=tuple(self._failed_agents),
            interrupted=self._stopped_by if outcome.restartable else None,
        )

    # Messages of agents

    def _handle(self, connection: Connection, message: Message) -> None:
        host = connection.host
        match message["kind"]:
            case "output":
                text = as_bytes(message["text"])
                self._output.write(message["rank"], message["stream"], text)
            case "record":
                self._stalls.add(message["text"], time.monotonic())
            case "shutdown":
                self._on_shutdown(connection, message)
            case "init":
                self._start.note(message["rank"], message["start"], message["connected"])
                self._stalls.set_leaving(message["rank"], message["leaving"])
            case "saved":
                self._saved = True
            case "committed":
                self._committed = True
            case "states":
                self._stalls.set_states({int(r): s for r, s in message["states"].items()})
            case "exited":
                self._exited[message["rank"]] = connection, message["status"]
            case "ended":
                hint = message.get("hint", "")
                self._on_rank_ended(message["rank"], message["status"], hint)
            case "failed":
                self._on_agent_failed(connection, f"{host.name}: {message['reason']}")
            case "done":
                connection.idle = bool(message.get("stays"))
                self._finished.add(connection)
                self._check_ended(connection)
            case "lost" if connection not in self._finished:
                self._finished.add(connection)
                for rank, (agent, status) in self._exited.items():
                    # Other agents will send the output of their ranks, which may be the reason for
                    # their ends. If Slurm ends all agents, a killed rank is the cause.
                    is_complete = agent is connection or status == -signal.SIGKILL
                    if is_complete and rank not in self._statuses:
                        self._on_rank_ended(rank, status)
                self._on_lost(connection)

    def _on_lost(self, connection: Connection) -> None:
        host = connection.host
        if self._have_succeeded(connection):
            self._say_unconfirmed(connection, f"lost {host.name}: {connection.explain()}")
            return
        left = f"Ranks that still run there end within {self._timeouts.lost:g} s"
        problem = f"lost {host.name}: {self._explain_lost(connection)}. {left}"
        lost_host = connection.lost_host()
        if lost_host:
            if self._lost_agent and not self._lost:
                # After the loss of a host, mpirun has ended an agent on another host.
                self._problem = problem
            self._lost.append(host)
        # Not if the launcher ends the ranks already: then SIGTERM has another cause.
        self._lost_agent = self._lost_agent or not self._ending
        # If this process was stopped, all agents end. mpirun and srun end all agents after one.
        is_cause = not (lost_host or self._over_mpi or self._was_paused(connection))
        self._fail(problem, host if is_cause else None)

    def _on_agent_failed(self, connection: Connection, problem: str) -> None:
        """Handle the message of an agent that cannot start its ranks, or cannot end them."""
        host = connection.host
        if self._have_succeeded(connection):
            # It sends no `done`. With `--nodes`, it waits for the outcome.
            self._finished.add(connection)
            self._say_unconfirmed(connection, problem)
        elif not self._ending:
            self._fail(problem, host)
        elif host.name not in self._failed_agents:
            # The failure that ends the job stays, but a process may still run on the host.
            self._problem = f"{self._problem}\n{problem}".lstrip()
            self._failed_agents.append(host.name)

    def _have_succeeded(self, connection: Connection) -> bool:
        """Return whether all ranks of an agent have ended with exit status 0.

        Then the loss of the agent does not make the job fail. A restart would repeat the whole job.
        """
        return all(self._statuses.get(place.rank) == 0 for place in self._places[connection])

    def _say_unconfirmed(self, connection: Connection, problem: str) -> None:
        """Say that an agent whose ranks have succeeded does not confirm the end."""
        name = connection.host.name
        if name not in self._unconfirmed:
            self._unconfirmed.add(name)
            self._say(
                f"{problem}. All ranks of this agent had ended with exit status 0, so the job has "
                f"not failed. Processes that the ranks have started may still run there"
            )

    def _check_ended(self, connection: Connection) -> None:
        """Fail if an agent has ended without its ranks: it got SIGTERM before it started them."""
        ranks = [place.rank for place in self._places[connection]]
        if missing := [rank for rank in ranks if rank not in self._statuses]:
            self._fail(
                f"{connection.host.name}: its agent got SIGTERM or SIGHUP before it started "
                f"{self._ranks(missing)}. Check what sends signals to the processes of the job",
                None if self._over_mpi else connection.host,
            )

    def _on_shutdown(self, connection: Connection, message: Message) -> None:
        """Keep the note of a rank that has called `hvd.shutdown()`, and send it to other hosts."""
        rank, content = message["rank"], message["content"]
        try:
            self._departed[rank] = str(json.loads(content)["text"])
        except (ValueError, KeyError, TypeError):
            self._departed.pop(rank, None)  # it has started Horovod again
        for other in self._agents.connections:
            if other is not connection:
                other.send("shutdown", rank=rank, content=content)

    def _on_rank_ended(self, rank: int, status: int, hint: str = "") -> None:
        self._output.finish(rank)
        self._statuses[rank] = status
        # After a failure, a rank that a stop signal has ended is not the cause.
        if self._ending or (self._failed_first and -status in self._fatal):
            return
        tail, raised_at = self._output.tail(rank), self._output.raised_at(rank)
        if status == 0:
            self._failures.add_success(rank, tail, raised_at)
            return
        if status == RESUMABLE and not self._has_failed:
            self._rank_stopped = True
        self._failures.add(
            rank, status, tail, raised_at, hint, lambda: self._stalls.failed_collective(rank)[1]
        )
        if status in self._orderly:
            # The other ranks are ending too, maybe saving, and must not be interrupted.
            self._set_stop_deadline()

    @property
    def _fatal(self) -> tuple[int, ...]:
        """The signals that end a rank because of a stop signal; empty without one."""
        return () if self._stopped_by is None else (self._stopped_by, signal.SIGTERM)

    @property
    def _has_failed(self) -> bool:
        return bool(self._problem) or self._failures.deadline < float("inf")

    @property
    def _stops_first(self) -> bool:
        """Whether the user or the script has asked to stop before any failure: no restart."""
        by_signal = self._stopped_by is not None and not self._failed_first
        return by_signal or self._rank_stopped

    @property
    def _ending(self) -> bool:
        return self._end_deadline < float("inf")

    def _set_stop_deadline(self) -> None:
        deadline = time.monotonic() + self._timeouts.stop
        self._stop_deadline = min(self._stop_deadline, deadline)

    def _fail(self, problem: str, agent: Host | None = None) -> None:
        """End the job because of a problem that is not the end of a rank.

        Args:
            problem: the problem.
            agent: the host of the agent that has caused it; None for another cause.
        """
        if not self._ending:
            self._problem = problem
            if agent is not None:
                self._failed_agents.append(agent.name)
            self._end(self._timeouts.end)

    def _end(self, grace: float) -> None:
        if not self._ending:
            self._raised = self._tracebacks()
            self._ended_by_launcher = [r for r in self._running() if r not in self._exited]
        for connection in self._agents.connections:
            connection.send("end", grace=grace)
        self._stop_deadline = float("inf")
        self._end_deadline = time.monotonic() + grace + _ANSWER_SECONDS

    # Deadlines

    def _check_deadlines(self, now: float) -> None:
        known, read_until = self._pauses.has_read(now), self._pauses.read_until
        if known and not self._ending and (late := self._start.check(now)) is not None:
            self._on_late_start(late)
        self._check_silence(now)
        # While the launcher ends the ranks, a verdict would blame a rank for its end.
        if known and not self._ending:
            silent_hosts = partial(self._silent_hosts, now)
            failed = bool(self._failures)
            raised_at = max(self._raised_by_running().values(), default=float("-inf"))
            verdict = self._stalls.check(now, self._statuses, silent_hosts, failed, raised_at)
            if verdict is not None:
                self._on_stall(verdict)
        if self._output.stdout_closed and self._stopped_by is None:
            # Other programs end at once if their output is closed. Here the ranks may save first.
            self._stop(signal.SIGPIPE)
        if read_until > self._failures.deadline and not self._ending and self._running():
            self._end(self._timeouts.end)
        if read_until > self._stop_deadline and self._running():
            self._problem = (
                f"{self._ranks(self._running())} did not stop within {self._timeouts.stop:g} s "
                f"(--stop-grace). Give a longer time if saving needs it"
            )
            self._end(self._timeouts.end)
        if read_until > self._end_deadline:
            silent = [c for c in self._agents.connections if c not in self._finished]
            names = ", ".join(sorted({connection.host.name for connection in silent}))
            unconfirmed = f"{names} did not confirm that its ranks have ended; look with `ps` there"
            self._problem = f"{self._problem}\n{unconfirmed}".lstrip()
            self._finished.update(silent)

    def _check_silence(self, now: float) -> None:
        """Give up agents that do not answer heartbeats, for example because they are stopped."""
        for connection in self._agents.connections:
            silent_since = max(connection.silent_since, self._pauses.resumed_at)
            if connection not in self._finished and now > silent_since + self._timeouts.lost:
                connection.cut()
                self._finished.add(connection)
                problem = (
                    f"lost {connection.host.name}: its agent has not answered for "
                    f"{self._timeouts.lost:g} s. Check whether the host or the process is stopped"
                )
                if self._have_succeeded(connection):
                    self._say_unconfirmed(connection, problem)
                else:
                    self._fail(problem, connection.host)

    def _was_paused(self, connection: Connection) -> bool:
        """Return whether an agent was lost because this process was stopped."""
        by_pause = self._pauses.ended_agents(time.monotonic(), self._timeouts.lost)
        return by_pause and not connection.lost_host()

    def _explain_lost(self, connection: Connection) -> str:
        """Return why an agent was lost."""
        if self._was_paused(connection):
            return (
                f"this launcher did not run for {self._pauses.seconds:.0f} s, so the agent ended "
                f"its ranks after {self._timeouts.lost:g} s; check what stopped the launcher "
                f"(SIGSTOP, or a suspended machine)"
            )
        return connection.explain()

    def _silent_hosts(self, now: float) -> list[str]:
        return describe_silent_hosts(self._agents.connections, self._lost, self._pauses, now)

    def _ask_for_records(self) -> None:
        for connection in self._agents.connections:
            connection.send("record")

    def _on_stall(self, verdict: Verdict) -> None:
        """Show a verdict on a stall. End the job if no rank can continue, or after the limit."""
        if self._ending:
            return
        if verdict.is_final:
            self._stalled = True
            self._fail(verdict.whole_text)
        else:
            self._say(f"{verdict.text}\n{verdict.outlook}")

    def _tracebacks(self) -> dict[int, tuple[float, str]]:
        """Return rank -> the time and exception of its last traceback, as for `Stalls`."""
        if self._ending:
            return self._raised
        found = {}
        for rank, raised_at in self._raised_by_running().items():
            end = Failure(rank, 0, self._output.tail(rank))
            if end.exception is not None and not end.is_lost_peer:
                found[rank] = raised_at, end.exception
        return found

    def _raised_by_running(self) -> dict[int, float]:
        """Return rank -> the time of its last traceback, for ranks that have not ended."""
        raised = self._output.raised
        return {rank: raised[rank] for rank in sorted(raised) if rank not in self._statuses}

    def _running(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank in range(self._plan.size) if rank not in self._statuses]

    def _on_late_start(self, late: LateRanks) -> None:
        """End the job because ranks are late in `hvd.init()`."""
        ended = [rank for rank in late.ranks if rank in self._statuses]
        silent = [rank for rank in late.ranks if rank not in self._statuses]
        within = f"within {self._timeouts.start:g} s"
        if late.registered:
            parts = []
            if silent:
                parts.append(f"MPI did not connect {self._ranks(silent)}")
            if ended:
                parts.append(f"{self._ranks(ended)} ended in hvd.init()")
            text = (
                f"all ranks have called hvd.init(), but {' and '.join(parts)} {within} "
                f"(--start-timeout)."
            )
            advice = "Check the network of the hosts (`hvdkit doctor --hosts`)."
        else:
            parts = []
            if silent:
                parts.append(f"{self._ranks(silent)} did not register")
            if ended:
                parts.append(f"{self._ranks(ended)} ended without registering")
            text = f"{' and '.join(parts)} {within} of the first rank (--start-timeout)."
            advice = "Ranks register in hvd.init(): check that the script calls it on every rank."
        stopped = [rank for rank in self._running() if rank in self._stalls.stopped]
        if stopped:
            named, verb = self._ranks(stopped), "are" if len(stopped) > 1 else "is"
            advice = f"R{named[1:]} {verb} stopped (SIGSTOP). SIGCONT continues a process."
        shown = (stopped or late.ranks)[0]
        self._fail(f"{text} {advice}\n{tail_of(shown, self._output.tail(shown))}")

    # Signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._interrupts += number == signal.SIGINT
        if self._ending or self._interrupts > 1:
            self._note_stop(number)
            self._end(_NOW_SECONDS)
            readers.give_up_now()
            self._say("ending all ranks now")
            return
        again = "; press Ctrl-C again to end them at once" if number == signal.SIGINT else ""
        is_first = self._stopped_by is None
        # First, because another signal may interrupt this function.
        self._note_stop(number)
        # Before the message, because its reader may not read.
        self._stop(number)
        if is_first:
            self._say(f"{signal.Signals(number).name}: asking all ranks to stop{again}")

    def _note_stop(self, number: int) -> None:
        """Remember the first stop signal, and whether the job had failed before."""
        if self._stopped_by is None:
            self._failed_first = self._has_failed
            self._stopped_by = signal.Signals(number)

    def _stop(self, number: int) -> None:
        """Request an orderly stop of all ranks."""
        self._note_stop(number)
        self._set_stop_deadline()
        readers.give_up_soon()
        # Ranks save on SIGTERM, but may not handle these two.
        unhandled = number in (signal.SIGHUP, signal.SIGPIPE)
        forwarded = signal.SIGTERM if unhandled else number
        for connection in self._agents.connections:
            connection.send("signal", number=forwarded)

    # Messages for the user

    def _progress(self) -> str:
        elapsed = int(time.monotonic() - self._started_at)
        running = self._plan.size - len(self._statuses)
        hosts = len(self._plan.hosts)
        state = "stopping" if self._stopped_by or self._ending else "running"
        return (
            f"{running} of {self._plan.size} ranks {state}"
            f"{f' on {hosts} hosts' if hosts > 1 else ''}, {elapsed // 60}:{elapsed % 60:02}"
        )

    def _ranks(self, ranks: list[int]) -> str:
        """Return a text such as `ranks 1 on host1, 2 on host2 and 3 more`."""
        shown = ", ".join(f"{rank} on {self._plan.places[rank].host.name}" for rank in ranks[:8])
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"

    def _outcome(self) -> Outcome:
        aborted_by = self._agents.aborted() if self._lost_agent and not self._lost else ""
        stopped = self._stops_first and self._all_stopped()
        if aborted_by:
            # Only the agents have ended, not their hosts.
            if self._failures.orderly:
                self._add_first_end()
            is_clear = stopped or not self._failures.orderly
            self._problem = "" if is_clear else self._explain_abort(aborted_by)
            self._failed_agents = []
        if stopped:
            # A problem, such as a rank that has stopped late, was earlier.
            report = f"stopped; start the job again to resume it (exit status {RESUMABLE})"
            return Outcome(RESUMABLE, _joined(self._problem, report))
        failed = self._failures or self._problem
        if failed and self._stopped_by is None and (killed := self._agents.killed()):
            # The ranks then end with errors that differ between MPIs, and lose their agents.
            report = f"{killed}. This ends all ranks."
            return Outcome(1, report, restartable=not self._stops_first)
        if self._failures:
            return self._failure(aborted_by)
        # A rank has no status if its agent was lost while the launcher ended the ranks.
        if not (self._problem or self._running() or any(self._statuses.values())):
            self._warn_of_failed_collectives()
            return Outcome(0)
        # After a stop signal, the signal is the outcome, also if the launcher had to kill ranks.
        if self._stopped_by is not None and not self._failed_first:
            return self._ended_by(self._stopped_by)
        return Outcome(1, self._problem, restartable=True, is_verdict=self._stalled)

    def _warn_of_failed_collectives(self) -> None:
        """Warn if ranks have ended with exit status 0 although their last collective has failed."""
        errors = {rank: self._stalls.failed_collective(rank) for rank in range(self._plan.size)}
        if failed := [rank for rank, (_, error) in errors.items() if error]:
            name, error = errors[failed[0]]
            self._say(
                f"all ranks have ended with exit status 0, but {name} had failed on "
                f"{self._ranks(failed)}: {error.partition('. ')[0]}. Check whether the script "
                f"catches the error and continues without the other ranks"
            )

    def _all_stopped(self) -> bool:
        """Return whether ranks have ended with RESUMABLE, and all others with it or with 0.

        Also true if a rank has ended in this way because the launcher has ended it.
        """
        ends = {self._statuses.get(rank) for rank in range(self._plan.size)}
        return RESUMABLE in ends and ends <= {0, *self._orderly}

    def _add_first_end(self) -> None:
        """Add the first rank that has failed, if an agent was lost before the rank's agent."""
        for rank, (_, status) in self._exited.items():
            if status not in (0, *self._orderly):
                self._failures.add(rank, status, self._output.tail(rank))
                return

    def _explain_abort(self, by: str) -> str:
        """Return the report if srun has ended all ranks, and none has reported its end."""
        text = (
            f"{by} has ended all ranks of the job step: see its messages above. Over MPI, Slurm "
            f"does this if a rank ends before MPI_Finalize. For example, a rank was killed because "
            f"its memory was full (`dmesg`, `sacct`)."
        )
        raised = list(self._raised_by_running())[:_RAISED_SHOWN]
        shown = [tail_of(rank, self._output.tail(rank)) for rank in raised]
        return "\n".join([text, *shown])

    def _failure(self, aborted_by: str) -> Outcome:
        if self._failures.orderly and not self._rank_stopped:
            return Outcome(HOSTS_CHANGED, self._problem, restartable=True, hosts_changed=True)
        if self._failures.orderly:
            if self._stopped_by is not None:
                return self._ended_by(self._stopped_by)
            report = _joined(self._partial_stop(), self._problem)
            return Outcome(1, report, is_verdict=self._stalled)
        cause = self._failures.cause
        status = cause.status
        code = 128 - status if status < 0 else status
        if self._stopped_by is not None and -status in self._fatal:
            return self._ended_by(self._stopped_by)
        if status == -signal.SIGTERM and self._lost_agent:
            # If an agent of mpirun ends, mpirun sends SIGTERM to the other ranks.
            terminated = [rank for rank, s in self._statuses.items() if s == -signal.SIGTERM]
            report = f"{self._problem}\nSIGTERM then ended {self._ranks(terminated)}."
            return Outcome(1, report, restartable=not self._stops_first)
        finished = sorted(rank for rank, status in self._statuses.items() if status == 0)
        before = self._stalls.verdict_on_failure()
        departed = list(self._departed.values())
        unfailed = self._not_failed()
        remarks = [*self._silent_hosts(time.monotonic()), *filter(None, [unfailed])]
        causes, report = self._failures.report(
            0 if aborted_by else len(self._ended_by_launcher),
            finished,
            before,
            departed,
            remarks,
            aborted_by,
            {cause.rank: self._stalls.failed_collective(cause.rank)[0]},
        )
        report = "\n".join(filter(None, [causes, report, self._stalls.mismatch()]))
        return Outcome(
            code,
            _joined(report, self._problem),
            cause,
            restartable=not self._stops_first,
            suspects=tuple(self._failures.suspects),
            possible_causes=causes,
            unfailed=unfailed,
        )

    def _not_failed(self) -> str:
        """Return a sentence about the ranks that the launcher ended because of a failure.

        Empty if the failure has another possible cause.
        """
        others_ended = any(status in (0, *self._orderly) for status in self._statuses.values())
        if not self._ended_by_launcher or self._problem or others_ended or self._stopped_by:
            return ""
        ranks = self._ranks(self._ended_by_launcher)
        if not self._raised:
            return f"R{ranks[1:]} had not failed: check whether a process was stopped, or hung."
        rank, (_, exception) = min(self._raised.items(), key=lambda each: each[1])
        return f"R{self._ranks([rank])[1:]} had written a traceback, but not ended: {exception}"

    def _ended_by(self, number: signal.Signals) -> Outcome:
        """Return the outcome of a stop signal. Its forwarded signal may be another one."""
        # After SIGPIPE, other programs end with this status and without a message.
        report = "" if number == signal.SIGPIPE else f"ended by {number.name}"
        if report and (partial := self._partial_stop()):
            report = f"{report}; {partial}"
        return Outcome(128 + number, _joined(report, self._problem))

    def _partial_stop(self) -> str:
        """Return which ranks have made an orderly stop, if not all have; empty if none has."""
        stopped = sorted(rank for rank, status in self._statuses.items() if status == RESUMABLE)
        if not stopped:
            return ""
        return f"only {self._ranks(stopped)} made an orderly stop (exit status {RESUMABLE})"


def _joined(*texts: str) -> str:
    """Return the texts that are not empty, each on its own line."""
    return "\n".join(filter(None, texts))
