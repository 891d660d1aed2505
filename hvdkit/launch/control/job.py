"""Watch a running job in the launcher: the ranks' output, failures, signals and the outcome."""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial
from types import FrameType

from hvdkit.faults.rank_report import RankReport
from hvdkit.launch.control import readers
from hvdkit.launch.control.agent_pool import AgentPool
from hvdkit.launch.control.connection import Connection
from hvdkit.launch.control.controller import Controller
from hvdkit.launch.control.late_ranks import explain_late_start, explain_late_stop
from hvdkit.launch.control.messages import Message, as_bytes
from hvdkit.launch.control.output import Output
from hvdkit.launch.control.pauses import Pauses
from hvdkit.launch.control.plan import Plan
from hvdkit.launch.control.silent_hosts import describe_silent_hosts
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.ending import events as e
from hvdkit.launch.ending.events import EVENTS, JobPlan
from hvdkit.launch.ending.facts import Facts
from hvdkit.launch.ending.failure import tail_of
from hvdkit.launch.ending.journal import Journal
from hvdkit.launch.ending.outcome import Outcome, outcome
from hvdkit.launch.ending.stalls import StallWatch
from hvdkit.system.plain_files import parse_json
from hvdkit.system.signals import begin_to_note, handle_stop_signals, ignored
from hvdkit.system.whole_files import write

_POLL_SECONDS = 0.1
# The messages of which an agent sends many.
_FREQUENT = ("output", "record", "report", "exited", "ended")
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
        output: gets the ranks' output.
        controller: how the ranks find each other.
        elastic: whether ranks may end because the hosts have changed.
    """

    def __init__(
        self,
        plan: Plan,
        agents: AgentPool,
        output: Output,
        timeouts: Timeouts,
        controller: Controller,
        elastic: bool = False,
    ) -> None:
        self._plan = plan
        self._agents = agents
        self._output = output
        self._timeouts = timeouts
        self._started_at = time.monotonic()
        hosts = tuple(place.host.name for place in plan.places)
        ends = tuple(map(int, controller.ends_others_with))
        self._journal = Journal(JobPlan(hosts, ends, elastic, timeouts.stop))
        groups = plan.by_agent(len(agents.connections))
        self._places = {
            connection: tuple(place.rank for place in places)
            for connection, places in zip(agents.connections, groups, strict=True)
        }
        self._registered = controller.registered
        self._watch = StallWatch(self._journal, timeouts, output.directory, self._ask_for_records)
        self._finished: set[Connection] = set()
        # The names of the hosts that did not confirm their end after a success of their ranks.
        self._unconfirmed: set[str] = set()
        self._pauses = Pauses(self._journal, self._started_at)

    def run(self) -> Outcome:
        """Return when no process of the job is left on any host that still answers."""
        # A stopped launcher could not send heartbeats to the agents.
        look_at = float("-inf")
        with ignored(signal.SIGTSTP), handle_stop_signals(self._on_signal):
            while len(self._finished) < len(self._agents.connections):
                event = self._agents.next_event(_POLL_SECONDS)
                # One time for both: the process may be stopped between the two calls.
                now = time.monotonic()
                self._pauses.look(now)
                if event is not None:
                    self._handle(event.connection, event.message, event.received_at)
                self._pauses.note_read(now if event is None else event.received_at, now)
                # A job may have thousands of ranks, which all write output or end at once.
                if event is None or event.message["kind"] not in _FREQUENT or now >= look_at:
                    look_at = now + _POLL_SECONDS
                    self._check_deadlines(now)
                    self._output.status(self._progress())
            # Before the command's handlers are restored, which would end it without an outcome.
            begin_to_note()
        self._journal.add(self._found())
        found = outcome(self._journal.plan, self._journal.events)
        if found.status == 0:
            self._warn_of_failed_collectives()
        if (external := self._agents.external) is not None:
            is_lost = bool(found.lost) or self._facts.lost_agent
            external.explained = found.status != 0 and not is_lost
        self._write_events()
        return found

    @property
    def _facts(self) -> Facts:
        return self._journal.facts

    @property
    def _ends_ranks(self) -> bool:
        """Whether the launcher has begun to end the ranks."""
        return self._facts.end_began < float("inf")

    def _found(self) -> e.Found:
        """Return what the events do not show, now that all ranks have ended."""
        facts = self._facts
        has_failed = facts.problem_at < float("inf") or facts.unsuccessful
        external = self._agents.external
        return e.Found(
            time.monotonic(),
            self._watch.stalls.verdict_on_failure(),
            self._journal.records.mismatch,
            tuple(self._silent_hosts(time.monotonic())),
            external.killed() if external and has_failed and facts.stop is None else "",
            external.aborted() if external and facts.lost_agent and not facts.lost_hosts else "",
        )

    def _write_events(self) -> None:
        if (folder := self._output.directory) is not None:
            # A full disk, for example, or a link of another user.
            with contextlib.suppress(OSError):
                write(folder / EVENTS, e.to_text(self._journal.plan, self._journal.events))

    # Messages of agents

    def _handle(self, connection: Connection, message: Message, received_at: float) -> None:
        host, ranks = connection.host.name, self._places.get(connection, ())
        at = received_at - message.get("age", 0.0)
        add = self._journal.add
        match message["kind"]:
            case "output":
                text = as_bytes(message["text"])
                self._output.write(message["rank"], message["stream"], text)
            case "record":
                self._watch.add(message["text"], time.monotonic())
            case "shutdown":
                self._on_shutdown(connection, message, at)
            case "init":
                start, connected = message["start"], message["connected"]
                add(e.InHorovod(at, message["rank"], start, connected, message["leaving"]))
            case "report":
                add(e.Reported(at, message["rank"], RankReport.of(message["report"])))
            case "saved" if not self._facts.saved:
                add(e.Saved(at))
            case "committed" if not self._facts.committed:
                add(e.Committed(at))
            case "states":
                stopped = (int(rank) for rank, state in message["states"].items() if state)
                add(e.Observed(at, ranks, tuple(stopped)))
            case "exited":
                add(e.Exited(at, message["rank"], message["status"]))
            case "ended":
                self._on_rank_ended(message, at)
            case "signalled":
                self._on_agent_signalled(host, signal.Signals(message["number"]), at)
            case "failed":
                if self._facts.have_succeeded(ranks):
                    # It sends no `done`. With `--nodes`, it waits for the outcome.
                    self._finished.add(connection)
                    self._say_unconfirmed(host, f"{host}: {message['reason']}")
                add(e.AgentFailed(at, host, ranks, message["reason"]))
            case "done":
                connection.idle = bool(message.get("stays"))
                self._finished.add(connection)
                add(e.AgentDone(at, host, ranks))
            case "lost" if connection not in self._finished:
                self._finished.add(connection)
                self._on_lost(connection, at)

    def _on_lost(self, connection: Connection, at: float) -> None:
        host, ranks = connection.host.name, self._places[connection]
        if self._facts.have_succeeded(ranks):
            self._say_unconfirmed(host, f"lost {host}: {connection.explain()}")
        paused, with_host = self._was_paused(connection), connection.lost_host()
        left = f"Ranks that still run there end within {self._timeouts.lost:g} s"
        text = f"lost {host}: {self._explain_lost(connection)}. {left}"
        self._journal.add(e.AgentLost(at, host, ranks, text, with_host, paused))

    def _on_agent_signalled(self, host: str, number: signal.Signals, at: float) -> None:
        """Note that an agent has asked its ranks to stop. They get the time for an orderly stop."""
        before = self._facts
        self._journal.add(e.AgentSignalled(at, host, number))
        is_first = not before.agent_signals and self._facts.agent_signals
        if is_first and before.stop is None and not self._ends_ranks:
            readers.say(f"the agent on {host} got {number.name}: asking its ranks to stop")

    def _say_unconfirmed(self, host: str, problem: str) -> None:
        """Say that an agent whose ranks have succeeded does not confirm the end."""
        if host not in self._unconfirmed:
            self._unconfirmed.add(host)
            readers.say(
                f"{problem}. All ranks of this agent had ended with exit status 0, so the job has "
                f"not failed. Processes that the ranks have started may still run there"
            )

    def _on_shutdown(self, connection: Connection, message: Message, at: float) -> None:
        """Keep the note of a rank that has called `hvd.shutdown()`, and send it to other hosts."""
        rank, content = message["rank"], message["content"]
        try:
            text = str(parse_json(content)["text"])
        except (ValueError, KeyError, TypeError):
            text = ""  # it has started Horovod again
        self._journal.add(e.ShutDown(at, rank, text))
        for other in self._agents.connections:
            if other is not connection:
                other.send("shutdown", rank=rank, content=content)

    def _failed_at(self, rank: int, ended_at: float) -> float:
        """Return when the last collective of a rank has failed; `ended_at` if it is not known.

        Only the clock of the rank's host tells whether the rank has raised its error before.
        """
        reported, failed_at = self._facts.reports.get(rank), self._journal.records.failed_at(rank)
        if reported is None or failed_at is None or not reported.report.time:
            return ended_at
        return reported.at + failed_at - reported.report.time

    def _on_rank_ended(self, message: Message, at: float) -> None:
        rank, status = message["rank"], message["status"]
        self._output.finish(rank)
        name, error = self._journal.records.failed_collective(rank) if status else ("", "")
        if error:
            self._journal.add(e.CollectiveFailed(self._failed_at(rank, at), rank, name, error))
        tail, stack = self._output.tail(rank) if status else (), tuple(message.get("stack", ()))
        self._journal.add(e.Ended(at, rank, status, tuple(tail), message.get("hint", ""), stack))

    def _end(self, grace: float) -> None:
        """End all ranks, or give them less time."""
        self._journal.add(e.EndBegan(time.monotonic(), grace))
        for connection in self._agents.connections:
            connection.send("end", grace=grace)

    # Deadlines

    def _check_deadlines(self, now: float) -> None:
        known, read_until = self._pauses.has_read(now), self._pauses.read_until
        if not self._ends_ranks and known:
            self._check_start(now)
        self._check_silence(now)
        # While the launcher ends the ranks, a verdict would blame a rank for its end.
        if not self._ends_ranks and known:
            self._watch.check(now, partial(self._silent_hosts, now))
        if self._output.stdout_closed and self._facts.stop is None:
            # Other programs end at once if their output is closed. Here the ranks may save first.
            self._stop(signal.SIGPIPE)
        if not self._ends_ranks:
            facts = self._facts
            if facts.running and read_until > facts.stop_due:
                text = explain_late_stop(self._plan, facts, self._timeouts.stop)
                self._journal.add(e.LateStop(now, text))
            is_due = facts.running and read_until > facts.end_due
            if is_due or self._facts.problem_at < float("inf"):
                self._end(self._timeouts.end)
        if read_until > self._facts.killed_at + _ANSWER_SECONDS:
            silent = [c for c in self._agents.connections if c not in self._finished]
            if names := tuple(sorted({connection.host.name for connection in silent})):
                self._journal.add(e.Unconfirmed(now, names))
            self._finished.update(silent)

    def _check_start(self, now: float) -> None:
        """Note the ranks that have registered at the rendezvous, and those that are late."""
        begun = self._watch.stalls.begun
        if self._registered is not None and len(begun) < self._plan.size:
            for rank in sorted(self._registered() - begun):
                self._journal.add(e.InHorovod(now, rank, 1, connected=True))
        if (late := self._watch.stalls.late) is not None and self._watch.stalls.is_late(now):
            stopped = self._watch.stalls.stopped
            text, shown = explain_late_start(
                self._plan, self._facts, late, stopped, self._timeouts.start
            )
            last_lines = tail_of(shown, self._output.tail(shown))
            self._journal.add(e.LateStart(now, f"{text}\n{last_lines}"))

    def _check_silence(self, now: float) -> None:
        """Give up agents that do not answer heartbeats, for example because they are stopped."""
        for connection in self._agents.connections:
            silent_since = max(connection.silent_since, self._pauses.last.at)
            if connection not in self._finished and now > silent_since + self._timeouts.lost:
                connection.cut()
                self._finished.add(connection)
                host, ranks = connection.host.name, self._places[connection]
                text = (
                    f"lost {host}: its agent has not answered for {self._timeouts.lost:g} s. Check "
                    f"whether the host or the process is stopped"
                )
                if self._facts.have_succeeded(ranks):
                    self._say_unconfirmed(host, text)
                self._journal.add(e.AgentLost(now, host, ranks, text, silent=True))

    def _was_paused(self, connection: Connection) -> bool:
        """Return whether an agent was lost because this process was stopped."""
        by_pause = self._pauses.ended_agents(time.monotonic(), self._timeouts.lost)
        return by_pause and not connection.lost_host()

    def _explain_lost(self, connection: Connection) -> str:
        """Return why an agent was lost."""
        if self._was_paused(connection):
            return (
                f"this launcher did not run for {self._pauses.last.seconds:.0f} s, so the agent "
                f"ended its ranks after {self._timeouts.lost:g} s; check what stopped the launcher "
                f"(SIGSTOP, or a suspended machine)"
            )
        return connection.explain()

    def _silent_hosts(self, now: float) -> list[str]:
        lost_hosts = self._facts.lost_hosts
        return describe_silent_hosts(self._agents.connections, lost_hosts, self._pauses, now)

    def _ask_for_records(self) -> None:
        for connection in self._agents.connections:
            connection.send("record")

    # Signals

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        now, interrupted_at = time.monotonic(), self._facts.interrupted_at
        is_second = number == signal.SIGINT and interrupted_at < float("inf")
        if is_second and now < interrupted_at + _SAME_SECONDS:
            return
        if self._ends_ranks or is_second:
            self._journal.add(e.StopAsked(now, number))
            self._end(_NOW_SECONDS)
            readers.give_up_now()
            readers.say("ending all ranks now")
            return
        again = "; press Ctrl-C again to end them at once" if number == signal.SIGINT else ""
        is_first = self._facts.stop is None
        # Before the message, because its reader may not read.
        self._stop(number)
        if is_first:
            readers.say(f"{signal.Signals(number).name}: asking all ranks to stop{again}")

    def _stop(self, number: int) -> None:
        """Request an orderly stop of all ranks."""
        # First, because another signal may interrupt this function.
        self._journal.add(e.StopAsked(time.monotonic(), number))
        readers.give_up_soon()
        # Ranks save on SIGTERM, but may not handle these two.
        unhandled = number in (signal.SIGHUP, signal.SIGPIPE)
        forwarded = signal.SIGTERM if unhandled else number
        for connection in self._agents.connections:
            connection.send("signal", number=forwarded)

    # Messages for the user

    def _progress(self) -> str:
        elapsed = int(time.monotonic() - self._started_at)
        facts = self._facts
        running = len(facts.running)
        hosts = len(self._plan.hosts)
        state = "stopping" if facts.stop or self._ends_ranks else "running"
        return (
            f"{running} of {self._plan.size} ranks {state}"
            f"{f' on {hosts} hosts' if hosts > 1 else ''}, {elapsed // 60}:{elapsed % 60:02}"
        )

    def _warn_of_failed_collectives(self) -> None:
        """Warn if ranks have ended with exit status 0 although their last collective has failed."""
        records = self._journal.records
        errors = {rank: records.failed_collective(rank) for rank in range(self._plan.size)}
        if failed := [rank for rank, (_, error) in errors.items() if error]:
            name, error = errors[failed[0]]
            readers.say(
                f"all ranks have ended with exit status 0, but {name} had failed on "
                f"{self._plan.describe(failed)}: {error.partition('. ')[0]}. Check whether the "
                f"script catches the error and continues without the other ranks"
            )
