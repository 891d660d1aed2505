"""Faults of processes: a rank, an agent or the launcher is killed or stopped, memory runs out."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Sequence
from typing import ClassVar

import psutil

from tests.search.chaos.job import HOST_SECONDS, STALL_SECONDS, Job, Start


class Fault:
    """A fault of a running job. Subclasses say what it is.

    Attributes:
        name: for tables.
        weight: how often it is drawn.
        relaunch: whether the fault ends the launcher, and the user starts the command again.
        early: whether it may happen before the first step.
        damages: whether a step that was saved may be lost.
        names: patterns. After a fault that has ended or stalled the job, the launcher's output must
            match one of them.
        killed: the ranks that the launcher may report as killed by a signal.
        seconds: the time from `inject` to `lift`.
    """

    name: ClassVar[str]
    weight: ClassVar[int] = 3
    relaunch: ClassVar[bool] = False
    early: ClassVar[bool] = True
    damages: ClassVar[bool] = False

    def __init__(self, draw: random.Random, job: Job) -> None:
        self.draw = draw
        self.job = job
        self.names: Sequence[str] = ()
        self.killed: set[int] = set()
        self.seconds = 0.0

    @classmethod
    def possible(cls, job: Job) -> bool:
        """Return whether the job can have this fault."""
        return True

    def inject(self) -> bool:
        """Let it happen. Return False if it cannot happen now, for example without a rank."""
        raise NotImplementedError

    def lift(self) -> None:
        """End it, after `seconds`."""

    def _rank(self) -> Start | None:
        alive = self.job.alive()
        return alive[self.draw.choice(sorted(alive))] if alive else None

    def _agent(self) -> tuple[Start, psutil.Process] | None:
        rank = self._rank()
        agent = None if rank is None else self.job.agent_of(rank)
        return None if rank is None or agent is None else (rank, agent)

    def _where(self, rank: int) -> str:
        """Return a pattern for the host of a rank. A smaller job has other hosts."""
        if self.job.setting.min_ranks:
            return r"\S+"
        return self.job.host_of(rank)


class KillRank(Fault):
    """SIGKILL of one rank, as the kernel does when memory is short."""

    name = "SIGKILL of a rank"
    weight = 10

    def inject(self) -> bool:
        rank = self._rank()
        if rank is None:
            return False
        where = self._where(rank.rank)
        self.killed = {rank.rank}
        self.names = [
            rf"rank {rank.rank} on {where} failed: killed by signal 9",
            # A rank of an earlier start, or a host that was lost at the same time.
            rf"lost {where}:",
        ]
        _signal(rank.pid, signal.SIGKILL)
        return True


class KillAllRanks(Fault):
    """SIGKILL of all ranks at once."""

    name = "SIGKILL of all ranks"

    def inject(self) -> bool:
        alive = self.job.alive()
        self.killed = set(alive)
        self.names = [r"rank \d+ on \S+ failed: killed by signal 9", r"lost \S+:"]
        for rank in alive.values():
            _signal(rank.pid, signal.SIGKILL)
        return bool(alive)


class KillAgent(Fault):
    """SIGKILL of an agent. The kernel ends its ranks."""

    name = "SIGKILL of an agent"

    def inject(self) -> bool:
        found = self._agent()
        if found is None:
            return False
        rank, agent = found
        # The agents of a smaller job are on other hosts, and mpirun starts one for each rank.
        self.killed = {
            r for r, each in self.job.alive().items() if self.job.agent_of(each) == agent
        }
        self.names = [rf"lost {self._where(rank.rank)}:"]
        _signal(agent.pid, signal.SIGKILL)
        return True


class KillLauncher(Fault):
    """SIGKILL of the launcher. The user runs the same command again at once."""

    name = "SIGKILL of the launcher"
    relaunch = True

    def inject(self) -> bool:
        assert self.job.process is not None
        if self.job.status() is not None:
            return False
        self.job.process.kill()
        self.job.process.wait(30)
        return True


class StopJob(Fault):
    """A request to the launcher to stop the job. The user runs the same command again."""

    name = "SIGTERM or SIGINT of the launcher"

    def inject(self) -> bool:
        if self.job.status() is not None:
            return False
        self.names = [
            r"stopped; start the job again",
            r"ended by SIG(TERM|INT)",
            r"got SIG(TERM|INT)|SIG(TERM|INT): asking|SIG(TERM|INT); the job ends",
            r"did not stop within",
        ]
        self.job.stop(self.draw.choice([signal.SIGTERM, signal.SIGINT]))
        return True


class TerminateRank(Fault):
    """SIGTERM of one rank, as before a preemption: it saves a checkpoint, or ends."""

    name = "SIGTERM of a rank"

    def inject(self) -> bool:
        rank = self._rank()
        if rank is None:
            return False
        self.killed = {rank.rank}
        self.names = [
            r"stopped; start the job again",
            rf"rank {rank.rank} on {self._where(rank.rank)} failed: (killed by|exit status)",
        ]
        _signal(rank.pid, signal.SIGTERM)
        return True


class StopRank(Fault):
    """SIGSTOP of a rank, and SIGCONT before or shortly after the first verdict."""

    name = "SIGSTOP of a rank, then SIGCONT"
    early = False

    def inject(self) -> bool:
        rank = self._rank()
        if rank is None:
            return False
        self._pid = rank.pid
        self.seconds = self.draw.choice([0.2, 1.0, 2.0, STALL_SECONDS + 1.5])
        self.names = [rf"Rank {rank.rank}\b.* stopped", rf"rank {rank.rank} on "]
        _signal(rank.pid, signal.SIGSTOP)
        return True

    def lift(self) -> None:
        _signal(self._pid, signal.SIGCONT)


class StopRankForGood(Fault):
    """SIGSTOP of a rank, without SIGCONT."""

    name = "SIGSTOP of a rank"
    weight = 2
    early = False

    def inject(self) -> bool:
        rank = self._rank()
        if rank is None:
            return False
        self.killed = {rank.rank}
        self.names = [rf"Rank {rank.rank}\b.* stopped"]
        _signal(rank.pid, signal.SIGSTOP)
        return True


class StopAgent(Fault):
    """SIGSTOP of an agent, and SIGCONT."""

    name = "SIGSTOP of an agent, then SIGCONT"
    weight = 2

    def inject(self) -> bool:
        found = self._agent()
        if found is None:
            return False
        self._pid = found[1].pid
        self.seconds = self.draw.choice([0.5, 2.0, STALL_SECONDS + 1.0, HOST_SECONDS + 3.0])
        self.names = [rf"{self._where(found[0].rank)}"]
        _signal(self._pid, signal.SIGSTOP)
        return True

    def lift(self) -> None:
        _signal(self._pid, signal.SIGCONT)


class StopLauncher(Fault):
    """SIGSTOP of the launcher, and SIGCONT."""

    name = "SIGSTOP of the launcher, then SIGCONT"
    weight = 2

    def inject(self) -> bool:
        assert self.job.process is not None
        self.seconds = self.draw.choice([0.5, 2.0, 6.0, HOST_SECONDS + 3.0])
        if self.seconds > HOST_SECONDS:
            self.names = ["this launcher did not run for"]
        _signal(self.job.process.pid, signal.SIGSTOP)
        return self.job.status() is None

    def lift(self) -> None:
        assert self.job.process is not None
        _signal(self.job.process.pid, signal.SIGCONT)


class LimitMemory(Fault):
    """A limit of the address space below what a rank has: each new allocation fails."""

    name = "memory limit of a rank"
    weight = 2

    def inject(self) -> bool:
        rank = self._rank()
        if rank is None:
            return False
        self._pid = rank.pid
        self.seconds = 2.0
        self.killed = {rank.rank}
        self.names = [
            rf"rank {rank.rank} on {self._where(rank.rank)} failed",
            # Its engine may hang, because it cannot raise an exception without memory.
            rf"Rank {rank.rank} on \S+ has not called it",
        ]
        try:
            self._before = resource.prlimit(rank.pid, resource.RLIMIT_AS, (1 << 20, -1))
        except ProcessLookupError:
            return False
        return True

    def lift(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._pid, resource.RLIMIT_AS, self._before)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


#: The faults of processes.
FAULTS: list[type[Fault]] = [
    KillRank,
    KillAllRanks,
    KillAgent,
    KillLauncher,
    StopJob,
    TerminateRank,
    StopRank,
    StopRankForGood,
    StopAgent,
    StopLauncher,
    LimitMemory,
]
