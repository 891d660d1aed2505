"""One job of `hvdkit run`, as a user starts it, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.search.chaos.settings import ELASTIC, NODES, Setting
from tests.search.chaos.world import REPOSITORY, World
from tests.unit.checkpoint import s3_server

#: Seconds without progress before a verdict, and before the job ends.
STALL_SECONDS, LIMIT_SECONDS = 3, 7
#: Seconds without an answer after which a host is lost. The default is 30.
HOST_SECONDS = 8
_PACE_SECONDS = 0.03
_STOP_SECONDS = 25
_START_SECONDS = 20
_PORT = 29400
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
        #: The running command; with `--nodes` that of node 0.
        self.process: subprocess.Popen[bytes] | None = None
        self.commands = 0
        self._others: list[subprocess.Popen[bytes]] = []
        self._hostfile = self.folder / "hosts"
        self.set_hosts(self.host_names)

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

    def set_hosts(self, names: Sequence[str]) -> None:
        """Set the hosts of an elastic job."""
        slots = self.setting.ranks // self.setting.hosts
        draft = self.folder / "hosts.draft"
        draft.write_text("".join(f"{name} slots={slots}\n" for name in names))
        draft.replace(self._hostfile)

    def commands_of_hosts(self) -> list[list[str]]:
        """Return the command lines of the launcher; with `--nodes` one for each node."""
        setting = self.setting
        if setting.started != NODES or not self.saves:
            command = self._command(*self._on_hosts())
            if setting.hosts > 1:
                assert self.world.cluster is not None
                return [self.world.cluster.hosts[0].command(command)]
            return [command]
        assert self.world.cluster is not None
        hosts = self.world.cluster.hosts[: setting.hosts]
        place = ("--nodes", str(len(hosts)), "--rdzv", f"{hosts[0].address}:{_PORT}")
        return [
            host.command(self._command(*place, "--node-rank", str(number)))
            for number, host in enumerate(hosts)
        ]

    def _on_hosts(self) -> list[str]:
        """Return the arguments with the hosts of a job that is started from one of them."""
        setting = self.setting
        hosts = [f"{name}:{setting.ranks // setting.hosts}" for name in self.host_names]
        words = ["--launcher", setting.controller]
        if setting.started == ELASTIC and self.saves:
            words += ["--elastic", "--hostfile", str(self._hostfile)]
        elif setting.hosts > 1:
            words += ["-H", ",".join(hosts)]
        if setting.hosts > 1:
            assert self.world.access is not None
            words += [f"--ssh-arg=-F{self.world.access.config}", "--no-preflight"]
            for name in [*_ENV, *setting.program[1]]:
                words += ["-x", name]
        return words

    def _command(self, *words: str) -> list[str]:
        setting = self.setting
        command = [sys.executable, "-m", "hvdkit", "run", *words]
        command += ["--output-dir", str(self.folder / "runs")]
        command += ["--stop-grace", str(_STOP_SECONDS), "--host-timeout", str(HOST_SECONDS)]
        command += ["--start-timeout", str(_START_SECONDS)]
        if setting.started == ELASTIC and self.saves:
            command += ["--min-np", str(setting.min_ranks or setting.ranks)]
            command += ["--restarts", str(setting.restarts), "--max-np", str(setting.ranks)]
        else:
            command += ["-np", str(setting.ranks)]
            if setting.restarts and self.saves:
                command += ["--restarts", str(setting.restarts)]
                command += ["--min-np", str(setting.min_ranks)] if setting.min_ranks else []
        command += [] if setting.spares else ["--no-spares"]
        program = Path(__file__).with_name(setting.program[0])
        command += [*self._with_clock(), sys.executable, str(program), str(self.out)]
        for name in ("wire", "accumulation", "steps"):
            command += [f"--{name}", str(getattr(setting, name))]
        if self.saves:
            command += ["--checkpoints", self.checkpoints, "--pace", str(_PACE_SECONDS)]
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
        env = dict(os.environ) | _ENV | self.setting.program[1]
        env |= {"TMPDIR": str(self.world.temporary), "HVDKIT_JOB_KEY": "0123456789abcdef"}
        env["PYTHONPATH"] = str(REPOSITORY)
        if self.setting.store == "s3":
            env |= s3_server.CREDENTIALS | {"AWS_ENDPOINT_URL": self.world.store.address}
        self.commands += 1
        started = []
        for number, command in enumerate(self.commands_of_hosts()):
            name = f"node{number}" if number else "launcher"
            with (
                (self.folder / f"{name}.err").open("ab") as errors,
                (self.folder / f"{name}.out").open("ab") as out,
            ):
                process = subprocess.Popen(
                    command,
                    env=env,
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    start_new_session=True,
                )
            started.append(process)
        self.process, *self._others = started

    def status(self) -> int | None:
        """Return the exit status of the command; None while it runs on a host."""
        assert self.process is not None
        if any(process.poll() is None for process in [self.process, *self._others]):
            return None
        return self.process.returncode

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
        """Return the agent of a rank: the parent of its keeper."""
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(psutil.Process(start.pid).ppid()).parent()
            words = parent.cmdline() if parent is not None else []
            if "hvdkit.launch.agent.main" in words or "--node-rank" in words:
                return parent
        return None

    def host_of(self, rank: int) -> str:
        """Return the name of the host on which a rank of the full job runs."""
        slots = self.setting.ranks // self.setting.hosts
        return self.host_names[rank // slots]

    def passes(self) -> list[tuple[int, float]]:
        """Return the process of rank 0 and the time (monotonic), for each pass so far."""
        found = lines_of(self.out / "losses.0")
        return [(int(line[0]), float(line[4])) for line in found if len(line) == 5]

    def resumed(self) -> list[int]:
        """Return the step from which rank 0 has resumed, for each start so far."""
        return [int(line[1]) for line in lines_of(self.out / "resumed.0") if len(line) == 2]

    def finished(self) -> bool:
        """Return whether the command has succeeded."""
        return self.process is not None and self.status() == 0

    @property
    def committed(self) -> int:
        """The step of the last commit of an elastic job."""
        found = lines_of(self.out / "committed")
        return int(found[-1][0]) if found else 0

    def stop(self, number: int) -> None:
        """Ask the job to stop, as Ctrl-C does."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def ended_starts(self) -> list[Path]:
        """Return the output folders of the starts that have failed by themselves."""
        found = []
        for path in (self.folder / "runs").glob("2*/start.json"):
            with contextlib.suppress(ValueError):
                if json.loads(path.read_text())["failed"]:
                    found.append(path.parent)
        return found

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
        for process in [self.process, *self._others]:
            if process is not None:
                process.kill()
                process.wait(30)
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
