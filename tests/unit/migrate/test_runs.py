"""Migrated scripts on two ranks, compared with what they were before."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit import cli

REPOSITORY = Path(__file__).parents[3]

DDP = """\
import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int)
args = parser.parse_args()


def run(sampler, loader, model, optimizer):
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for i, (x, y) in enumerate(loader):
            if i % 2 == 0:
                with model.no_sync():
                    torch.nn.functional.mse_loss(model(x), y).backward()
                continue
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        print(f"loss {round(total.item(), 5)}\\n", end="", flush=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # DDP sends the parameters of rank 0
    x = torch.linspace(-1, 1, 128).reshape(64, 2)
    data = TensorDataset(x, x.sum(1, keepdim=True) ** 2)
    sampler = DistributedSampler(data, seed=3)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = DDP(net)
    groups = [{"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in net.parameters() if p.ndim == 1]})
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    run(sampler, DataLoader(data, 4, sampler=sampler), model, optimizer)
    sums = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, sum(p.detach().sum() for p in model.module.parameters())[None])
    print(f"sums {[round(each.item(), 4) for each in sums]}\\n", end="", flush=True)
    assert args.local_rank is None or args.local_rank == dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

KERAS = """\
import keras
import numpy as np
import tensorflow as tf
from keras import backend as K
from keras.layers.core import Dense
from keras.utils import np_utils

import horovod.keras as hvd

hvd.init()
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

rng = np.random.default_rng(hvd.rank())
x = rng.normal(size=(64, 4))
y = np_utils.to_categorical(x.argmax(1), 4)
model = keras.models.Sequential([Dense(4, activation="softmax", input_dim=4)])
opt = keras.optimizers.SGD(lr=0.5, decay=0.5)
model.compile(
    loss="categorical_crossentropy",
    optimizer=hvd.DistributedOptimizer(opt),
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)


def batches():
    while True:
        yield x, y


history = model.fit_generator(
    batches(),
    2,
    epochs=2,
    verbose=0,
    workers=2,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
)
print("accuracy", len(history.history["acc"]), flush=True)
print("rate", K.get_value(model.optimizer.lr), flush=True)
print("weights", float(abs(model.get_weights()[0]).sum()), flush=True)
"""


def run(folder, *command):
    """Run a command, and return the lines of its output without the numbers of the ranks."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [re.sub(r"^\[\d\] ", "", line) for line in done.stdout.splitlines()]


def on_two_ranks(script):
    return run(script.parent, "hvdkit", "run", "-np", "2", "python", str(script))


@pytest.mark.long
def test_a_migrated_ddp_script_trains_the_same_model(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DDP)
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    before = run(tmp_path, *launch, str(script))
    assert cli.main(["migrate", "--write", str(script)]) == 0
    after = on_two_ranks(script)
    assert sorted(after) == sorted(before)
    assert sum(line.startswith("sums") for line in after) == 2


@pytest.mark.long
def test_a_migrated_keras_2_script_trains_one_model(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(KERAS)
    assert cli.main(["migrate", "--write", str(script)]) == 0
    lines = [line for line in on_two_ranks(script) if line.startswith(("acc", "rate", "weights"))]
    assert len(set(lines)) == 3
    assert len(lines) == 6
    # Keras 2: 0.5 / (1 + 0.5 * iterations), after 4 steps.
    (rate,) = {float(line.split()[1]) for line in lines if line.startswith("rate")}
    assert rate == pytest.approx(0.5 / 3)
