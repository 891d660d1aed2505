"""The part `speed`: the cost of hvdkit on a device, compared with plain PyTorch and a copy."""

import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_checks import turns
from gpu_checks.jobs import ASYNC, FULL_PATH, Clock, Job
from gpu_checks.part import Setting, main
from gpu_checks.report import Report

#: The least speed of packing and unpacking, relative to a copy on the device.
PASS_TARGET = 0.8

#: The longest step of hvdkit on one rank, relative to that of plain PyTorch.
STEP_TARGET = 1.01

#: Process -> its environment variables and its variants. Each has the plain optimizer, so that
#: ratios are taken within one process.
PROCESSES: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "alone": ({}, ("plain", "hvdkit", "ddp")),
    "full path": (FULL_PATH, ("plain", "none", "fp16", "bf16")),
    "full path, asynchronous": (FULL_PATH | ASYNC, ("plain", "none", "fp16", "bf16")),
}

_TURNS = 40
_DRY_TURNS = 3
#: Fewer turns than this are too few for quartiles.
_LEAST_TURNS = 2


def run(setting: Setting, report: Report) -> None:
    """Measure in the order of importance, until the time is over."""
    clock = Clock(setting.seconds)
    _memory(setting, report, clock)
    _step_times(setting, report, clock, "resnet50")
    _counts(setting, report, clock)
    _step_times(setting, report, clock, "gpt")


def _no_time(report: Report, clock: Clock, name: str, need: float) -> bool:
    if clock.left() >= need:
        return False
    report.add(name, "skipped", f"no time left: {clock.left():.0f} s of the {need:.0f} s needed")
    return True


def _memory(setting: Setting, report: Report, clock: Clock) -> None:
    name = "memory: copy, pack, unpack"
    if _no_time(report, clock, name, 10):
        return
    told = {"task": "memory", "device": setting.device, "dry": setting.dry}
    found: dict[str, Any] = {}
    with report.check(name), Job(setting, "staged", "speed_ranks", told) as job:
        (found,) = job.answers(min(60, clock.left()))
    if not found:
        return
    rate = found["copy"]["bytes_per_second"]
    report.add("device copy", "measured", "bytes read and written", **found.pop("copy"))
    for model, measured in found.items():
        if "error" in measured:
            report.add(f"{model}: passes over the buckets", "failed", measured["error"])
            continue
        for one, values in measured["passes"].items():
            report.add(
                f"{model}: {one}",
                "measured",
                pass_detail(values["bytes"] / values["seconds"] / rate),
                **values,
                bytes_per_second=values["bytes"] / values["seconds"],
                elements=measured["elements"],
                buckets=measured["buckets"],
            )


def pass_detail(share: float) -> str:
    """Return a text with the speed of a pass relative to the device's copy."""
    return f"{share:.3f} of the device copy, {_target(share >= PASS_TARGET, f'>= {PASS_TARGET}')}"


def _target(reached: bool, what: str) -> str:
    return f"target {'reached' if reached else 'missed'} ({what})"


def _counts(setting: Setting, report: Report, clock: Clock) -> None:
    name = "counts per step"
    if _no_time(report, clock, name, 20):
        return
    told = {"task": "counts", "device": setting.device, "dry": setting.dry}
    completions = {"asynchronous completion": ASYNC, "default completion": {}}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        # The jobs run at the same time: the counts do not depend on the time of a step.
        jobs = {
            completion: stack.enter_context(
                Job(setting, "nccl", "speed_ranks", told, env={**FULL_PATH, **env})
            )
            for completion, env in completions.items()
        }
        for completion, job in jobs.items():
            with report.check(f"{name}, {completion}"):
                (found[completion],) = job.answers(min(60, clock.left()))
                check_counts(found[completion], setting.device == "cuda")
    for completion, variants in found.items():
        for variant, counted in variants.items():
            detail = ""
            if variant != "plain":
                detail = counts_detail(
                    counted, variants["plain"], asynchronous=completions[completion] == ASYNC
                )
            report.add(f"{name}, {completion}: {variant}", "measured", detail, **counted)


def check_counts(variants: Mapping[str, Mapping[str, Any]], cuda: bool) -> None:
    """Check that the counts are valid.

    Raises:
        ValueError: the profiler saw nothing, or hvdkit did not take the full path.
    """
    for variant, counted in variants.items():
        seen = "kernels" if cuda else "operators"
        if not counted[seen]:
            raise ValueError(f"{variant}: the profiler recorded no {seen}")
        if variant != "plain" and not counted["waits for Horovod"]:
            raise ValueError(
                f"{variant}: no step waits for Horovod, so HVDKIT_SINGLE_RANK_COLLECTIVES=1 has no "
                f"effect"
            )


def counts_detail(counted: Mapping[str, Any], plain: Mapping[str, Any], asynchronous: bool) -> str:
    """Return a text with the counts of a step beyond those of the plain optimizer."""
    launches = counted["launches"] - plain["launches"]
    more = counted["synchronizations"] - plain["synchronizations"]
    waits = counted["waits for Horovod"]
    detail = (
        f"{launches:+.1f} launches, {more:+.1f} host synchronizations and {waits:.1f} waits for "
        f"Horovod in each step against the plain optimizer"
    )
    return f"{detail}; {_target(more <= 0, '0 more synchronizations')}" if asynchronous else detail


def _step_times(setting: Setting, report: Report, clock: Clock, model: str) -> None:
    name = f"{model}: step times"
    if _no_time(report, clock, name, 15 if setting.dry else 40):
        return
    seconds: dict[turns.Key, list[float]] = {}
    # The second model gets the rest of the time.
    limit = Clock(min(clock.left(), 75), spare=0)
    with report.check(name) as values, tempfile.TemporaryDirectory(prefix="hvd") as folder:
        seconds = _interleaved(setting, Path(folder), model, limit)
        count = len(next(iter(seconds.values())))
        values["turns"] = count
        if count < _LEAST_TURNS:
            raise ValueError(f"{count} turns before the deadline; expected at least {_LEAST_TURNS}")
    if not seconds or count < _LEAST_TURNS:
        return
    for (process, variant), measured in seconds.items():
        compared = turns.ratio(measured, seconds[process, "plain"])
        report.add(
            f"{model}, {process}: {variant}",
            "measured",
            ratio_detail(variant, compared),
            seconds=statistics.median(measured),
            **(compared if variant != "plain" else {}),
        )


def _interleaved(
    setting: Setting, folder: Path, model: str, clock: Clock
) -> dict[turns.Key, list[float]]:
    with ExitStack() as stack:
        processes = []
        for number, (name, (env, variants)) in enumerate(PROCESSES.items()):
            told = {
                "task": "turns",
                "device": setting.device,
                "dry": setting.dry,
                "model": model,
                "variants": variants,
            }

            def start(path: str, told: Any = told, env: Any = env) -> Job:
                return Job(setting, "nccl", "speed_ranks", {**told, "socket": path}, env=env)

            process = turns.Process(name, folder / str(number), start)
            stack.callback(process.close)
            processes.append(process)
        for process in processes:
            process.wait_until_ready(clock.left())
        seconds = turns.interleave(
            processes, _DRY_TURNS if setting.dry else _TURNS, lambda: clock.left() - 5
        )
        for process in processes:
            process.finish(10)
    return seconds


def ratio_detail(variant: str, compared: Mapping[str, float]) -> str:
    """Return a text with the time of a variant's step relative to plain PyTorch's."""
    if variant == "plain":
        return "plain PyTorch"
    detail = (
        f"{compared['ratio']:.3f} of plain PyTorch's step "
        f"({compared['lower quartile']:.3f} to {compared['upper quartile']:.3f})"
    )
    if variant == "ddp":
        return detail
    return f"{detail}, {_target(compared['ratio'] <= STEP_TARGET, f'<= {STEP_TARGET}')}"


if __name__ == "__main__":
    main("speed", run)
