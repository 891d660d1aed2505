"""One job of `hvdkit run`, as a user starts it, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.settings import PROGRAMS, Setting
from tests.chaos.world import REPOSITORY, World
from tests.checkpoint import s3_server

#: Seconds without progress before a verdict, and before the job ends.
STALL_SECONDS, LIMIT_SECONDS = 4, 10
_PACE_SECONDS = 0.03
_STOP_SECONDS = 40
_ENV = {
    "OMP_NUM_THREADS": "1",
    "HVDKIT_STALL_TIMEOUT": str(STALL_SECONDS),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(LIMIT_SECONDS),
}


@dataclass(frozen=True)
class Start:
    """One start of a rank: the process, its rank, the size of its job, and its helper process."""

    pid: int
    rank: int
    size: int
    helper: int


class Job:
    """A job. The same command is started again and again.

    Args:
        setting: the job.
        world: where it runs.
        saves: whether it saves checkpoints.
    """

    def __init__(self, setting: Setting, world: World, saves: bool = True) -> None:
        self.setting = setting
        self.world = world
        self.saves = saves
        self.folder = world.new_folder()
        self.out = self.folder / "out"
        self.out.mkdir()
        self.clock = self.folder / "clock"
        self.set_clock(0)
        self.errors = self.folder / "launcher.err"
        self.errors.touch()
        self.process: subprocess.Popen[bytes] | None = None
        self.commands = 0

    @property
    def checkpoints(self) -> str:
        """The place of the checkpoints."""
        if self.setting.store == "s3":
            return f"s3://{s3_server.BUCKET}/{self.world.folder.name}/{self.folder.name}"
        if self.setting.store == "elsewhere":
            return f"{self.world.elsewhere}/{self.folder.name}"
        return str(self.world.disk / self.folder.name)

    @property
    def host_names(self) -> list[str]:
        """The hosts, as the launcher names them."""
        if self.setting.hosts == 1:
            return ["localhost"]
        assert self.world.cluster is not None
        return [host.name for host in self.world.cluster.hosts[: self.setting.hosts]]

    def command(self) -> list[str]:
        """Return the command line of the launcher."""
        setting = self.setting
        command = [sys.executable, "-m", "hvdkit", "run", "-np", str(setting.ranks)]
        command += ["--output-dir", str(self.folder / "runs"), "--launcher", setting.controller]
        command += ["--stop-grace", str(_STOP_SECONDS)]
        if setting.restarts and self.saves:
            command += ["--restarts", str(setting.restarts)]
            command += ["--min-np", str(setting.min_ranks)] if setting.min_ranks else []
        if setting.hosts > 1:
            assert self.world.access is not None
            slots = setting.ranks // setting.hosts
            command += [f"--ssh-arg=-F{self.world.access.config}", "--no-preflight"]
            command += ["-H", ",".join(f"{name}:{slots}" for name in self.host_names)]
            for name in [*_ENV, *PROGRAMS[setting.framework][1]]:
                command += ["-x", name]
        program = Path(__file__).with_name(PROGRAMS[setting.framework][0])
        command += [*self._with_clock(), sys.executable, str(program), str(self.out)]
        for name in ("wire", "accumulation", "steps"):
            command += [f"--{name}", str(getattr(setting, name))]
        if self.saves:
            command += ["--checkpoints", self.checkpoints, "--pace", str(_PACE_SECONDS)]
        if setting.hosts > 1:
            assert self.world.cluster is not None
            return self.world.cluster.hosts[0].command(command)
        return command

    def _with_clock(self) -> list[str]:
        """Return the words before the ranks' command that let their clock be changed."""
        if not self.setting.clock:
            return []
        return ["env", f"LD_PRELOAD={self.world.clock}", f"HVDKIT_CHAOS_CLOCK={self.clock}"]

    def set_clock(self, seconds: float) -> None:
        """Set the difference between the ranks' time of day and the machine's."""
        with self.clock.open("r+b" if self.clock.exists() else "w+b") as file:
            file.write(struct.pack("d", seconds))

    def start(self) -> None:
        """Start the command."""
        env = dict(os.environ) | _ENV | PROGRAMS[self.setting.framework][1]
        env |= {"TMPDIR": str(self.world.temporary)}
        env["PYTHONPATH"] = str(REPOSITORY)
        if self.setting.store == "s3":
            env |= s3_server.CREDENTIALS | {"AWS_ENDPOINT_URL": self.world.store.address}
        self.commands += 1
        with self.errors.open("ab") as errors, (self.folder / "launcher.out").open("ab") as out:
            self.process = subprocess.Popen(
                self.command(),
                env=env,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )

    def status(self) -> int | None:
        """Return the exit status of the command; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def said(self, since: int = 0) -> str:
        """Return what the launcher has written to its standard error, from this byte on."""
        return self.errors.read_bytes()[since:].decode(errors="replace")

    def starts(self) -> list[Start]:
        """Return all starts of ranks so far."""
        return [Start(*map(int, line)) for line in lines_of(self.out / "starts") if len(line) == 4]

    def alive(self) -> dict[int, Start]:
        """Return the running ranks."""
        return {start.rank: start for start in self.starts() if _runs(start.pid)}

    def agent_of(self, start: Start) -> psutil.Process | None:
        """Return the agent of a rank: its parent."""
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(start.pid).parent()
            if parent is not None and "hvdkit.launch.agent" in " ".join(parent.cmdline()):
                return parent
        return None

    def host_of(self, rank: int) -> str:
        """Return the name of the host on which a rank of the full job runs."""
        slots = self.setting.ranks // self.setting.hosts
        return self.host_names[rank // slots]

    def passes(self) -> list[tuple[int, int]]:
        """Return the process of rank 0 and the number of steps, for each pass so far."""
        found = lines_of(self.out / "losses.0")
        return [(int(line[0]), int(line[2])) for line in found if len(line) == 4]

    def resumed(self) -> list[int]:
        """Return the step from which rank 0 has resumed, for each start so far."""
        return [int(line[1]) for line in lines_of(self.out / "resumed.0") if len(line) == 2]

    def finished(self) -> bool:
        """Return whether the command has succeeded."""
        return self.status() == 0

    def left(self) -> list[str]:
        """Return the processes of the job that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if str(self.folder) in " ".join(words) and process.pid != os.getpid():
                    found.append(f"{process.pid} {' '.join(words)[:200]}")
        helpers = [start.helper for start in self.starts() if _runs(start.helper)]
        return [*found, *(f"{pid}, the helper of a rank" for pid in helpers)]

    def kill(self) -> None:
        """End everything that was started, after a failure."""
        pids = [int(text.split()[0].rstrip(",")) for text in self.left()]
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def lines_of(path: Path) -> list[list[str]]:
    """Return the words of each complete line."""
    try:
        return [line.split() for line in path.read_text().split("\n")[:-1]]
    except FileNotFoundError:
        return []


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
