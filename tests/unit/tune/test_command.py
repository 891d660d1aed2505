"""`hvdkit tune` with real jobs of two ranks."""

import json
import subprocess
import sys

import pytest

from hvdkit.cli import main
from hvdkit.engine.describe import installed
from hvdkit.faults import start_folders
from hvdkit.tune import trials

TORCH = """
import os, signal, sys
import torch
import hvdkit.torch as hvd

hvd.init()
size = int(os.environ.get("HVDKIT_BATCH_SIZE", 8))
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
{}
for step in range(10_000):
    optimizer.zero_grad()
    x = torch.randn(size, 64)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""
KERAS = """
import os
import keras
import numpy as np
import hvdkit.keras as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
data = np.ones((64, 4), "float32")
model.fit(data, data[:, :1], batch_size=int(os.environ["HVDKIT_BATCH_SIZE"]), epochs=1000)
"""


@pytest.fixture(autouse=True)
def _engine():
    engine = installed()
    if engine is None or "torch" not in engine.frameworks:
        pytest.skip("no Horovod for torch here: run `hvdkit build`")


def tune(folder, *words, script=TORCH, code=""):
    """Run `hvdkit tune` in a folder, and return the finished process."""
    (folder / "train.py").write_text(script.replace("{}", code))
    return subprocess.run(
        [sys.executable, "-m", "hvdkit", "tune", "-np", "2", *words, sys.executable, "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--batch-sizes", "8", "--turns", "5"], "--turns cannot be combined with --batch-sizes"),
        (["--memory", "1GB"], "--memory needs --batch-sizes"),
        (["--batch-sizes", "9..3"], "--batch-sizes is '9..3': expected FIRST..LAST"),
        (["--batch-sizes", "9", "--memory", "much"], "--memory is 'much': expected a size"),
        (["--wire-formats", "fp17"], "--wire-formats has 'fp17': expected some of none"),
        (["--collectives", "ring"], "--collectives has 'ring': expected some of two-level, flat"),
        (["--restarts", "2"], "--restarts was given"),
        (["--turns", "2"], "--turns is 2: expected at least 3"),
    ],
)
def test_invalid_arguments(words, text, capsys):
    assert main(["tune", "-np", "2", *words, "true"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ({"signal": "SIGKILL"}, "rank 1 on host1: killed by SIGKILL"),
        ({"traceback": ["Traceback", "MemoryError"]}, "rank 1 on host1: MemoryError"),
        (
            {"traceback": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]},
            "CUDA out of memory",
        ),
        (
            {"traceback": ["RuntimeError: [enforce fail at alloc_cpu.cpp:127] . "
                           "DefaultCPUAllocator: can't allocate memory: you tried"]},
            "DefaultCPUAllocator",
        ),
        ({"last_lines": ["terminate called", "  what():  std::bad_alloc"]}, "std::bad_alloc"),
        ({"traceback": ["ValueError: out of memory slots"]}, ""),
        ({"signal": "SIGSEGV"}, ""),
        ({"traceback": ["RuntimeError: can't start new thread"]}, ""),
    ],
)  # fmt: skip
def test_what_is_out_of_memory(failure, text, tmp_path):
    content = {"rank": 1, "host": "host1", "signal": None, "traceback": [], "last_lines": []}
    (tmp_path / start_folders.ERROR).write_text(json.dumps(content | failure))
    found = trials._out_of_memory(tmp_path, limited=False)
    assert text in found
    assert bool(text) == bool(found)


def test_a_limit_of_memory():
    code = "bytearray(50_000_000); print('first'); bytearray(1_000_000_000)"
    command = ["-m", "hvdkit.tune.limited", "300000000", sys.executable, "-c", code]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "first\n"
    assert "MemoryError" in done.stderr


@pytest.mark.long
def test_the_largest_batch_size(tmp_path):
    """One rank is killed above 41 samples, as by the kernel, and above 40 in many steps."""
    code = (
        "from hvdkit.training.trial import TrialPlan\n"
        "most = 41 if TrialPlan.requested().steps == 10 else 40\n"
        "if size > most and hvd.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = tune(tmp_path, "--batch-sizes=16,40,41,64", "--final-steps", "60", code=code)
    assert done.returncode == 0, done.stderr
    assert "batch size 41: passed (10 steps" in done.stdout
    assert "batch size 41: out of memory" in done.stdout
    assert "batch size 40: passed (60 steps" in done.stdout
    assert "batch size 64: out of memory. rank 1 on localhost: killed by SIGKILL" in done.stdout
    assert "The largest batch size of a rank is 40." in done.stdout
    assert "of all ranks  learning rate" in done.stdout
    # Nothing is left of the runs.
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.long
def test_too_little_memory_for_a_batch(tmp_path):
    """The limit applies to a rank, and an allocation beyond it is out of memory."""
    code = "if hvd.rank() == 1: data = torch.ones(size * 300_000_000, dtype=torch.uint8)"
    words = ["--batch-sizes", "1,20", "--memory", "3GB", "--final-steps", "0"]
    done = tune(tmp_path, *words, code=code)
    assert done.returncode == 0, done.stderr
    assert "batch size 20: out of memory. rank 1 on localhost: RuntimeError" in done.stdout
    assert "The largest batch size of a rank is 1." in done.stdout


@pytest.mark.long
def test_another_failure_is_an_error(tmp_path):
    code = "if hvd.rank() == 1: raise ValueError('no such data')"
    done = tune(tmp_path, "--batch-sizes", "16..64", code=code)
    assert done.returncode == 1
    assert "and not for lack of memory" in done.stderr
    assert "ValueError: no such data" in done.stderr
    assert "passed" not in done.stdout


@pytest.mark.long
def test_bucket_sizes_and_wire_formats(tmp_path):
    """A later job uses the result without measuring."""
    words = ["--bucket-mb", "0.01,25", "--wire-formats", "none,bf16", "--turns", "3"]
    done = tune(tmp_path, *words, "--collectives", "two-level")
    assert done.returncode == 0, done.stderr
    assert "25 MB  none" in done.stdout
    assert "0.01 MB  bf16" in done.stdout
    assert "wrote tuning.json" in done.stdout
    code = (
        'tuner = hvd.autotune(optimizer, "tuning.json", wire_formats=["none", "bf16"])\n'
        'sys.exit(f"{tuner.done} {tuner.tuned}")'
    )
    (tmp_path / "train.py").write_text(TORCH.replace("{}", code))
    again = subprocess.run(
        [sys.executable, "-m", "hvdkit", "run", "-np", "2", sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "True True" in again.stderr


@pytest.mark.long
def test_batch_sizes_with_keras(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    done = tune(tmp_path, "--batch-sizes", "4", script=KERAS)
    assert done.returncode == 0, done.stderr
    assert "batch size 4: passed (10 steps" in done.stdout
    assert "The noise scale was not measured: only PyTorch can measure it" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_bucket_sizes_with_keras(tmp_path, monkeypatch, backend):
    if backend not in (installed().frameworks if installed() else ()):
        pytest.skip(f"no Horovod for {backend} here")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("HVDKIT_BATCH_SIZE", "4")
    words = ["--bucket-mb", "0.000005", "--turns", "3", "--collectives", "two-level"]
    done = tune(tmp_path, *words, script=KERAS)
    assert done.returncode == 0, done.stderr
    assert "run 6 of 6, two-level, 5e-06 MB, none" in done.stdout
    assert "tuning.json" not in done.stdout
