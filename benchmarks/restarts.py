"""Measure the time from the loss of a rank, a host or the launcher to the next training step.

`scripts/bench_restart` calls this module for several launchers, in turns. Each launcher runs the
same script (`restart_script`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdkit.bench.namespaces import Cluster, hosts, missing
from hvdkit.engine.describe import installed
from hvdkit.system.owned_folders import TemporaryFolder
from hvdkit.system.processes import ProcessGroup, python_command

_SCRIPT = Path(__file__).parent / "restart_script.py"
_SECONDS = 120.0
# Seconds of training before a failure, and seconds between two checks that spares are idle.
_TRAIN_SECONDS, _IDLE_SECONDS = 2.0, 1.0
# Seconds for a job to end at the end of a measurement.
_END_SECONDS = 30.0
_RANKS = 2
_KEY = "a key for the benchmark"
_PORT = 29400


@dataclass(frozen=True)
class Launcher:
    """A way to run the script.

    Attributes:
        arguments: the command line before the script.
        mode: the mode of the script.
        spares: whether to wait for spare interpreters before a failure.
        most_kills: the most failures of a rank that a job survives.
    """

    arguments: Sequence[str]
    mode: str
    spares: bool = False
    most_kills: int = sys.maxsize


def launchers(folder: Path, python: str = sys.executable) -> Mapping[str, Launcher]:
    """Return the installed launchers, by name. Write their files to `folder`.

    Args:
        folder: a folder that exists while the launchers are used.
        python: the interpreter of the launchers and ranks.
    """
    run = [python, "-P", "-m", "hvdkit", "run", "-np", str(_RANKS), "--restarts", "3"]
    found = {
        "hvdkit run": Launcher([*run, python], "hvdkit", spares=True),
        "hvdkit run --no-spares": Launcher([*run, "--no-spares", python], "hvdkit"),
        **{
            f"hvdkit run, {size} MB in memory": Launcher(
                [*run, python], f"memory-{size}", spares=True
            )
            for size in (100, 1000)
        },
    }
    torchrun = [python, "-P", "-m", "torch.distributed.run"]
    torchrun += [f"--nproc-per-node={_RANKS}", "--max-restarts=100"]
    found["torchrun, hvdkit.torch"] = Launcher(torchrun, "hvdkit")
    found["torchrun, DDP"] = Launcher(torchrun, "ddp")
    if installed() is not None:
        # A host with a failure is not used again, so each rank is on a host of its own.
        script = folder / "hosts.sh"
        script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
        script.chmod(0o755)
        command = [python, "-P", "-m", "horovod.runner.launch", "--gloo", "-np", str(_RANKS)]
        command += ["--min-np", "1", "--max-np", str(_RANKS), "--network-interfaces", "lo"]
        command += ["--host-discovery-script", str(script)]
        found["horovod.runner --min-np"] = Launcher(
            [*command, python], "elastic", most_kills=_RANKS - 1
        )
    return found


def after_kills(launcher: Launcher, count: int, device: str = "cpu") -> list[float]:
    """Kill rank 1 `count` times. Return the seconds from each kill to the next step.

    Args:
        launcher: one of `launchers`.
        count: the number of kills.
        device: where the ranks train, `cpu` or `cuda`.
    """
    times: list[float] = []
    while len(times) < count:
        with _running(launcher, device=device) as job:
            here = min(launcher.most_kills, count - len(times))
            times += [job.kill_rank() for _ in range(here)]
    return times


def after_launcher_kill(launcher: Launcher) -> tuple[float, float]:
    """Kill the launcher, and start it again.

    Returns:
        The seconds from the kill to the end of the last rank, and the seconds from there to the
        first step of the second start.
    """
    with _running(launcher) as job:
        job.train()
        ranks = [psutil.Process(pid) for pid in job.pids()]
        killed_at = time.time()
        job.process.kill()
        job.process.wait()
        psutil.wait_procs(ranks, timeout=_SECONDS)
        ended_at = time.time()
        known = job.starts()
        job.start()
        return ended_at - killed_at, job.next_step(known) - ended_at


def after_host_loss(timeout: float) -> float:
    """Cut one of two hosts off. Return the seconds until the next step, on the other host.

    Args:
        timeout: `--host-timeout`, in seconds.
    """
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    with hosts(2) as cluster, TemporaryFolder("hvdkit-bench-") as name:
        options = ["--restarts", "3", "--min-np", "1", "--host-timeout", f"{timeout:g}"]
        with contextlib.ExitStack() as stack:
            jobs = [
                stack.enter_context(_running(_node(cluster, node, options), Path(name)))
                for node in range(2)
            ]
            jobs[0].next_step(set())
            jobs[0].wait_for_spares(1)
            known = jobs[0].starts()
            lost = cluster.hosts[1]
            cut = ["ip", "-n", lost.namespace, "link", "set", lost.interface, "down"]
            cut_at = time.time()
            subprocess.run(cut, check=True, timeout=20)
            return jobs[0].next_step(known) - cut_at


def _node(cluster: Cluster, node: int, options: Sequence[str]) -> Launcher:
    place = ["--nodes", "2", "--node-rank", str(node), "-np", "2"]
    place += ["--rdzv", f"{cluster.hosts[0].address}:{_PORT}"]
    run = python_command("-m", "hvdkit", "run", *place, *options, sys.executable)
    return Launcher(cluster.hosts[node].command(run), "hvdkit")


class _Job:
    """A running job of a launcher."""

    def __init__(self, launcher: Launcher, folder: Path, device: str) -> None:
        self._launcher = launcher
        self._folder = folder
        self._device = device
        self._group = ProcessGroup()
        self.start()

    def start(self) -> None:
        script = [str(_SCRIPT), self._launcher.mode, str(self._folder), self._device]
        command = [*self._launcher.arguments, *script]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"OMP_NUM_THREADS": "1", "HVDKIT_JOB_KEY": _KEY}
        environment = {**os.environ, **variables, "PATH": path, "TMPDIR": str(self._folder)}
        with (self._folder / "output").open("ab") as output:
            self.process = self._group.start(command, environment, stdout=output)

    def starts(self) -> set[str]:
        """Return the names of the files of all starts of ranks until now."""
        return {path.name for path in self._folder.glob("rank-*")}

    def pids(self) -> list[int]:
        """Return the processes of the ranks that run now."""
        found = {int(name.split("-")[2]) for name in self.starts()}
        return [pid for pid in found if psutil.pid_exists(pid)]

    def next_step(self, known: set[str]) -> float:
        """Wait for the first step of a start that is not in `known`. Return its time."""
        deadline = time.time() + _SECONDS
        while time.time() < deadline:
            times = []
            for name in self.starts() - known:
                line, complete, _ = (self._folder / name).read_text().partition("\n")
                times += [float(line)] if complete else []
            if times:
                return min(times)
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        output = (self._folder / "output").read_text(errors="replace")[-2000:]
        raise SystemExit(f"no step: {' '.join(self._launcher.arguments)}\n{output}")

    def train(self) -> None:
        """Wait until the job has trained for a while, and has its spares."""
        self.next_step(set())
        time.sleep(_TRAIN_SECONDS)
        if self._launcher.spares:
            self.wait_for_spares(_RANKS)

    def kill_rank(self) -> float:
        self.train()
        known = self.starts()
        newest = max(
            (path for path in self._folder.glob("rank-1-*") if psutil.pid_exists(_pid(path))),
            key=lambda path: path.stat().st_mtime,
        )
        killed_at = time.time()
        os.kill(_pid(newest), signal.SIGKILL)
        return self.next_step(known) - killed_at

    def wait_for_spares(self, count: int) -> None:
        """Wait until spares have imported their modules, and use no processor any more."""
        deadline = time.time() + _SECONDS
        before: list[float] = []
        while time.time() < deadline:
            now = []
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "HVDKIT_SPARE" in child.environ() and child.pid not in self.pids():
                        now.append(sum(child.cpu_times()[:2]))
            if len(now) == count and now == before:
                return
            before = now
            time.sleep(_IDLE_SECONDS)
        raise SystemExit(f"{count} spares were not ready and idle within {_SECONDS:g} s")

    def stop(self) -> None:
        for _ in self._group.terminate(_END_SECONDS):
            time.sleep(0.05)


def _pid(path: Path) -> int:
    return int(path.name.split("-")[2])


@contextlib.contextmanager
def _running(launcher: Launcher, folder: Path | None = None, device: str = "cpu") -> Iterator[_Job]:
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(TemporaryFolder("hvdkit-bench-")))
        job = _Job(launcher, folder, device)
        stack.callback(job.stop)
        yield job
