"""Faults of what a job runs on: network, hosts, disk, object store, clock."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import ClassVar

from hvdkit.bench.namespaces import Host
from hvdkit.launch.agent.host_folders import PREFIX, STEPS_PREFIX
from hvdkit.system.owned_folders import remove_abandoned
from tests.search.chaos.faults import Fault
from tests.search.chaos.job import HOST_SECONDS, Job
from tests.search.chaos.settings import ELASTIC

_SECONDS = 30
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_NO_SPACE = r"No space left on device"


class _OfHost(Fault):
    """A fault of a host other than the launcher's."""

    host: Host

    @classmethod
    def possible(cls, job: Job) -> bool:
        return job.setting.hosts > 1

    def inject(self) -> bool:
        assert self.job.world.cluster is not None
        self.host = self.draw.choice(self.job.world.cluster.hosts[1 : self.job.setting.hosts])
        slots = self.job.setting.ranks // self.job.setting.hosts
        first = self.job.host_names.index(self.host.name) * slots
        # Ranks of a smaller job have other numbers.
        smaller = self.job.setting.min_ranks is not None
        self.killed = set(range(self.job.setting.ranks) if smaller else range(first, first + slots))
        ranks = r"\d+" if smaller else "|".join(map(str, sorted(self.killed)))
        self.names = [
            rf"lost {self.host.name}:",
            rf"left out: {self.host.name}:",
            rf"{self.host.name}: .*(did not answer|cannot be reached|no ssh server|timed out)",
            rf"Ranks? [^\n]*\b({ranks})\b[^\n]* (has|have) not called it",
            rf"ranks? ({ranks}) on {self.host.name} failed",
            # After a link that is up again, all ranks report that they wait.
            rf"{self.host.name} (has not answered|did not answer) the launcher",
        ]
        return self.host.name in {self.job.host_of(r) for r in self.job.alive()} or bool(
            self.job.setting.min_ranks
        )


class LinkDown(_OfHost):
    """The link of a host is down for some seconds."""

    name = "link down"

    def inject(self) -> bool:
        self.seconds = self.draw.choice([0.5, 1.0, 3.0, HOST_SECONDS + 2.0])
        found = super().inject()
        if found:
            _link(self.host, "down")
        return found

    def lift(self) -> None:
        _link(self.host, "up")


class LinkSlow(_OfHost):
    """The link of a host has 2 Mbit/s for some seconds."""

    name = "link slow"
    weight = 2

    def inject(self) -> bool:
        self.seconds = 3.0
        found = super().inject()
        # The launcher's short messages still arrive in time.
        self.names = [*self.names, "All ranks have called it: the network or a rank"]
        if found:
            _run("tc", "qdisc", "add", "dev", self.host.namespace, "root", *_BUCKET)
        return found

    def lift(self) -> None:
        _run("tc", "qdisc", "del", "dev", self.host.namespace, "root")


_BUCKET = ("tbf", "rate", "2mbit", "burst", "16kb", "latency", "50ms")


class Reboot(_OfHost):
    """All processes of a host are killed, and its ssh server comes back after some seconds."""

    name = "reboot of a host"
    weight = 4
    #: Whether the host goes down without closing its connections.
    power_cut: ClassVar[bool] = False

    def inject(self) -> bool:
        self.seconds = self.draw.uniform(0.5, 4.0)
        found = super().inject()
        if found:
            if self.power_cut:
                _link(self.host, "down")
            for pid in self.host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return found

    def lift(self) -> None:
        if self.power_cut:
            _link(self.host, "up")
        for parent in (self.job.world.temporary, Path("/dev/shm")):
            # A host loses its memory. Here, all hosts share it.
            for prefix in (PREFIX, STEPS_PREFIX):
                remove_abandoned(parent, prefix)
        self.job.world.start_ssh(self.host)


class PowerCut(Reboot):
    """A reboot without the end of the host's connections, which the other hosts do not notice."""

    name = "power cut of a host"
    weight = 2
    power_cut = True

    def inject(self) -> bool:
        found = super().inject()
        self.seconds = self.draw.choice([2.0, HOST_SECONDS + 4.0])
        return found


class HostLeaves(Fault):
    """A host of an elastic job is removed from the list of hosts, and added again."""

    name = "host removed and added"
    weight = 6

    @classmethod
    def possible(cls, job: Job) -> bool:
        setting = job.setting
        return setting.started == ELASTIC and setting.hosts > 1 and setting.min_ranks is not None

    def inject(self) -> bool:
        self.seconds = self.draw.choice([0.5, 4.0, 8.0])
        names = self.job.host_names
        gone = self.draw.choice(names[1:])
        self.names = ["the hosts have changed"]
        self.job.set_hosts([name for name in names if name != gone])
        return True

    def lift(self) -> None:
        self.job.set_hosts(self.job.host_names)


class FullDisk(Fault):
    """The disk of the checkpoints is full for some seconds."""

    name = "disk full"

    @classmethod
    def possible(cls, job: Job) -> bool:
        return job.setting.store == "folder" and os.path.ismount(job.world.disk)

    def __init__(self, draw: random.Random, job: Job) -> None:
        super().__init__(draw, job)
        self._ballast = job.world.disk / "ballast"
        self.names = [_NO_SPACE]

    def inject(self) -> bool:
        self.seconds = self.draw.choice([0.3, 1.0, 3.0])
        _fill(self._ballast)
        return True

    def lift(self) -> None:
        self._ballast.unlink()


def _fill(path: Path) -> None:
    piece = bytes(100_000)
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while piece:
            try:
                file.write(piece)
            except OSError:
                piece = piece[: len(piece) // 2]


class DamageStep(Fault):
    """The newest step is damaged on the disk while no rank runs."""

    name = "damaged newest step"
    early = False
    damages = True

    @classmethod
    def possible(cls, job: Job) -> bool:
        return job.setting.store == "folder"

    def __init__(self, draw: random.Random, job: Job) -> None:
        super().__init__(draw, job)
        self.names = [r"rank \d+ on \S+ failed: killed by signal 9"]

    def inject(self) -> bool:
        if len(list(Path(self.job.checkpoints).glob("step-*"))) < 2:
            return False  # without an older step, the job must end
        alive = self.job.alive()
        self.killed = set(alive)
        # Rank 0 first, because it writes.
        for rank in sorted(alive):
            with contextlib.suppress(ProcessLookupError):
                os.kill(alive[rank].pid, signal.SIGKILL)
        steps = sorted(Path(self.job.checkpoints).glob("step-*/*"))
        files = [path for path in steps if path.parent == steps[-1].parent and path.is_file()]
        if not alive or not files:
            return False
        path = self.draw.choice(files)
        content = bytearray(path.read_bytes())
        if not content:
            return bool(alive)
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content[: self.draw.choice([len(content), len(content) // 2])])
        return True


class StoreFails(Fault):
    """The object store answers each request with an error for some seconds."""

    name = "object store fails"
    weight = 8

    @classmethod
    def possible(cls, job: Job) -> bool:
        return job.setting.store == "s3"

    def __init__(self, draw: random.Random, job: Job) -> None:
        super().__init__(draw, job)
        self.names = [r"s3://\S+|CheckpointError|InternalError|SlowDown"]

    def inject(self) -> bool:
        self.seconds = self.draw.choice([0.5, 2.0, 8.0])
        answer = self.draw.choice(["500", "503", "cut"])
        self.job.world.store.act = lambda number, method, path: answer
        return True

    def lift(self) -> None:
        self.job.world.store.act = lambda number, method, path: None


class ClockJump(Fault):
    """The time of day of the ranks jumps by up to a day."""

    name = "clock jump"
    weight = 8

    @classmethod
    def possible(cls, job: Job) -> bool:
        return job.setting.clock

    def inject(self) -> bool:
        seconds = self.draw.choice([-86400, -3600, -60, -1, 1, 60, 3600, 86400])
        self.job.set_clock(seconds)
        return True


def _link(host: Host, state: str) -> None:
    _run("ip", "link", "set", host.namespace, state)


def _run(*command: str) -> None:
    subprocess.run(
        command, env={**os.environ, "PATH": _PATH}, check=True, timeout=_SECONDS,
        capture_output=True,
    )  # fmt: skip


#: The faults of what a job runs on.
FAULTS: list[type[Fault]] = [
    LinkDown,
    LinkSlow,
    Reboot,
    PowerCut,
    HostLeaves,
    FullDisk,
    DamageStep,
    StoreFails,
    ClockJump,
]
