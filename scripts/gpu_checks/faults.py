"""The part `faults`: the launcher names faults, and restarts jobs, whose ranks share the GPU."""

import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from benchmarks import restarts
from gpu_checks.jobs import SHARED_GPU, Clock
from gpu_checks.part import Setting, main
from gpu_checks.report import Report, Skip
from tests.unit.faults import seeded

#: The faults in which the device takes part; names of `tests.unit.faults.seeded`.
NAMES = (
    "sleeps in its data",
    "SIGSTOP",
    "SIGKILL",
    "raises an exception",
    "allocates too much",
    "flips a bit of a weight",
    "flips a bit of a bias",
    "flips a bit of the optimizer state",
    "has NaN in its data",
    "has infinite gradients of one parameter",
    "skips a backward pass and its step",
    "skips a step",
    "sends another shape",
    "sends another dtype",
    "has a larger layer",
)

#: The faults of a dry run.
DRY = ("has NaN in its data", "raises an exception")

#: Launchers whose restarts are measured, and their engines (DDP uses Gloo); the number of kills.
LAUNCHERS = {"hvdkit run": "nccl", "torchrun, DDP": "staged"}
_KILLS, _DRY_KILLS = 2, 1

#: Seconds that a restart's measurement needs at least.
_RESTART_SECONDS = 25


def run(setting: Setting, report: Report) -> None:
    """Run the faults, some at a time; then measure restarts on the idle machine."""
    clock = Clock(setting.seconds)
    os.environ.update({seeded.DEVICE_VARIABLE: setting.device, **SHARED_GPU})
    python = setting.pythons["nccl"]
    names = DRY if setting.dry else NAMES
    cases = [case for case in seeded.CASES if case.name in names]
    at_once = max(1, len(os.sched_getaffinity(0)) // 4)
    pool = ThreadPoolExecutor(at_once)
    outcomes = [
        pool.submit(seeded.run, case, number % case.ranks, python)
        for number, case in enumerate(cases)
    ]
    try:
        for case, outcome in zip(cases, outcomes, strict=True):
            with report.check(f"fault: {case.name}") as values:
                values["detail"] = _named(outcome, clock)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    for name, engine in LAUNCHERS.items():
        with report.check(f"from SIGKILL of a rank to the next step: {name}") as values:
            if clock.left() < _RESTART_SECONDS:
                raise Skip(f"no time left: {clock.left():.0f} s of {_RESTART_SECONDS} s needed")
            kills = _DRY_KILLS if setting.dry else _KILLS
            times = _restarts(name, setting.pythons[engine], kills, setting.device)
            values["seconds"] = statistics.median(times)
            values["detail"] = " ".join(f"{each:.2f} s" for each in times)


def _named(outcome: "Future[seeded.Outcome]", clock: Clock) -> str:
    """Return what was named. Raise AssertionError if the launcher did not name the fault."""
    found = outcome.result(clock.left())
    if not found.named:
        raise AssertionError(
            f"expected {found.case.says!r} about rank {found.rank}; got (exit status "
            f"{found.status}): {found.text[:1500]} ... {found.text[-1200:]}"
        )
    return f"rank {found.rank} is named"


def _restarts(name: str, python: str, kills: int, device: str) -> Sequence[float]:
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        launcher = restarts.launchers(Path(folder), python)[name]
        return restarts.after_kills(launcher, kills, device)


if __name__ == "__main__":
    main("faults", run)
