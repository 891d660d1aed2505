"""The page of a real job: a rank is killed, the job restarts at a checkpoint and ends."""

import json
import subprocess
import sys

import pytest

from tests.unit.report.runs import Page, report

pytest.importorskip("matplotlib")

SCRIPT = """
import os, signal, sys, time
import torch
import hvdkit.torch as hvd
from hvdkit.monitor import JSONLLogger

hvd.init()
model = torch.nn.Linear(8, 4)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression="bf16"
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
checkpointer = hvd.Checkpointer("run/saved", model=model, optimizer=optimizer, every_steps=10)
restored = checkpointer.restore()
first = restored.step if restored else 0
with hvd.Monitor([JSONLLogger("run/metrics.jsonl")], every=2) as monitor:
    monitor.steps = first
    for step in range(first + 1, 31):
        optimizer.zero_grad()
        loss = model(torch.ones(16, 8)).square().mean()
        loss.backward()
        if hvd.rank() == 1:
            time.sleep(0.05)
        optimizer.step()
        monitor.step({"loss": loss}, samples=16)
        checkpointer.maybe_save(step)
        if step == 17 and not restored and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
"""


def run(folder, script):
    """Run a script on two ranks, and write the page of the run."""
    (folder / "train.py").write_text(script)
    command = ["run", "-np", "2", "--restarts", "2", "--output-dir", "run/logs"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", *command, sys.executable, "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert report(folder / "run") == 0


@pytest.mark.long
def test_a_job_with_a_restart(tmp_path):
    run(tmp_path, SCRIPT)
    page = Page(tmp_path / "run" / "report.html")
    for sentence in (
        "The job succeeded.",
        "30 steps are reported, in 15 reports; the training has resumed once.",
        "Rank 1 was the slowest in 100 % of the reports",
        "The wire format is bf16.",
        "The job was started twice, and 1 start failed.",
        "rank 1 on localhost failed: killed by signal 9 (Killed).",
        "The newest one is of step 30; no later step was reported.",
        "The job failed: rank 1 on localhost failed: killed by signal 9 (Killed).",
    ):
        assert sentence in page.text
    assert page.rows["ranks"] == ["2"]
    assert page.rows["hosts"] == ["localhost (2 ranks)"]
    assert page.rows["start 2"][-2:] == ["10", "succeeded"]
    assert {"step 10", "step 20", "step 30"} <= page.rows.keys()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["metrics"]["loss"]["mean"] for line in lines if line["type"] == "record"]
    assert page.rows["loss"][:2] == [losses[0], losses[-1]]


KERAS = """
import os, signal, time
import keras
import numpy as np
import hvdkit.keras as hvd
from hvdkit.monitor import JSONLLogger

hvd.init()
points = np.random.default_rng(0).normal(size=(640, 4)).astype("float32")
data = hvd.shard((points, points.sum(1, keepdims=True)))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression="fp16"),
    loss="mse",
    metrics=["mae"],
)


class Events(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05 * hvd.rank())

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and hvd.rank() == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


monitor = hvd.callbacks.MonitorCallback(
    [JSONLLogger("run/metrics.jsonl")], every=2, batch_size=32
)
broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
saving = hvd.callbacks.Checkpoint("run/saved")
model.fit(
    *data, batch_size=32, epochs=4, verbose=0, validation_data=data,
    callbacks=[broadcast, saving, monitor, Events()],
)
"""
TENSORFLOW = """
import os, signal, time
import keras
import tensorflow as tf
import hvdkit.tensorflow as hvd
from hvdkit.monitor import JSONLLogger

hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.01)
optimizer.build(model.trainable_variables)
checkpointer = hvd.Checkpointer("run/saved", model=model, optimizer=optimizer, every_steps=10)
restored = checkpointer.restore()
first = restored.step if restored else 0
hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)


@tf.function
def train_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


with hvd.Monitor([JSONLLogger("run/metrics.jsonl")], every=2) as monitor:
    monitor.steps = first
    for step in range(first + 1, 41):
        time.sleep(0.05 * hvd.rank())
        loss = train_step(tf.random.stateless_normal((32, 4), (step, hvd.rank())))
        monitor.step({"loss": loss}, samples=32)
        checkpointer.maybe_save(step)
        if step == 27 and not restored and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("script", [KERAS, TENSORFLOW], ids=["keras", "tensorflow"])
def test_keras_and_tensorflow(script, tmp_path, monkeypatch):
    """The same facts as of PyTorch."""
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    run(tmp_path, script)
    page = Page(tmp_path / "run" / "report.html")
    for sentence in (
        "The job succeeded.",
        "40 steps are reported, in",
        "the training has resumed once.",
        "loss fell from",
        "Rank 1 was the slowest in",
        "The wire format is fp16. In a ring over 2 ranks, each rank sends as many bytes",
        "The job was started twice, and 1 start failed.",
        "The job failed: rank 1 on localhost failed: killed by signal 9 (Killed).",
    ):
        assert sentence in page.text
    # TensorFlow reads batches within `fit`, and the other script does not use `monitor.batches`.
    assert "The time to read batches was not measured apart." in page.text
    assert "data" not in page.rows
