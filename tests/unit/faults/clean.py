"""A job without a fault: the launcher must report nothing, and no process may grow.

python -m tests.unit.faults.clean --ranks 4 --steps 10000
python -m tests.unit.faults.clean --framework keras --ranks 2 --steps 10000

Rank 0 validates every 500 steps, the last batch of an epoch has another size on each rank, and
rank 1 compiles for 10 s. The command prints what the launcher said, and the resident memory, the
threads and the open files of each process during the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.unit.launch.commands import started

TORCH = """\
import sys, time
import torch
import hvdkit.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters()), model.named_parameters(), on_nonfinite="raise"
)
for step in range(1, int(sys.argv[1]) + 1):
    optimizer.zero_grad()
    # The last batch of an epoch has another size on each rank.
    size = 8 if step % 50 else 1 + hvd.rank()
    model(torch.rand(size, 32)).square().mean().backward()
    optimizer.step()
    if step == 2 and hvd.rank() == 1:
        time.sleep(10)  # compiles
    if step % 500 == 0 and hvd.rank() == 0:
        print("at step", step, flush=True)
        with torch.no_grad():  # validation
            for _ in range(200):
                model(torch.rand(64, 32))
            time.sleep(1)
print("trained", flush=True)
"""

KERAS = """\
import os, sys, time
import keras
import numpy as np
import tensorflow as tf
import hvdkit.keras as hvd

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.Input((32,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(), on_nonfinite="raise")
model.compile(optimizer, "mse")
random = np.random.default_rng(hvd.rank())
x, y = random.random((64, 32), "float32"), random.random((64, 4), "float32")


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        # The last batch of an epoch has another size on each rank.
        size = 8 if index < 49 else 1 + hvd.rank()
        return x[:size], y[:size]


class Events(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and hvd.rank() == 1 and not hasattr(self, "compiled"):
            self.compiled = True
            time.sleep(10)  # compiles

    def on_epoch_end(self, epoch, logs=None):
        step = 50 * (epoch + 1)
        if step % 500 == 0 and hvd.rank() == 0:
            print("at step", step, flush=True)
            self.model.evaluate(x, y, verbose=0)
            time.sleep(1)


epochs = int(sys.argv[1]) // 50
model.fit(Data(), epochs=epochs, callbacks=[Events()], verbose=0)
print("trained", flush=True)
"""

SCRIPTS = {"torch": TORCH, "keras": KERAS}


class Use(NamedTuple):
    """The resources of a process: its resident memory in bytes, its threads and open files."""

    memory: int
    threads: int
    files: int


@dataclass
class Outcome:
    """A job: the status and lines of the launcher, the lines of the ranks, and what they used.

    `uses` has for some steps the resources of each process, by its name.
    """

    status: int = 0
    lines: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    uses: dict[int, dict[str, Use]] = field(default_factory=dict)


def run(folder: Path, framework: str, ranks: int, steps: int) -> Outcome:
    """Run a job of `ranks` ranks in `folder`."""
    (folder / "train.py").write_text(SCRIPTS[framework])
    env = {name: value for name, value in os.environ.items() if name != "PWD"}
    env |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = ("-np", ranks, "--output-dir", "runs", sys.executable, "train.py", steps)
    outcome = Outcome()
    with (folder / "said").open("w+") as said:
        with started(*words, cwd=folder, env=env, stderr=said) as job:
            for line in job.stdout:
                outcome.lines.append(line.rstrip("\n"))
                if match := re.search(r"at step (\d+)$", line):
                    outcome.uses[int(match[1])] = uses(psutil.Process(job.pid))
            outcome.status = job.wait()
        said.seek(0)
        for line in said.read().splitlines():
            (outcome.lines if re.match(r"\[\d+\] ", line) else outcome.said).append(line)
    return outcome


def uses(launcher: psutil.Process) -> dict[str, Use]:
    """Return the resources of the launcher, its agents and the ranks, by name."""
    found = {"launcher": _use(launcher)}
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if "HOROVOD_RANK" in environment and "train.py" in process.cmdline():
                found[f"rank {environment['HOROVOD_RANK']}"] = _use(process)
            elif "hvdkit.launch.agent.main" in process.cmdline() and process.ppid() == launcher.pid:
                found["agent"] = _use(process)
    return dict(sorted(found.items()))


def _use(process: psutil.Process) -> Use:
    with process.oneshot():
        return Use(process.memory_info().rss, process.num_threads(), process.num_fds())


def main() -> int:
    """Run a job, and print what the launcher said and what the processes used."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=sorted(SCRIPTS), default="torch")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvdkit-clean-") as folder:
        outcome = run(Path(folder), arguments.framework, arguments.ranks, arguments.steps)
    slow = [line for line in outcome.lines if "is slow" in line]
    print(f"exit status {outcome.status}, {len(outcome.said)} lines of the launcher")
    print("\n".join([*outcome.said, *slow]))
    print("| step | process | resident memory, MB | threads | open files |")
    print("|---|---|---|---|---|")
    for step, found in outcome.uses.items():
        for name, use in found.items():
            memory = use.memory / 1e6
            print(f"| {step:,} | {name} | {memory:.1f} | {use.threads} | {use.files} |")
    trained = sum(line.endswith("trained") for line in outcome.lines)
    return int(outcome.status != 0 or trained != arguments.ranks)


if __name__ == "__main__":
    sys.exit(main())
