"""The part `checkpoint`: a resumed training on the device ends with the same bytes."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.jobs import FULL_PATH, SHARED_GPU, Clock, Job
from gpu_checks.part import Setting, main
from gpu_checks.report import Report, Skip

#: N: the undisturbed run has twice as many.
STEPS = 12

#: What a job trains, one run after the other. `first` trains two more steps while its checkpoint
#: is written; `resumed` does not see these.
RUNS: Mapping[str, Mapping[str, Any]] = {
    "undisturbed": {"restore": False, "save_at": None, "until": 2 * STEPS},
    "first": {"restore": False, "save_at": STEPS, "until": STEPS + 2},
    "resumed": {"restore": True, "save_at": None, "until": 2 * STEPS},
}

#: Wire formats have state too: fp16 has scales.
_COMPRESSION = "fp16"

_STAGED_BYTES = 1 << 30
_DRY_STAGED_BYTES = 1 << 23

#: Seconds that the measurement of the staging needs at least.
_STAGING_SECONDS = 20

#: Run -> what each rank answered.
Answers = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """A training that is saved, and resumed in a new process.

    Attributes:
        name: of the case.
        engine: `nccl` or `staged`.
        size: number of ranks.
        saved_on: `cuda` or `cpu`.
        resumed_on: `cuda` or `cpu`.
    """

    name: str
    engine: str
    size: int
    saved_on: str
    resumed_on: str


def cases(device: str) -> list[Case]:
    """Return the cases: three on `device`, and two that move to another device."""
    return [
        Case("one rank, full path", "nccl", 1, device, device),
        Case("two ranks, staged", "staged", 2, device, device),
        Case("two ranks, NCCL", "nccl", 2, device, device),
        Case("saved on cpu, resumed on cuda", "staged", 1, "cpu", "cuda"),
        Case("saved on cuda, resumed on cpu", "staged", 1, "cuda", "cpu"),
    ]


def run(setting: Setting, report: Report) -> None:
    """Check resumed trainings, then measure how the state is copied to the host."""
    clock = Clock(setting.seconds)
    possible, impossible = [], []
    for case in cases(setting.device):
        moves = case.saved_on != case.resumed_on
        (impossible if setting.dry and moves else possible).append(case)
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        answers: dict[Case, Answers] = {case: {} for case in possible}
        # The second round resumes what the first one has saved.
        for runs in ("undisturbed", "first"), ("resumed",):
            _train(setting, report, clock, Path(folder), answers, runs)
        for case, found in answers.items():
            _check(report, case, found)
        for case in impossible:
            report.add(case.name, "skipped", "a dry run has one device only, the CPU")
        _staging(setting, report, clock, Path(folder) / "staging")


def _train(
    setting: Setting,
    report: Report,
    clock: Clock,
    folder: Path,
    answers: Mapping[Case, Answers],
    runs: Sequence[str],
) -> None:
    """Train the runs of all cases at the same time; add to `answers`, and record what fails."""
    resumes = "resumed" in runs
    jobs: dict[Case, Job] = {}
    with ExitStack() as stack:
        for case in answers:
            if resumes and "first" not in answers[case]:
                continue
            told = {
                "task": "trainings",
                "device": case.resumed_on if resumes else case.saved_on,
                "compression": _COMPRESSION,
                "folder": str(folder / case.name),
                "runs": {name: RUNS[name] for name in runs},
            }
            env = FULL_PATH if case.size == 1 else SHARED_GPU
            with _recorded(report, case, runs):
                job = Job(setting, case.engine, "checkpoint_ranks", told, case.size, env)
                jobs[case] = stack.enter_context(job)
        for case, job in jobs.items():
            with _recorded(report, case, runs):
                ranks = job.answers(clock.left())
                answers[case].update({name: [rank[name] for rank in ranks] for name in runs})


@contextmanager
def _recorded(report: Report, case: Case, runs: Sequence[str]) -> Iterator[None]:
    """Record an exception of the block as a failed check."""
    try:
        yield
    except Exception as error:
        name = f"{case.name}: {' and '.join(runs)}"
        report.add(name, "failed", f"{type(error).__name__}: {error}"[:1500])


def _check(report: Report, case: Case, found: Answers) -> None:
    moves = case.saved_on != case.resumed_on
    with report.check(case.name if moves else f"{case.name}: same bytes") as values:
        if missing := [name for name in RUNS if name not in found]:
            raise Skip(f"there is no result of the run {missing[0]!r}")
        lines = errors(found["resumed"])
        # The restored bytes must be the saved ones on any device. Later steps give the same bytes
        # only on the same device.
        lines += differences(found["first"], "saved", found["resumed"], "restored", moves)
        values |= {f"device of {k}": v for k, v in found["resumed"][0]["devices"].items()}
        if not moves:
            lines += differences(found["undisturbed"], "end", found["resumed"], "end")
        if lines:
            raise ValueError("; ".join(lines))
        values["detail"] = (
            "weights and optimizer are restored, and training continues"
            if moves
            else f"weights, optimizer, random numbers after {2 * STEPS} steps"
        )


def errors(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each rank that failed in a step after the restore."""
    return [
        f"rank {rank}: a step after the restore fails: {answer['error']}"
        for rank, answer in enumerate(ranks)
        if "error" in answer
    ]


def differences(
    first: Sequence[Mapping[str, Any]],
    first_at: str,
    second: Sequence[Mapping[str, Any]],
    second_at: str,
    but_random_numbers: bool = False,
) -> list[str]:
    """Compare the digests of two runs, rank by rank.

    Args:
        first: the answers of a run's ranks.
        first_at: when its digests were taken: `saved`, `restored` or `end`.
        second: the answers of the other run's ranks.
        second_at: as `first_at`.
        but_random_numbers: whether to leave these out, which a device has of its own.

    Returns:
        A line for each difference.
    """
    return [
        f"rank {rank}: {what} ({second_at}) other than expected ({first_at})"
        for rank, (a, b) in enumerate(zip(first, second, strict=True))
        for what in a[first_at]
        if a[first_at][what] != b[second_at][what]
        and not (but_random_numbers and what == "random numbers")
    ]


def _staging(setting: Setting, report: Report, clock: Clock, folder: Path) -> None:
    name = "staging of an asynchronous save"
    if clock.left() < _STAGING_SECONDS:
        why = f"no time left: {clock.left():.0f} s of the {_STAGING_SECONDS} s needed"
        report.add(name, "skipped", why)
        return
    told = {
        "task": "staging",
        "device": setting.device,
        "bytes": _DRY_STAGED_BYTES if setting.dry else _STAGED_BYTES,
        "folder": str(folder),
    }
    found: dict[str, Any] = {}
    with report.check(f"{name}: job"), Job(setting, "staged", "checkpoint_ranks", told) as job:
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
