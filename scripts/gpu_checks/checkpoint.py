"""The part `checkpoint`: a resumed training on the device ends with the same bytes."""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_checks.jobs import FULL_PATH, Clock, Job
from gpu_checks.part import Setting, main
from gpu_checks.report import Report, Skip

#: N: the undisturbed run has twice as many.
STEPS = 12

#: Name -> engine and number of ranks.
JOBS = {"one rank, full path": ("nccl", 1), "two ranks, staged": ("staged", 2)}

#: Saved on -> resumed on.
MOVES = {"cpu": "cuda", "cuda": "cpu"}

#: Wire formats keep a state too: fp16 has scales.
_COMPRESSION = "fp16"

_STAGED_BYTES = 1 << 30
_DRY_STAGED_BYTES = 1 << 23


def run(setting: Setting, report: Report) -> None:
    """Check resumed trainings, then measure how the state is copied to the host."""
    clock = Clock(setting.seconds)
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        _resume(setting, report, clock, Path(folder))
        _staging(setting, report, clock, Path(folder) / "staging")


def _resume(setting: Setting, report: Report, clock: Clock, folder: Path) -> None:
    with ExitStack() as stack:
        jobs: dict[str, Job] = {}

        def start(name: str, engine: str, size: int, device: str, **told: Any) -> None:
            content = {"task": "train", "device": device, "compression": _COMPRESSION, **told}
            env = FULL_PATH if size == 1 else {}
            try:
                job = Job(setting, engine, "checkpoint_ranks", content, size, env)
            except ValueError as error:
                report.add(f"job: {name}", "failed", str(error))
            else:
                jobs[name] = stack.enter_context(job)

        undisturbed = {"restore": False, "save_at": None, "until": 2 * STEPS}
        # Two more steps while the checkpoint is written; the resumed run does not see them.
        first = {"restore": False, "save_at": STEPS, "until": STEPS + 2}
        resumed = {"restore": True, "save_at": None, "until": 2 * STEPS}
        for name, (engine, size) in JOBS.items():
            where = {"device": setting.device, "folder": str(folder / engine)}
            start(f"{name}: undisturbed", engine, size, **where, **undisturbed)
            start(f"{name}: first", engine, size, **where, **first)
        moves = {} if setting.dry else MOVES
        for device in moves:
            saved = str(folder / device)
            start(f"save on {device}", "staged", 1, device, folder=saved, **first)
        answers: dict[str, Any] = {}
        _wait(report, clock, jobs, answers)
        jobs.clear()
        for name, (engine, size) in JOBS.items():
            if f"{name}: first" in answers:
                where = {"device": setting.device, "folder": str(folder / engine)}
                start(f"{name}: resumed", engine, size, **where, **resumed)
        for device, other in moves.items():
            if f"save on {device}" in answers:
                saved = str(folder / device)
                start(f"resume on {other}", "staged", 1, other, folder=saved, **resumed)
        _wait(report, clock, jobs, answers)
    for name in JOBS:
        _check_same(report, name, answers)
    for device, other in MOVES.items():
        _check_move(setting, report, device, other, answers)


def _wait(report: Report, clock: Clock, jobs: Mapping[str, Job], answers: dict[str, Any]) -> None:
    """Collect the answers of the jobs; record those that fail."""
    for name, job in jobs.items():
        try:
            answers[name] = job.answers(clock.left())
        except Exception as error:
            report.add(f"job: {name}", "failed", f"{type(error).__name__}: {error}"[:1500])


def _check_same(report: Report, name: str, answers: Mapping[str, Any]) -> None:
    with report.check(f"{name}: same bytes after a resume") as values:
        undisturbed, resumed = (_answer(answers, f"{name}: {run}") for run in RUNS)
        values["steps"] = 2 * STEPS
        if lines := differences(undisturbed, resumed, "end"):
            raise ValueError("; ".join(lines))
        values["detail"] = "weights, optimizer, random numbers"


RUNS = ("undisturbed", "resumed")


def _answer(answers: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    if name not in answers:
        raise Skip(f"there is no result of the job {name!r}")
    return answers[name]


def differences(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], at: str
) -> list[str]:
    """Compare the digests of two jobs' ranks.

    Args:
        first: the answers of a job's ranks.
        second: the answers of the other job's ranks.
        at: when the digests were taken, such as `end`.

    Returns:
        A line for each difference, and for each error of a rank.
    """
    lines = []
    for rank, (a, b) in enumerate(zip(first, second, strict=True)):
        lines += [f"rank {rank}: {each['error']}" for each in (a, b) if "error" in each]
        lines += [f"rank {rank}: other {what}" for what in a[at] if a[at][what] != b[at][what]]
    return lines


def _check_move(
    setting: Setting, report: Report, device: str, other: str, answers: Mapping[str, Any]
) -> None:
    with report.check(f"saved on {device}, resumed on {other}") as values:
        if setting.dry:
            raise Skip("a dry run has one device only, the CPU")
        (saved,) = _answer(answers, f"save on {device}")
        (resumed,) = _answer(answers, f"resume on {other}")
        values |= {f"device of {key}": value for key, value in resumed["devices"].items()}
        values["detail"] = "same weights and optimizer state after the restore, and steps go on"
        if "error" in resumed:
            raise ValueError(f"a step after the restore fails: {resumed['error']}")
        other_bytes = [
            what
            for what in ("weights", "optimizer")
            if saved["saved"][what] != resumed["restored"][what]
        ]
        if other_bytes:
            raise ValueError(f"the restore changes the {' and the '.join(other_bytes)}")


def _staging(setting: Setting, report: Report, clock: Clock, folder: Path) -> None:
    nbytes = _DRY_STAGED_BYTES if setting.dry else _STAGED_BYTES
    told = {
        "task": "staging",
        "device": setting.device,
        "bytes": nbytes,
        "folder": str(folder),
    }
    name = "staging of an asynchronous save"
    need = 5 if setting.dry else 15
    if clock.left() < need:
        report.add(name, "skipped", f"no time left: {clock.left():.0f} s of the {need} s needed")
        return
    found: dict[str, Any] = {}
    with (
        report.check(f"{name}: the job ends"),
        Job(setting, "staged", "checkpoint_ranks", told) as job,
    ):
        (found,) = job.answers(clock.left())
    if found:
        figures = ("save", "first save", "pageable", "pinned")
        rates = {f"{key}_bytes_per_second": found[key] for key in figures if key in found}
        report.add(name, "measured", staging_detail(found), bytes=found["bytes"], **rates)


def staging_detail(found: Mapping[str, Any]) -> str:
    """Say whether the state is staged through pinned memory, and what that would change."""
    if not found["copies to the host"]:
        return "nothing is copied from a device"
    pageable = found["pageable copies to the host"]
    detail = f"{pageable} of {found['copies to the host']} copies go to pageable memory"
    if "pinned" in found:
        detail += f"; copies to pinned memory are {found['pinned'] / found['save']:.1f} x as fast"
    return detail


if __name__ == "__main__":
    main("checkpoint", run)
