"""A running mpirun or srun, and what it says."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hvdkit.errors import HvdkitError
from hvdkit.launch.control import readers
from hvdkit.launch.hosts.ssh import LOST_LINE
from hvdkit.system.processes import ProcessGroup, exit_text

# The seconds in which mpirun and srun should end by themselves after their ranks.
_END_SECONDS = 10.0
# What srun says if it ends all tasks, and the seconds in which it then ends.
_STEP_ABORTED, _ABORT_SECONDS = "Job step aborted", 2.0
# The last lines of it that are kept.
_KEPT_LINES = 1000


def cannot_accept(problem: str) -> str:
    return f"this machine has closed connections of agents: {problem}"


class ExternalLauncher:
    """A running mpirun or srun, whose output is shown to the user.

    When a rank fails, Open MPI describes the failure as that of its agent, in 16 lines that blame
    the program for a missing call. So what mpirun says after the end of an agent is held back, and
    shown only if the outcome of the job does not explain its end. What srun says is always shown:
    it may tell that a process used too much memory.

    Args:
        name: mpirun or srun.
        holds: returns whether to hold back what it says now, given `explained`.

    Attributes:
        explained: whether the outcome explains the end of the job by something other than the loss
            of an agent.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        holds: Callable[[bool], bool],
    ) -> None:
        self._name = name
        self._group = ProcessGroup()
        process = self._group.start(command, env, "/", stdout=subprocess.PIPE)
        assert process.stdout
        self._process = process
        self._pipe = process.stdout
        self.explained = False
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._holds = holds
        self._held: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def check(self, problem: str) -> None:
        """Raise HvdkitError if mpirun or srun has ended. Called until all agents have connected.

        Args:
            problem: `Listener.problem`.
        """
        if (status := self._process.poll()) is not None:
            self._reader.join(timeout=1)
            if problem:  # an agent whose connection is closed ends, and then mpirun ends
                raise HvdkitError(cannot_accept(problem))
            raise HvdkitError(
                f"{self._name} ended with status {status} before all ranks were started; see its "
                f"messages above"
            )

    def killed(self) -> str:
        """Return a sentence if a signal has ended mpirun or srun; otherwise ""."""
        status = self._process.poll()
        return f"{self._name} was {exit_text(status)}" if status is not None and status < 0 else ""

    def lost_line(self) -> str:
        """Return the line in which its ssh says that it has lost a host; "" for none."""
        return next(filter(LOST_LINE.search, list(self._lines)), "")

    def aborted(self) -> str:
        """Return "srun" if Slurm has ended the job step, and so all ranks; otherwise "".

        For example, Slurm does so if a rank ends in the middle of MPI (`--mpi=pmix`), or on
        `scancel`.
        """
        if self._name != "srun":
            return ""
        # srun says so before it ends.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ABORT_SECONDS)
            self._reader.join(timeout=1)
        return self._name if any(_STEP_ABORTED in line for line in list(self._lines)) else ""

    def show_held(self) -> None:
        """Show what was held back."""
        for text in self._held:
            readers.say(text)
        self._held.clear()

    def end(self) -> None:
        """Wait a few seconds for mpirun or srun to end by itself, then end it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        for _ in self._group.terminate(_END_SECONDS):
            time.sleep(0.05)
        self._reader.join(timeout=1)
        if not self._reader.is_alive():
            self._pipe.close()

    def _read(self) -> None:
        own = f"{self._name}: "
        for line in self._pipe:
            # PRRTE, the mpirun of Open MPI 5, writes lines with only a zero byte.
            if text := line.decode(errors="replace").strip("\0 \t\r\n"):
                text = own + text.removeprefix(own)
                self._lines.append(text)
                if self._holds(self.explained):
                    self._held.append(text)
                else:
                    readers.say(text)
