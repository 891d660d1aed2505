"""Start, signal and end the ranks of one host, in the agent of the host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from hvdkit.core.recorder import FOLDER_VARIABLE
from hvdkit.faults.process_states import STOPPED
from hvdkit.faults.record_folder import RecordFolder
from hvdkit.launch.keeper import ORPHAN_GRACE, KeptGroup
from hvdkit.launch.memory_kills import MemoryKills
from hvdkit.launch.messages import Message
from hvdkit.launch.spares.pool import Slot, SparePool
from hvdkit.launch.spares.spare import with_hook
from hvdkit.mpi_segments import SegmentFolder, mpich_files
from hvdkit.processes import StartedProcess, without_rank_variables

#: The rank as which the first Python of a rank's command reports its end.
REPORT_RANK = "HVDKIT_REPORT_RANK"
_STREAMS = ("stdout", "stderr")
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_POLL_SECONDS = 0.05


class RankProcess:
    """One rank's process, and the pipes for its output.

    Args:
        rank: the rank.
        process: its process.

    Attributes:
        reported: whether the agent has told the launcher that the process has ended.
        script_status: the exit status with which the script has ended, although its process still
            runs; None while it runs. Set by the agent.
        init_state: how far Horovod is in the rank, as for `RecordFolder.init_state`. Set by the
            agent of one rank.
        pipes: the descriptor of each open pipe -> the name of the stream.
        memory: tells whether the kernel has killed the process for lack of memory.
    """

    def __init__(self, rank: int, process: StartedProcess) -> None:
        self.rank = rank
        self.process = process
        self.reported = False
        self.script_status: int | None = None
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

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.pipes.clear()


class LocalRanks:
    """The ranks of this host in the current start, and the spares for the next one.

    Args:
        keep_rank_variables: whether ranks inherit the rank variables of this process, such as those
            that MPI needs.
        terminal: the descriptors of the user's terminal (input, output, errors), for the rank that
            gets it.
        job: as for `RecordFolder`.

    Attributes:
        all: the ranks.
        records: the folder for their records.
        kills_at: the time of SIGKILL (`time.monotonic`) after the last `terminate`; infinite before
            its first step.
    """

    def __init__(self, keep_rank_variables: bool, terminal: Sequence[int], job: str = "") -> None:
        self.all: list[RankProcess] = []
        self._job = job
        self.records = RecordFolder(job)
        self.kills_at = float("inf")
        self._segments: SegmentFolder | None = None
        self._mpich_files: set[Path] = set()
        self._keep_rank_variables = keep_rank_variables
        self._terminal = terminal
        self._group = KeptGroup()
        self._spares = SparePool()

    def start(
        self, ranks: Sequence[Message], task: Message, report_alive: Callable[[], None]
    ) -> None:
        """Start ranks, with spares where they fit.

        Args:
            ranks: the field `ranks` of the `start` message.
            task: the `task` message.
            report_alive: called repeatedly, because the start of many ranks takes long.

        Raises:
            HvdkitError: a rank cannot be started.
        """
        keeps = self._keep_rank_variables
        env = dict(os.environ) if keeps else without_rank_variables(os.environ)
        # Also over Gloo, because libraries such as Lightning may start MPI in a rank.
        self._segments = SegmentFolder()
        segments = dict(self._segments.variables)
        own = {FOLDER_VARIABLE: str(self.records.path)}

        def environment(rank: Message) -> dict[str, str]:
            reports = {REPORT_RANK: str(rank["rank"])}
            return segments | rank["defaults"] | env | rank["env"] | own | reports

        slots = [Slot(rank["rank"], environment(rank), rank["cpus"]) for rank in ranks]
        self._group, started = self._spares.claim(slots, report_alive)
        for rank, slot in zip(ranks, slots, strict=True):
            process = started.get(slot.rank) or self._start(slot, rank["terminal"], task)
            self.all.append(RankProcess(slot.rank, process))
            report_alive()
        if task.get("spares"):
            self._spares.watch(task["command"], task["directory"], slots)

    def _start(self, slot: Slot, terminal: bool, task: Message) -> StartedProcess:
        pipes = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
        stdin, stdout, stderr = self._terminal if terminal else pipes
        # Hydra, the mpirun of MPICH, communicates with ranks over a descriptor that they inherit.
        hydra = self._keep_rank_variables and "PMI_FD" in os.environ
        return self._group.start(
            task["command"],
            with_hook(slot.environment),
            task["directory"],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cpus=slot.cpus,
            pass_fds=[int(os.environ["PMI_FD"])] if hydra else [],
        )

    def prepare_spares(self) -> None:
        """Take the next step of preparing spares. Call it about once a second."""
        self._spares.step(self.records.path)

    def signal(self, number: int) -> None:
        """Send a signal to the main process of each rank.

        Other processes that a rank has started get no signal: they must not end before the rank.
        """
        for rank in self.all:
            if rank.process.poll() is None:
                # With sudo as the command, this user may not signal the rank.
                with contextlib.suppress(PermissionError):
                    rank.process.send_signal(number)

    def find_mpich_files(self) -> None:
        """Find the files that MPICH leaves if ranks are killed. Call it after MPI's start."""
        for rank in self.all:
            self._mpich_files |= mpich_files(rank.process.pid)

    def states(self) -> dict[int, str]:
        """Return the state of each rank, see `RankProcess.state`."""
        return {rank.rank: rank.state() for rank in self.all}

    def terminate(self, grace: float) -> Iterator[None]:
        """End every process of the ranks, as `ProcessGroup.terminate` does. Spares stay."""
        # A generator, which reads the group at its first step. A signal handler may call this
        # function during a start, which replaces the group.
        self.kills_at = time.monotonic() + grace
        yield from self._group.terminate(grace)

    def forget(self) -> None:
        """Prepare for the next start. Every process of the ranks has ended."""
        for rank in self.all:
            rank.close()
        self.all = []
        self._group.close()
        self._remove_folders()
        self.records = RecordFolder(self._job)
        self.kills_at = float("inf")

    def end(self) -> None:
        """End every process of the ranks and every spare, and wait for them.

        Raises:
            HvdkitError: a process still runs after SIGKILL. The folders are deleted nevertheless.
        """
        self._spares.end()
        try:
            for _ in self.terminate(ORPHAN_GRACE):
                time.sleep(_POLL_SECONDS)
        finally:
            self._group.close()
            self._remove_folders()

    def _remove_folders(self) -> None:
        self.records.remove()
        if self._segments is not None:
            self._segments.remove()
        for file in self._mpich_files:
            with contextlib.suppress(OSError):
                file.unlink()
