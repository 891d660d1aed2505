"""A running job, as its launcher sees it: what the ranks write, the first failure, the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from hvdkit.errors import RESUMABLE
from hvdkit.launch.agents import Agents
from hvdkit.launch.connection import Connection
from hvdkit.launch.failures import Failure, Failures, tail_of
from hvdkit.launch.messages import LOST_SECONDS, Message, as_bytes
from hvdkit.launch.output import Output
from hvdkit.launch.plan import Plan

_POLL_SECONDS = 0.1
# For the ranks' last words between SIGTERM and SIGKILL, when the user wants it to end now.
_NOW_SECONDS = 1.0
# Beyond its grace an agent needs time for SIGKILL, and for its answer to arrive.
_ANSWER_SECONDS = 15.0

# Orderly stops: Ctrl-C, a batch system's end and its warning, a lost terminal.
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Limits:
    """Seconds that a job is given.

    Attributes:
        start: for hosts to answer, and for ranks to come once the first one has.
        stop: for an orderly stop (a checkpoint), once it was asked for.
        end: between SIGTERM and SIGKILL, for the ranks that are left after a failure.
    """

    start: float = 60.0
    stop: float = 120.0
    end: float = 10.0


@dataclass(frozen=True)
class Outcome:
    """The end of a job.

    Attributes:
        status: its exit status: that of the rank that failed first of all, 128 + n for a signal.
        report: what to say about it; empty after a success.
        failure: of the rank that led to it; None where none did.
    """

    status: int
    report: str = ""
    failure: Failure | None = None


class Job:
    """Watches the ranks of `plan`, which the agents have been told to start, until all have ended.

    Args:
        plan: the job.
        agents: of its hosts.
        output: where the ranks' output goes.
        limits: of time.
        registered: gives the ranks that have come up until now.
        say: tells the user something at once.
    """

    def __init__(
        self,
        plan: Plan,
        agents: Agents,
        output: Output,
        limits: Limits,
        registered: Callable[[], set[int]],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._agents = agents
        self._output = output
        self._limits = limits
        self._registered = registered
        self._say = say
        self._began = time.monotonic()
        self._ends: dict[int, int] = {}
        self._failures = Failures(self._ranks)
        self._problem = ""
        self._ended_by_us = 0
        self._gone: set[Connection] = set()
        self._stopped_by: signal.Signals | None = None
        self._interrupts = 0
        self._all_up = False
        # Deadlines; infinite when inactive.
        self._start_deadline = float("inf")
        self._stop_deadline = float("inf")
        self._end_deadline = float("inf")

    def run(self) -> Outcome:
        """Returns when no process of the job is left on any host that still answers."""
        with self._signals():
            while len(self._gone) < len(self._agents.connections):
                event = self._agents.next(_POLL_SECONDS)
                if event is not None:
                    self._take(event.connection, event.message)
                self._keep_time()
                self._output.status(self._progress())
        return self._outcome()

    # What agents say

    def _take(self, connection: Connection, message: Message) -> None:
        host = connection.host
        match message["kind"]:
            case "output":
                text = as_bytes(message["text"])
                self._output.write(message["rank"], message["stream"], text)
            case "ended":
                self._take_end(message["rank"], message["status"])
            case "failed":
                self._fail(f"{host.name}: {message['reason']}")
            case "done":
                self._gone.add(connection)
            case "lost" if connection not in self._gone:
                self._gone.add(connection)
                left = f"what still runs there ends within {LOST_SECONDS:g} s"
                self._fail(f"lost {host.name}, {left}: {connection.explain()}")

    def _take_end(self, rank: int, status: int) -> None:
        self._output.finish(rank)
        self._ends[rank] = status
        if status == 0 or self._ending:
            return
        self._failures.add(rank, status, self._output.tail(rank))
        if status == RESUMABLE:
            # The others are saving too: nobody may disturb them.
            self._be_patient()

    @property
    def _ending(self) -> bool:
        return self._end_deadline < float("inf")

    def _be_patient(self) -> None:
        deadline = time.monotonic() + self._limits.stop
        self._stop_deadline = min(self._stop_deadline, deadline)

    def _fail(self, problem: str) -> None:
        """Something other than a rank's end has gone wrong."""
        if not self._ending:
            self._problem = problem
            self._end(self._limits.end)

    def _end(self, grace: float) -> None:
        if not self._ending:
            self._ended_by_us = self._plan.size - len(self._ends)
        for connection in self._agents.connections:
            connection.send("end", grace=grace)
        self._stop_deadline = float("inf")
        self._end_deadline = time.monotonic() + grace + _ANSWER_SECONDS

    # Time

    def _keep_time(self) -> None:
        now = time.monotonic()
        if not self._all_up:
            self._look_for_ranks(now)
        if self._output.reader_gone and self._stopped_by is None:
            # As the end of a pipe ends other programs, but the ranks may save.
            self._stop(signal.SIGPIPE)
        if now > self._failures.deadline and not self._ending and self._left():
            self._end(self._limits.end)
        if now > self._stop_deadline and self._left():
            left = self._ranks(self._left())
            self._problem = f"{left} did not stop within {self._limits.stop:g} s (--stop-grace)"
            self._end(self._limits.end)
        if now > self._end_deadline:
            silent = [c for c in self._agents.connections if c not in self._gone]
            names = ", ".join(sorted({connection.host.name for connection in silent}))
            self._problem = "\n".join(
                filter(
                    None,
                    [
                        self._problem,
                        f"no word from {names} that its ranks have ended; look there with `ps`",
                    ],
                )
            )
            self._gone.update(silent)

    def _left(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self._plan.size) if rank not in self._ends]

    def _look_for_ranks(self, now: float) -> None:
        up = self._registered()
        self._all_up = len(up) == self._plan.size
        if self._all_up or not up or self._ending:
            return
        # Before the first one has come up, the ranks may import and download as long as they like.
        self._start_deadline = min(self._start_deadline, now + self._limits.start)
        if now > self._start_deadline:
            missing = [rank for rank in range(self._plan.size) if rank not in up]
            ended = [rank for rank in missing if rank in self._ends]
            silent = [rank for rank in missing if rank not in self._ends]
            parts = []
            if silent:
                parts.append(f"{self._ranks(silent)} did not come up")
            if ended:
                parts.append(f"{self._ranks(ended)} ended without")
            self._fail(
                f"{' and '.join(parts)} within {self._limits.start:g} s of the first rank "
                "(--start-timeout); does the script call hvd.init() on every rank?"
                + "".join(f"\n{tail_of(r, self._output.tail(r))}" for r in missing[:1])
            )

    # Signals

    @contextmanager
    def _signals(self) -> Iterator[None]:
        # What is ignored (nohup, a shell's background) stays ignored.
        taken = [n for n in _STOPS if signal.getsignal(n) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._on_signal) for number in taken}
        # Stopped, the launcher could not tell the agents that it is still there.
        previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._interrupts += number == signal.SIGINT
        if self._ending or self._interrupts > 1:
            self._stopped_by = self._stopped_by or signal.Signals(number)
            self._end(_NOW_SECONDS)
            self._say("ending all ranks now")
            return
        again = "; again: at once" if number == signal.SIGINT else ""
        if self._stopped_by is None:
            self._say(f"{signal.Signals(number).name}: asking all ranks to stop{again}")
        self._stop(number)

    def _stop(self, number: int) -> None:
        """Ask all ranks for an orderly stop."""
        self._stopped_by = self._stopped_by or signal.Signals(number)
        self._be_patient()
        # The terminal or the reader is gone, but not the job's chance to save.
        gone = number in (signal.SIGHUP, signal.SIGPIPE)
        passed_on = signal.SIGTERM if gone else number
        for connection in self._agents.connections:
            connection.send("signal", number=passed_on)

    # What the user is told

    def _progress(self) -> str:
        elapsed = int(time.monotonic() - self._began)
        running = self._plan.size - len(self._ends)
        hosts = len(self._plan.hosts)
        what = "stopping" if self._stopped_by or self._ending else "running"
        return (
            f"{running} of {self._plan.size} ranks {what}"
            f"{f' on {hosts} hosts' if hosts > 1 else ''}, {elapsed // 60}:{elapsed % 60:02}"
        )

    def _ranks(self, ranks: list[int]) -> str:
        """`rank 1 (host1) and 3 more` and the like."""
        shown = ", ".join(f"{rank} on {self._plan.places[rank].host.name}" for rank in ranks[:8])
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"

    def _outcome(self) -> Outcome:
        if self._failures:
            return self._failure()
        # The ranks of an orderly stop may end as they like, or have to be killed.
        if self._stopped_by is not None and (self._problem or any(self._ends.values())):
            return self._ended_by(self._stopped_by, 128 + self._stopped_by)
        return Outcome(1, self._problem) if self._problem else Outcome(0)

    def _failure(self) -> Outcome:
        if self._failures.resumable:
            report = f"stopped, and can go on: start it again (exit status {RESUMABLE})"
            return Outcome(RESUMABLE, self._with_problem(report))
        cause = self._failures.cause
        status = cause.status
        code = 128 - status if status < 0 else status
        if self._stopped_by is not None and -status in (self._stopped_by, signal.SIGTERM):
            return self._ended_by(self._stopped_by, code)
        finished = [rank for rank, ended in self._ends.items() if ended == 0]
        report = self._failures.report(self._ended_by_us, finished)
        return Outcome(code, self._with_problem(report), cause)

    def _ended_by(self, number: signal.Signals, code: int) -> Outcome:
        if number == signal.SIGPIPE:
            # As other programs end whose reader has had enough.
            return Outcome(128 + number, self._problem)
        return Outcome(code, self._with_problem(f"ended by {number.name}"))

    def _with_problem(self, report: str) -> str:
        return "\n".join(filter(None, [report, self._problem]))
