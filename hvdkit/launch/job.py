"""Watch a running job in the launcher: the ranks' output, failures, signals and the outcome."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType

from hvdkit.faults.verdict import Verdict
from hvdkit.launch import readers
from hvdkit.launch.agent_pool import AgentPool
from hvdkit.launch.connection import Connection
from hvdkit.launch.endings import Endings
from hvdkit.launch.failures import tail_of
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
from hvdkit.plain_files import parse_json
from hvdkit.signals import begin_to_note, handle_stop_signals, ignored

_POLL_SECONDS = 0.1
# Between SIGTERM and SIGKILL, when the user asks for an immediate end.
_NOW_SECONDS = 1.0
# A second SIGINT within this time is not a second Ctrl-C: a terminal and a wrapper of this process
# may both send the signal.
_SAME_SECONDS = 0.5
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
        self._over_mpi = registered is None
        self._ends = Endings(plan, output, self._over_mpi, elastic)
        groups = plan.by_agent(len(agents.connections))
        self._places = dict(zip(agents.connections, groups, strict=True))
        self._stalls = Stalls(
            plan.size,
            output.directory,
            self._ask_for_records,
            timeouts.stall,
            [place.host.name for place in plan.places],
            self._ends.tracebacks,
        )
        self._start = StartWatch(plan.size, timeouts.start, registered, self._ask_for_records)
        self._finished: set[Connection] = set()
        # The time of the first SIGINT; infinite without one.
        self._interrupted_at = float("inf")
        self._saved = self._committed = False
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
            # Before the command's handlers are restored, which would end it without an outcome.
            begin_to_note()
        ends = self._ends
        outcome = ends.outcome(self._agents, self._stalls, self._silent_hosts(time.monotonic()))
        if outcome.status == 0:
            self._warn_of_failed_collectives()
        is_lost = bool(ends.lost_hosts) or ends.lost_agent
        self._agents.explained = outcome.status != 0 and not is_lost
        return replace(
            outcome,
            saved=self._saved,
            committed=self._committed,
            lost=tuple(ends.lost_hosts),
            failed_agents=tuple(ends.failed_agents),
            interrupted=ends.stopped_by if outcome.restartable else None,
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
            case "script":
                self._ends.set_script_end(message["rank"], message["status"])
            case "saved":
                self._saved = True
            case "committed":
                self._committed = True
            case "states":
                self._stalls.set_states({int(r): s for r, s in message["states"].items()})
            case "exited":
                self._ends.exited[message["rank"]] = connection, message["status"]
            case "ended":
                hint = message.get("hint", "")
                self._on_rank_ended(message["rank"], message["status"], hint)
            case "signalled":
                self._on_agent_signalled(host, signal.Signals(message["number"]))
            case "failed":
                self._on_agent_failed(connection, f"{host.name}: {message['reason']}")
            case "done":
                connection.idle = bool(message.get("stays"))
                self._finished.add(connection)
                self._check_ended(connection)
            case "lost" if connection not in self._finished:
                self._finished.add(connection)
                for rank, (agent, status) in self._ends.exited.items():
                    # Other agents will send the output of their ranks, which may be the reason for
                    # their ends. If Slurm ends all agents, a killed rank is the cause.
                    is_complete = agent is connection or status == -signal.SIGKILL
                    if is_complete and rank not in self._ends.statuses:
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
            if self._ends.lost_agent and not self._ends.lost_hosts:
                # After the loss of a host, mpirun has ended an agent on another host.
                self._ends.problem = problem
            self._ends.lost_hosts.append(host)
        # Not if the launcher ends the ranks already: then SIGTERM has another cause.
        self._ends.lost_agent = self._ends.lost_agent or not self._ends.ends_ranks
        # If this process was stopped, all agents end. mpirun and srun end all agents after one.
        is_cause = not (lost_host or self._over_mpi or self._was_paused(connection))
        self._fail(problem, host if is_cause else None)

    def _on_agent_signalled(self, host: Host, number: signal.Signals) -> None:
        """Give the ranks the time for an orderly stop, because an agent has asked its ranks."""
        self._set_stop_deadline()
        # mpirun sends SIGTERM to all agents if one of them, or a rank, has ended.
        if not self._over_mpi:
            is_first = not (self._ends.agent_signals or self._ends.stopped_by)
            self._ends.agent_signals[host.name] = number
            if is_first and not self._ends.ends_ranks:
                self._say(f"the agent on {host.name} got {number.name}: asking its ranks to stop")

    def _on_agent_failed(self, connection: Connection, problem: str) -> None:
        """Handle the message of an agent that cannot start its ranks, or cannot end them."""
        host = connection.host
        if self._have_succeeded(connection):
            # It sends no `done`. With `--nodes`, it waits for the outcome.
            self._finished.add(connection)
            self._say_unconfirmed(connection, problem)
        elif not self._ends.ends_ranks:
            self._fail(problem, host)
        elif host.name not in self._ends.failed_agents:
            # The failure that ends the job stays, but a process may still run on the host.
            self._ends.add_problem(problem)
            self._ends.failed_agents.append(host.name)

    def _have_succeeded(self, connection: Connection) -> bool:
        """Return whether all ranks of an agent have ended with exit status 0.

        Then the loss of the agent does not make the job fail. A restart would repeat the whole job.
        """
        return all(self._ends.statuses.get(place.rank) == 0 for place in self._places[connection])

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
        if missing := [rank for rank in ranks if rank not in self._ends.statuses]:
            self._fail(
                f"{connection.host.name}: its agent got SIGTERM or SIGHUP before it started "
                f"{self._plan.describe(missing)}. Check what sends signals to the processes of the "
                f"job",
                None if self._over_mpi else connection.host,
            )

    def _on_shutdown(self, connection: Connection, message: Message) -> None:
        """Keep the note of a rank that has called `hvd.shutdown()`, and send it to other hosts."""
        rank, content = message["rank"], message["content"]
        try:
            self._ends.departed[rank] = str(parse_json(content)["text"])
        except (ValueError, KeyError, TypeError):
            self._ends.departed.pop(rank, None)  # it has started Horovod again
        for other in self._agents.connections:
            if other is not connection:
                other.send("shutdown", rank=rank, content=content)

    def _on_rank_ended(self, rank: int, status: int, hint: str = "") -> None:
        self._output.finish(rank)
        if self._ends.add_rank(rank, status, self._stalls, hint):
            # The other ranks are ending too, maybe saving, and must not be interrupted.
            self._set_stop_deadline()

    def _set_stop_deadline(self) -> None:
        deadline = time.monotonic() + self._timeouts.stop
        self._stop_deadline = min(self._stop_deadline, deadline)

    def _fail(self, problem: str, agent: Host | None = None) -> None:
        """End the job because of a problem that is not the end of a rank.

        Args:
            problem: the problem.
            agent: the host of the agent that has caused it; None for another cause.
        """
        if not self._ends.ends_ranks:
            self._ends.problem = problem
            if agent is not None:
                self._ends.failed_agents.append(agent.name)
            self._end(self._timeouts.end)

    def _end(self, grace: float) -> None:
        self._ends.begin_to_end()
        for connection in self._agents.connections:
            connection.send("end", grace=grace)
        deadline = time.monotonic() + grace + _ANSWER_SECONDS
        self._end_deadline = min(self._end_deadline, deadline)

    # Deadlines

    def _check_deadlines(self, now: float) -> None:
        ends = self._ends
        known, read_until = self._pauses.has_read(now), self._pauses.read_until
        if known and not ends.ends_ranks and (late := self._start.check(now)) is not None:
            self._on_late_start(late)
        self._check_silence(now)
        # While the launcher ends the ranks, a verdict would blame a rank for its end.
        if known and not ends.ends_ranks:
            silent_hosts = partial(self._silent_hosts, now)
            failed = bool(ends.failures)
            raised_at = max(ends.raised_at.values(), default=float("-inf"))
            verdict = self._stalls.check(now, ends.statuses, silent_hosts, failed, raised_at)
            if verdict is not None:
                self._on_stall(verdict)
        if self._output.stdout_closed and ends.stopped_by is None:
            # Other programs end at once if their output is closed. Here the ranks may save first.
            self._stop(signal.SIGPIPE)
        if read_until > ends.failures.deadline and not ends.ends_ranks and ends.running:
            self._end(self._timeouts.end)
        # The other ranks are ending too, as after the orderly end of a rank.
        stop_deadline = min(self._stop_deadline, ends.first_script_end + self._timeouts.stop)
        if read_until > stop_deadline and not ends.ends_ranks and ends.running:
            ends.problem = ends.explain_late_stop(self._timeouts.stop)
            self._end(self._timeouts.end)
        if read_until > self._end_deadline:
            silent = [c for c in self._agents.connections if c not in self._finished]
            names = ", ".join(sorted({connection.host.name for connection in silent}))
            unconfirmed = f"{names} did not confirm that its ranks have ended; look with `ps` there"
            ends.add_problem(unconfirmed)
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
        lost_hosts = self._ends.lost_hosts
        return describe_silent_hosts(self._agents.connections, lost_hosts, self._pauses, now)

    def _ask_for_records(self) -> None:
        for connection in self._agents.connections:
            connection.send("record")

    def _on_stall(self, verdict: Verdict) -> None:
        """Show a verdict on a stall. End the job if no rank can continue, or after the limit."""
        if self._ends.ends_ranks:
            return
        if verdict.is_final:
            self._ends.is_verdict = True
            self._fail(verdict.whole_text)
        else:
            self._say(f"{verdict.text}\n{verdict.outlook}")

    def _on_late_start(self, late: LateRanks) -> None:
        """End the job because ranks are late in `hvd.init()`."""
        ended = [rank for rank in late.ranks if rank in self._ends.statuses]
        silent = [rank for rank in late.ranks if rank not in self._ends.statuses]
        within = f"within {self._timeouts.start:g} s"
        if late.registered:
            parts = []
            if silent:
                parts.append(f"MPI did not connect {self._plan.describe(silent)}")
            if ended:
                parts.append(f"{self._plan.describe(ended)} ended in hvd.init()")
            text = (
                f"all ranks have called hvd.init(), but {' and '.join(parts)} {within} "
                f"(--start-timeout)."
            )
            advice = "Check the network of the hosts (`hvdkit doctor --hosts`)."
        else:
            parts = []
            if silent:
                parts.append(f"{self._plan.describe(silent)} did not register")
            if ended:
                parts.append(f"{self._plan.describe(ended)} ended without registering")
            text = f"{' and '.join(parts)} {within} of the first rank (--start-timeout)."
            advice = "Ranks register in hvd.init(): check that the script calls it on every rank."
        stopped = [rank for rank in self._ends.running if rank in self._stalls.stopped]
        if stopped:
            named, verb = self._plan.describe(stopped), "are" if len(stopped) > 1 else "is"
            advice = f"R{named[1:]} {verb} stopped (SIGSTOP). SIGCONT continues a process."
        shown = (stopped or late.ranks)[0]
        self._fail(f"{text} {advice}\n{tail_of(shown, self._output.tail(shown))}")

    # Signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now = time.monotonic()
        is_second = number == signal.SIGINT and self._interrupted_at < float("inf")
        if is_second and now < self._interrupted_at + _SAME_SECONDS:
            return
        if number == signal.SIGINT:
            self._interrupted_at = min(self._interrupted_at, now)
        if self._ends.ends_ranks or is_second:
            self._ends.add_signal(number)
            self._end(_NOW_SECONDS)
            readers.give_up_now()
            self._say("ending all ranks now")
            return
        again = "; press Ctrl-C again to end them at once" if number == signal.SIGINT else ""
        is_first = self._ends.stopped_by is None
        # First, because another signal may interrupt this function.
        self._ends.add_signal(number)
        # Before the message, because its reader may not read.
        self._stop(number)
        if is_first:
            self._say(f"{signal.Signals(number).name}: asking all ranks to stop{again}")

    def _stop(self, number: int) -> None:
        """Request an orderly stop of all ranks."""
        self._ends.add_signal(number)
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
        running = self._plan.size - len(self._ends.statuses)
        hosts = len(self._plan.hosts)
        state = "stopping" if self._ends.stopped_by or self._ends.ends_ranks else "running"
        return (
            f"{running} of {self._plan.size} ranks {state}"
            f"{f' on {hosts} hosts' if hosts > 1 else ''}, {elapsed // 60}:{elapsed % 60:02}"
        )

    def _warn_of_failed_collectives(self) -> None:
        """Warn if ranks have ended with exit status 0 although their last collective has failed."""
        errors = {rank: self._stalls.failed_collective(rank) for rank in range(self._plan.size)}
        if failed := [rank for rank, (_, error) in errors.items() if error]:
            name, error = errors[failed[0]]
            self._say(
                f"all ranks have ended with exit status 0, but {name} had failed on "
                f"{self._plan.describe(failed)}: {error.partition('. ')[0]}. Check whether the "
                f"script catches the error and continues without the other ranks"
            )
