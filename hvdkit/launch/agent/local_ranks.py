"""Start, signal and end the ranks of one host, in the agent of the host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from hvdkit.faults.names import STOPPED
from hvdkit.faults.record_folder import RecordFolder
from hvdkit.launch.agent import library_folders
from hvdkit.launch.agent.keeper import ORPHAN_GRACE, KeptGroup
from hvdkit.launch.agent.memory_kills import MemoryKills
from hvdkit.launch.agent.spares.pool import Slot, SparePool
from hvdkit.launch.agent.spares.spare import with_hook
from hvdkit.launch.control.messages import Message
from hvdkit.mpi.segments import SegmentFolder, mpich_files
from hvdkit.runtime.recorder import FOLDER_VARIABLE
from hvdkit.system.processes import StartedProcess

#: The rank as which the first Python of a rank's command reports its end.
REPORT_RANK = "HVDKIT_REPORT_RANK"
_STREAMS = ("stdout", "stderr")
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_POLL_SECONDS = 0.05


class RankProcess:
    """One rank's process, and the pipes for its output.

    Attributes:
        reported: whether the agent has told the launcher that the process has ended.
        init_state: how far Horovod is in the rank, as for `RecordFolder.init_state`. Set by the
            agent of one rank.
        pipes: the descriptor of each open pipe -> the name of the stream.
        memory: tells whether the kernel has killed the process for lack of memory.
    """

    def __init__(self, rank: int, process: StartedProcess) -> None:
        self.rank = rank
        self.process = process
        self.reported = False
        self.init_state = (0, False, False)
        self.memory = MemoryKills(process.pid)
        self.pipes: dict[int, str] = {}
        for stream, pipe in zip(_STREAMS, (process.stdout, process.stderr), strict=True):
            if pipe is not None:  # None: the rank writes to the user's terminal
                os.set_blocking(pipe.fileno(), False)
                self.pipes[pipe.fileno()] = stream

    def state(self) -> str:
        """Return `STOPPED` if the process or one of its children is stopped; "" otherwise."""
        try:
            process = psutil.Process(self.process.pid)
            family = [process, *process.children(recursive=True)]
            stopped = any(p.status() in _STOPPED for p in family)
        except psutil.Error:
            return ""
        return STOPPED if stopped else ""


class LocalRanks:
    """The ranks of this host in one start, and the spares for the next one.

    Args:
        ranks: the field `ranks` of the `start` message; empty between two starts.
        environment: the environment that ranks inherit.
        descriptors: the descriptors that ranks inherit, besides their streams.
        terminal: the descriptors of the user's terminal (input, output, errors), for the rank that
            gets it.
        job: as for `RecordFolder`.
        spares: the spares of the start before.

    Attributes:
        records: the folder for their records.
        spares: the spares for the next start.
    """

    def __init__(
        self,
        ranks: Sequence[Message],
        task: Message,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        terminal: Sequence[int],
        job: str,
        spares: SparePool,
    ) -> None:
        self.all: list[RankProcess] = []
        self.records = RecordFolder(job)
        self._task = task
        self._descriptors, self._terminal = descriptors, terminal
        self._before = self.spares = spares
        self._group = spares.group if ranks else KeptGroup()
        self._mpich_files: set[Path] = set()
        self._segments: SegmentFolder | None = None
        self._slots: list[tuple[Slot, bool]] = []
        if not ranks:
            return
        records = {FOLDER_VARIABLE: str(self.records.path)}
        # Also over Gloo, because libraries such as Lightning may start MPI in a rank.
        self._segments = SegmentFolder()
        for rank in ranks:
            defaults = {**self._segments.variables, **rank["defaults"]}
            own = records | {REPORT_RANK: str(rank["rank"])}
            variables = defaults | dict(environment) | rank["env"] | own
            variables = library_folders.variables(variables, self.records.path) | variables
            self._slots.append((Slot(rank["rank"], variables, rank["cpus"]), rank["terminal"]))
        watched = [slot for slot, _ in self._slots] if task.get("spares") else []
        self.spares = SparePool(task["command"], task["directory"], watched)

    def start(self, report_alive: Callable[[], None]) -> None:
        """Start the ranks, with spares where they fit.

        Args:
            report_alive: called repeatedly, because the start of many ranks takes long.

        Raises:
            HvdkitError: a rank cannot be started.
        """
        started = self._before.claim([slot for slot, _ in self._slots], report_alive)
        pipes = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
        for slot, terminal in self._slots:
            stdin, stdout, stderr = self._terminal if terminal else pipes
            process = started.get(slot.rank) or self._group.start(
                self._task["command"],
                with_hook(slot.environment),
                self._task["directory"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cpus=slot.cpus,
                pass_fds=self._descriptors,
            )
            self.all.append(RankProcess(slot.rank, process))
            report_alive()

    def signal(self, number: int) -> None:
        """Send a signal to the main process of each rank.

        Other processes that a rank has started get no signal: they must not end before the rank.
        """
        for rank in self.all:
            rank.process.send_signal(number)

    def find_mpich_files(self) -> None:
        """Find the files that MPICH leaves if ranks are killed. Call it after MPI's start."""
        for rank in self.all:
            self._mpich_files.update(mpich_files(rank.process.pid))

    def states(self) -> dict[int, str]:
        """Return the state of each rank, see `RankProcess.state`."""
        return {rank.rank: rank.state() for rank in self.all}

    def terminate(self, grace: float) -> Iterator[None]:
        """End every process of the ranks, as `ProcessGroup.terminate` does. Spares stay."""
        return self._group.terminate(grace)

    def close(self) -> None:
        """Close the pipes, and delete the folders. Every process of the ranks has ended."""
        self._group.close()
        self.records.remove()
        if self._segments is not None:
            self._segments.remove()
        for file in self._mpich_files:
            with contextlib.suppress(OSError):
                file.unlink()

    def end(self) -> None:
        """End every process of the ranks and every spare, and wait for them.

        Raises:
            HvdkitError: a process still runs after SIGKILL. The folders are deleted nevertheless.
        """
        self.spares.end()
        try:
            for _ in self.terminate(ORPHAN_GRACE):
                time.sleep(_POLL_SECONDS)
        finally:
            self.close()
