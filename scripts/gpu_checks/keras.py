"""The part `keras`: `fit` with hvdkit on the device, Keras on PyTorch and on TensorFlow."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from gpu_checks.jobs import FULL_PATH, SHARED_GPU, Clock, Job
from gpu_checks.part import REPOSITORY, Setting, main
from gpu_checks.report import Report, Skip

STEPS = 20

#: The largest distance of the weights from those of one process after `STEPS` steps, relative to
#: their norm.
BOUND = 1e-5

#: Batches of the mixed_float16 training, and how many of them overflow: see keras_ranks.
BATCHES, OVERFLOWS = 10, 2

#: Name -> engine and number of ranks.
JOBS = {
    "two ranks, staged": ("staged", 2),
    "two ranks, NCCL": ("nccl", 2),
    "one rank, full path": ("nccl", 1),
}

#: Loads TensorFlow, which takes seconds, only to find its GPUs.
_PROBE = """
import importlib.util, json, sys
from hvdkit.engine import describe
found = {"installed": bool(importlib.util.find_spec("tensorflow")), "version": "", "gpus": 0}
found["engine"] = "tensorflow" in describe.installed().frameworks
if found["installed"] and sys.argv[1] == "cuda":
    import tensorflow
    found["version"] = tensorflow.__version__
    found["gpus"] = len(tensorflow.config.list_physical_devices("GPU"))
print("\\n" + json.dumps(found))
"""

#: Seconds that Keras on TensorFlow needs at least.
_TENSORFLOW_SECONDS = 30


def run(setting: Setting, report: Report) -> None:
    """Train on two ranks and on one, with PyTorch, then with TensorFlow if it is installed."""
    clock = Clock(setting.seconds)
    _backend(setting, report, clock, "torch", {"KERAS_TORCH_DEVICE": setting.device}, JOBS)
    # Without CUDA's devices a dry run is the same on every machine.
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", **({"CUDA_VISIBLE_DEVICES": ""} if setting.dry else {})}
    if reason := _tensorflow_missing(setting, clock):
        report.add("Keras on tensorflow", "skipped", reason)
        return
    jobs = {"two ranks, staged": JOBS["two ranks, staged"]}
    _backend(setting, report, clock, "tensorflow", env, jobs)


def _tensorflow_missing(setting: Setting, clock: Clock) -> str | None:
    """Return why Keras on TensorFlow cannot be checked; None if it can."""
    if clock.left() < _TENSORFLOW_SECONDS:
        return f"no time left: {clock.left():.0f} s of the {_TENSORFLOW_SECONDS} s needed"
    if "staged" not in setting.pythons:
        return "no environment has the engine staged: see the part build"
    command = [setting.pythons["staged"], "-c", _PROBE, setting.device]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=clock.left(),
            check=True,
            cwd=REPOSITORY,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"TensorFlow does not load: {error}"
    return tensorflow_reason(json.loads(answer.stdout.splitlines()[-1]), setting.dry)


def tensorflow_reason(found: Mapping[str, Any], dry: bool) -> str | None:
    """Return why the TensorFlow of a probe cannot be used; None if it can."""
    if not found["installed"]:
        return "TensorFlow is not installed"
    if not found["gpus"] and not dry:
        return f"TensorFlow {found['version']} sees no GPU"
    if not found["engine"]:
        return "the engine was built without TensorFlow"
    return None


def _backend(
    setting: Setting,
    report: Report,
    clock: Clock,
    backend: str,
    env: Mapping[str, str],
    jobs: Mapping[str, tuple[str, int]],
) -> None:
    told = {"device": setting.device, "steps": STEPS, "compression": "none"}
    with ExitStack() as stack:
        started: dict[str, Job] = {}
        for name, (engine, size) in jobs.items():
            path = FULL_PATH if size == 1 else SHARED_GPU
            whole = {"KERAS_BACKEND": backend, **env, **path}
            try:
                job = Job(setting, engine, "keras_ranks", told, size, whole)
            except ValueError as error:
                report.add(f"Keras on {backend}, {name}", "failed", str(error))
            else:
                started[name] = stack.enter_context(job)
        for name, job in started.items():
            answers: Sequence[Mapping[str, Any]] = ()
            prefix = f"Keras on {backend}, {name}"
            with report.check(f"{prefix}: fit") as values:
                answers = job.answers(clock.left())
                values |= check_fit([each["fit"] for each in answers], setting.device)
            with report.check(f"{prefix}: mixed_float16") as values:
                if not answers:
                    raise Skip("the job has failed")
                values |= check_mixed([each["mixed_float16"] for each in answers])


def check_fit(ranks: Sequence[Mapping[str, Any]], device: str) -> dict[str, Any]:
    """Check the ranks' answers about `fit`.

    Returns:
        Figures for the report.

    Raises:
        ValueError: ranks differ, or differ from one process, or did not use the device.
    """
    for what in ("weights", "optimizer"):
        if len({rank[what] for rank in ranks}) != 1:
            raise ValueError(f"the ranks have different {what} after fit")
    first = ranks[0]
    if not first["learned"] > 0.01:
        raise ValueError(f"nothing was learned: the weights moved by {first['learned']:.2g}")
    if not first["distance"] <= BOUND:
        raise ValueError(
            f"the weights are {first['distance']:.2g} from those of one process: expected at most "
            f"{BOUND}"
        )
    used = first["device"]
    # PyTorch calls it cuda:0, TensorFlow /job:localhost/replica:0/task:0/device:GPU:0.
    names = ("cuda", "GPU") if device == "cuda" else ("cpu", "CPU")
    if not any(name in used for name in names):
        raise ValueError(f"the weights are on {used}: expected {device}")
    return {
        "detail": "same bytes on all ranks, close to one process; jit_compile auto",
        "distance": first["distance"],
        "jit_compile": first["jit_compile"],
        "device": used,
    }


def check_mixed(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Check the ranks' answers about mixed_float16.

    Returns:
        Figures for the report.

    Raises:
        ValueError: ranks differ, or a step with an overflow was not skipped on all of them.
    """
    if any(rank != ranks[0] for rank in ranks):
        raise ValueError(f"the ranks differ: {list(ranks)}")
    found = dict(ranks[0])
    found.pop("weights")
    expected = {
        "optimizer": "LossScaleOptimizer",
        "iterations": BATCHES - OVERFLOWS,
        "halvings": float(OVERFLOWS),
        "finite": True,
    }
    if found != expected:
        raise ValueError(f"after {OVERFLOWS} overflows: {found}; expected {expected}")
    return {"detail": f"{OVERFLOWS} of {BATCHES} steps skipped on all ranks", **found}


if __name__ == "__main__":
    main("keras", run)
