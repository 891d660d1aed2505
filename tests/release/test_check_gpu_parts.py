"""The parts of `scripts/check_gpu` that measure and train: dry runs on the CPU, and their sums."""

import os
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

from gpu_checks import checkpoint, command, doctor, jobs, keras, models, speed, trace, turns  # noqa: E402
from gpu_checks.part import Setting  # noqa: E402
from gpu_checks.report import Report, read  # noqa: E402

# --- dry runs ---

#: The timeout of a dry run, which includes a reserve for a busy machine.
SECONDS = 240

#: Part -> the beginnings of the names of checks, and the outcomes that each may have.
EXPECTED = {
    "speed": {
        "memory: copy, pack, unpack": {"passed"},
        "device copy": {"measured"},
        "resnet50: pack as float16": {"measured"},
        "resnet50: unpack from bfloat16": {"measured"},
        "llama-7b: gradients into float32 buckets, scaled": {"measured"},
        "counts per step, asynchronous completion: fp16": {"measured"},
        "counts per step, default completion: bf16": {"measured"},
        "resnet50: step times": {"passed"},
        "resnet50, alone: ddp": {"measured"},
        "resnet50, full path: none": {"measured"},
        "resnet50, full path, asynchronous: fp16": {"measured"},
        "gpt, full path: bf16": {"measured"},
    },
    "checkpoint": {
        "one rank, full path: same bytes": {"passed"},
        "two ranks, staged: same bytes": {"passed"},
        "two ranks, NCCL: same bytes": {"passed"},
        "saved on cpu, resumed on cuda": {"skipped"},
        "saved on cuda, resumed on cpu": {"skipped"},
        # Skipped where the machine is too busy for it. The job passes, its figures are measured.
        "staging of an asynchronous save": {"passed", "measured", "skipped"},
    },
    "keras": {
        "Keras on torch, two ranks, staged: fit": {"passed"},
        "Keras on torch, two ranks, staged: mixed_float16": {"passed"},
        "Keras on torch, two ranks, NCCL: fit": {"passed"},
        "Keras on torch, one rank, full path: fit": {"passed"},
        "Keras on torch, one rank, full path: mixed_float16": {"passed"},
        # Skipped where the machine is too busy for it.
        "Keras on tensorflow": {"passed", "skipped"},
    },
    "faults": {
        "fault: raises an exception": {"passed"},
        "fault: has NaN in its data": {"passed"},
        # Skipped where the machine is too busy for it.
        "from SIGKILL of a rank to the next step: hvdkit run": {"passed", "skipped"},
        "from SIGKILL of a rank to the next step: torchrun, DDP": {"passed", "skipped"},
    },
    "doctor": {
        "doctor --json": {"passed"},
        "doctor": {"passed", "skipped"},
    },
}


def dry_run(part, folder):
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "check_gpu"), part, "--dry-run", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def left_over(folder):
    """Return the processes that have the folder in their command or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            said = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in said):
            found.append(process)
    return found


@pytest.mark.long
@pytest.mark.parametrize("part", EXPECTED)
def test_dry_run(part, tmp_path):
    answer = dry_run(part, tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    content = read(tmp_path / "results" / f"{part}.json")
    assert content["finished"]
    assert {check["outcome"] for check in content["checks"]} <= {"passed", "measured", "skipped"}
    for beginning, outcomes in EXPECTED[part].items():
        found = [c for c in content["checks"] if c["name"].startswith(beginning)]
        assert found, f"there is no check {beginning!r}"
        assert {check["outcome"] for check in found} <= outcomes, found
    assert not left_over(tmp_path)


@pytest.mark.long
def test_a_part_that_is_ended_takes_its_ranks_along(tmp_path):
    (tmp_path / "results").mkdir()
    pythons = dict.fromkeys(("nccl", "staged"), sys.executable)
    told = Setting("cpu", str(tmp_path), 60.0, pythons, {}).to_json()
    env = command.environment(os.environ) | {"CHECKED_IN": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "gpu_checks.keras", told], cwd=ROOT, env=env)
    try:
        deadline = time.monotonic() + 60
        # The part itself and three ranks.
        while len(left_over(tmp_path)) < 4 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(left_over(tmp_path)) >= 4
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not left_over(tmp_path)


# --- jobs ---


@pytest.fixture
def report(tmp_path):
    return Report(tmp_path, "speed", {})


def setting(tmp_path, seconds=60.0):
    return Setting("cpu", str(tmp_path), seconds, {"staged": sys.executable}, {})


def test_a_part_without_time_skips_everything(tmp_path, report):
    speed.run(setting(tmp_path, seconds=5.0), report)
    assert {check.outcome for check in report.checks} == {"skipped"}
    assert all("no time left" in check.detail for check in report.checks)


def test_a_missing_engine_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no environment has the engine nccl"):
        jobs.Job(setting(tmp_path), "nccl", "speed_ranks", {})


# --- models ---


def test_shapes_of_the_models():
    resnet, llama = models.resnet50_shapes(), models.llama_shapes()
    assert (len(resnet), sum(map(prod, resnet))) == (161, 25_557_032)
    assert (len(llama), sum(map(prod, llama))) == (291, 6_738_415_616)


def test_shapes_are_cut_to_what_fits():
    shapes = [(10, 10), (50,), (1,)]
    assert models.cut(shapes, 1500, 10) == [(10, 10), (50,)]
    assert models.cut(shapes, 1499, 10) == [(10, 10)]
    assert models.cut(shapes, 10**6, 10) == shapes


# --- ratios ---


def test_ratios_are_taken_turn_by_turn():
    # Both variants take ten times as long in one turn: that cancels.
    assert turns.ratio([2, 20, 2, 2], [1, 10, 1, 1])["ratio"] == 2
    assert turns.ratio([1, 2, 3, 4, 5], [1] * 5) == {
        "ratio": 3,
        "lower quartile": 2,
        "upper quartile": 4,
    }


class FakeProcess:
    """A process whose steps take no time."""

    name = "a process"
    variants = ("plain", "none")

    def step(self, variant, seconds):
        assert seconds > 0
        return {"plain": 1.0, "none": 1.5}[variant]


def test_every_variant_takes_every_turn():
    seconds = turns.interleave([FakeProcess()], 7, lambda: 10.0)
    assert seconds == {("a process", "plain"): [1.0] * 7, ("a process", "none"): [1.5] * 7}


# --- counts ---


def event(category, name, ts, tid=1, dur=1.0):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "tid": tid}


@pytest.fixture
def events():
    """A trace: training on threads 1 and 2, Horovod on thread 9; measured from 100 to 200."""
    return [
        {"ph": "M", "name": "process_name", "ts": 0},
        event("user_annotation", trace.MEASURED, 100, dur=100.0),
        event("cpu_op", "aten::mul", 110),
        event("cpu_op", "aten::mul", 120, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 111),
        event("cuda_driver", "cuLaunchKernelEx", 121, tid=2),
        event("cuda_runtime", "cudaLaunchKernelExC", 122, tid=9),
        event("cuda_runtime", "cudaStreamSynchronize", 130),
        event("cuda_runtime", "cudaEventSynchronize", 131, tid=2),
        event("cuda_runtime", "cudaEventSynchronize", 132, tid=9),
        event("cuda_runtime", "cudaMemcpyAsync", 133),
        event("cuda_runtime", "cudaStreamWaitEvent", 134),
        event("kernel", "void mul<float>", 112, tid=7),
        # The device is behind the host.
        event("kernel", "void mul<float>", 210, tid=7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 211, tid=7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 212, tid=7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 213, tid=7),
        # Before and after the measured steps.
        event("cuda_runtime", "cudaLaunchKernel", 50),
        event("kernel", "void mul<float>", 51, tid=7),
        event("cuda_runtime", "cudaDeviceSynchronize", 201),
    ]


def test_counts_of_a_trace(events):
    assert trace.count(events) == {
        "launches": 3,
        "synchronizations": 2,
        "synchronizations of other threads": 1,
        "copies to the host": 2,
        "pageable copies to the host": 1,
        "kernels": 2,
        "operators": 2,
    }


def test_a_trace_without_the_annotation_is_refused(events):
    with pytest.raises(ValueError, match="no annotation"):
        trace.count(events[2:])


def test_counts_of_the_profiler_here(monkeypatch, tmp_path):
    import torch

    # The profiler loads torch's compiler, which sets this variable.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ones = torch.ones(4)
    counts = trace.count(trace.record(lambda: ones.mul(2.0), cuda=False))
    assert counts["operators"] >= 1
    assert counts["launches"] == counts["kernels"] == 0


def counted(**changed):
    zeros = dict.fromkeys(("launches", "synchronizations", "kernels", "operators"), 0.0)
    return zeros | {"kernels": 5.0, "operators": 5.0, "waits for Horovod": 0.0} | changed


def test_counts_of_nothing_are_refused():
    full = counted(**{"waits for Horovod": 2.0})
    speed.check_counts({"plain": counted(), "none": full}, cuda=True)
    with pytest.raises(ValueError, match="has no effect"):
        speed.check_counts({"plain": counted(), "none": counted()}, cuda=True)
    with pytest.raises(ValueError, match="recorded no kernels"):
        speed.check_counts({"plain": counted(kernels=0.0)}, cuda=True)


# --- checkpoint, keras, doctor ---


def test_differences_between_trainings():
    same = {"end": {"weights": "a", "random numbers": "b"}}
    other = {"end": {"weights": "a", "random numbers": "c"}}

    def lines(first, second, **options):
        return checkpoint.differences(first, "end", second, "end", **options)

    assert lines([same, same], [same, same]) == []
    (line,) = lines([same, same], [same, other])
    assert line.startswith("rank 1: random numbers")
    assert lines([same], [other], but_random_numbers=True) == []
    (line,) = checkpoint.errors([same, same | {"error": "RuntimeError: no"}])
    assert line.startswith("rank 1")


@pytest.fixture
def fit_answer():
    return {
        "weights": "a",
        "optimizer": "b",
        "jit_compile": False,
        "device": "cuda:0",
        "learned": 0.1,
        "distance": 1e-7,
    }


def test_fit_on_ranks_that_differ_fails(fit_answer):
    keras.check_fit([fit_answer, fit_answer], "cuda")
    with pytest.raises(ValueError, match="different weights"):
        keras.check_fit([fit_answer, fit_answer | {"weights": "other"}], "cuda")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"distance": 1e-3}, "those of one process"),
        ({"distance": float("nan")}, "those of one process"),
        ({"learned": 0.0}, "nothing was learned"),
        ({"device": "cpu"}, "expected cuda"),
    ],
)
def test_fit_that_went_wrong_fails(fit_answer, changed, why):
    with pytest.raises(ValueError, match=why):
        keras.check_fit([fit_answer | changed], "cuda")


def test_mixed_precision_that_does_not_skip_fails():
    answer = {"optimizer": "LossScaleOptimizer", "iterations": 8, "halvings": 2.0, "finite": True}
    keras.check_mixed([answer | {"weights": "a"}] * 2)
    with pytest.raises(ValueError, match="expected"):
        keras.check_mixed([answer | {"weights": "a", "iterations": 10}])
    with pytest.raises(ValueError, match="differ"):
        keras.check_mixed([answer | {"weights": "a"}, answer | {"weights": "b"}])


def test_doctor_must_name_the_gpu(tmp_path):
    machine = {"GPU": "NVIDIA H200", "CUDA of torch": "13.0"}
    on_gpu = Setting("cuda", str(tmp_path), 30, {}, machine)
    words = doctor.expected(on_gpu, "nccl")
    text = "ok GPUs NVIDIA H200, 143771 MiB\nok torch 2.11, CUDA\n 13.0\nok NCCL 2.28.9"
    assert doctor.missing(text, words) == []
    assert doctor.missing(text.replace("NCCL 2.28.9", "no NCCL"), words) == [r"NCCL \d"]


def test_doctors_exit_status_must_fit_its_errors():
    content = {"status": "error", "entries": [{"name": "MPI", "status": "error"}]}
    assert "errors: MPI" in doctor.json_detail(content, 1)
    with pytest.raises(ValueError, match="exit status 0"):
        doctor.json_detail(content, 0)
