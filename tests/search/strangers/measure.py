"""Attack the ports of a training job of two ranks, and measure what the job notices.

    scripts/attack_job                   # two minutes
    scripts/attack_job --seconds 60 --connections 500 --launcher mpi

All clients are on this machine and connect to 127.0.0.1. Phases with and without an attack take
turns. The job must end as one that nothing disturbs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.search.strangers.attacks import Strangers, ports_of

_PHASE_SECONDS = 5.0
_START_SECONDS = 240.0
_RANKS = 2


@dataclass
class Measurement:
    """The effects of attacks on a job.

    Attributes:
        status: the exit status of the launcher.
        output: what it printed.
        ports: port -> the program that listens there.
        attacks: attack -> how often.
        answers: the first line of an answer -> how often.
        held: the connections that were accepted and held at a time.
        memory: the launcher's memory before and after, in bytes.
        cpu: the median CPU time of a step in seconds, without and with attacks, by rank.
        wall: the same of the time of a step.
    """

    status: int = -1
    output: str = ""
    ports: dict[int, str] = field(default_factory=dict)
    attacks: Counter[str] = field(default_factory=Counter)
    answers: Counter[bytes] = field(default_factory=Counter)
    held: int = 0
    memory: tuple[int, int] = (0, 0)
    cpu: dict[int, tuple[float, float]] = field(default_factory=dict)
    wall: dict[int, tuple[float, float]] = field(default_factory=dict)


def measure(
    seconds: float,
    connections: int,
    seed: int,
    launcher: str = "gloo",
    phase: float = _PHASE_SECONDS,
) -> Measurement:
    """Run a job of two ranks for about `seconds`, and attack it.

    Args:
        seconds: the time of the job.
        connections: how many connections are held at a time, once.
        seed: of the random choices.
        launcher: the value of `--launcher`.
        phase: the seconds of a phase with or without attacks.
    """
    found = Measurement()
    with tempfile.TemporaryDirectory(prefix="hvdkit-strangers-") as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "hvdkit",
            "run",
            "-np",
            str(_RANKS),
            "--launcher",
            launcher,
        ]
        target = Path(__file__).with_name("target.py")
        command += [sys.executable, str(target), name, str(seconds)]
        with (folder / "output").open("w+") as output:
            job = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                phases = _attack(found, job, folder, connections, seed, phase)
                found.status = job.wait(_START_SECONDS + seconds)
            finally:
                job.kill()
                job.wait(30)
        found.output = (folder / "output").read_text()
        for rank in range(_RANKS):
            _evaluate(found, rank, folder / f"steps.{rank}", phases)
    return found


def _attack(
    found: Measurement,
    job: subprocess.Popen[bytes],
    folder: Path,
    connections: int,
    seed: int,
    phase: float,
) -> list[tuple[float, float, bool]]:
    """Attack until the job ends. Return the phases: begin, end, and whether it was an attack."""
    deadline = time.monotonic() + _START_SECONDS
    while not all((folder / f"steps.{rank}").exists() for rank in range(_RANKS)):
        if job.poll() is not None or time.monotonic() > deadline:
            return []
        time.sleep(0.1)
    launcher = psutil.Process(job.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    ports = ports_of(process.pid for process in processes)
    ranks = {(folder / f"pid.{rank}").read_text(): f"rank {rank}" for rank in range(_RANKS)}
    for port, pid in ports.items():
        other = "the launcher" if pid == job.pid else "an agent"
        found.ports[port] = ranks.get(str(pid), other)
    strangers = Strangers(sorted(ports), seed)
    if connections:
        # Before the phases, because the connections need some seconds to end.
        found.held = strangers.hold(connections, 2.0)
    before = launcher.memory_info().rss
    largest = before
    draw = random.Random(seed)
    phases = []
    while job.poll() is None:
        attack = bool(len(phases) % 2)
        begin = time.time()
        if attack:
            strangers.run(phase * draw.uniform(0.8, 1.2))
        else:
            time.sleep(phase)
        phases.append((begin, time.time(), attack))
        try:
            largest = max(largest, launcher.memory_info().rss)
        except psutil.NoSuchProcess:
            break
    found.attacks, found.answers = strangers.counts, strangers.answers
    found.memory = before, largest
    return phases


def _evaluate(
    found: Measurement, rank: int, path: Path, phases: Sequence[tuple[float, float, bool]]
) -> None:
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for line in path.read_text().splitlines():
        words = [float(word) for word in line.split()]
        phase = next((p for p in phases if p[0] <= words[0] < p[1]), None)
        if len(words) == 3 and phase is not None:
            times[phase[2]].append((words[1], words[2]))
    if times[False] and times[True]:
        for index, target in ((0, found.wall), (1, found.cpu)):
            calm, attacked = (
                statistics.median(t[index] for t in times[kind]) for kind in (False, True)
            )
            target[rank] = (calm, attacked)


def main() -> int:
    """Print a measurement. Returns 1 if the job did not end as it should."""
    parser = argparse.ArgumentParser(
        prog="attack_job", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--launcher", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    args = parser.parse_args()
    print(f"--seed {args.seed}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    found = measure(args.seconds, args.connections, args.seed, args.launcher)
    print(f"ports: {found.ports}")
    print(f"attacks: {dict(found.attacks.most_common())}")
    print(f"answers: {dict(found.answers.most_common())}")
    print(f"connections held at a time: {found.held:,}")
    before, largest = (value / 1e6 for value in found.memory)
    print(f"memory of the launcher: {before:.0f} MB, at most {largest:.0f} MB")
    for rank in sorted(found.cpu):
        for name, (calm, attacked) in (("CPU time", found.cpu[rank]), ("time", found.wall[rank])):
            change = 100 * (attacked / calm - 1)
            print(
                f"rank {rank}: {name} of a step {1000 * calm:.2f} ms, during attacks "
                f"{1000 * attacked:.2f} ms ({change:+.1f} %)"
            )
    print(f"exit status {found.status}: {found.output.strip()[-1500:]}")
    return int(found.status != 0)
