"""The faults of `seeded.py` in jobs of Keras and of TensorFlow.

python -m tests.unit.faults.seeded_keras                    # runs all, and prints a table
python -m tests.unit.faults.seeded_keras "TensorFlow: "     # runs those whose names contain the
text

Left out are faults of parts that only PyTorch has: hooks of the backward pass, a DataLoader, and
`loss.backward()` without a step. A change of the momentum has no effect after `fit` has traced its
graph.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from tests.unit.faults import seeded
from tests.unit.faults.seeded import BIT, EXIT_1, STALL, Case

_RANKS = 3

_BEGIN = """\
import os, signal, socket, subprocess, sys, threading, time
me = int(next(os.environ[n] for n in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if n in os.environ))
at_fault = me == {rank}
if at_fault:
    {before_init}
import numpy as np
"""

KERAS = (
    _BEGIN
    + """\
import keras
import hvdkit.keras as hvd

hvd.init()
keras.utils.set_random_seed(0)
hidden, steps, own, options = 64, 14, True, dict(bucket_bytes=20_000, check_interval=1)
delay = 0.0
if at_fault:
    {build}
layers = [keras.layers.Dense(hidden), keras.layers.Dense(64), keras.layers.Dense(64)]
model = keras.Sequential([keras.Input((64,)), *layers])
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
{options}
model.compile(hvd.DistributedOptimizer(optimizer, **options), "mse")
optimizer, factor = model.optimizer, 1.0


def fault():
    {fault}


class Data(keras.utils.PyDataset):
    def __len__(self):
        return steps

    def __getitem__(self, index):
        x = np.full((8, 64), 0.5, "float32")
        return x * factor, x


class Step(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(delay)
        if at_fault and batch == 10:
            fault()
        if own:
            hvd.allreduce(np.float32(1), name="loss")

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


model.fit(Data(), callbacks=[Step()], verbose=0)
print("trained", flush=True)
"""
)

TENSORFLOW = (
    _BEGIN
    + """\
import tensorflow as tf
import hvdkit.tensorflow as hvd

hvd.init()
tf.random.set_seed(0)
hidden, steps, own, options = 64, 14, True, dict(bucket_bytes=20_000)
if at_fault:
    {build}
shapes = [(64, hidden), (hidden,), (hidden, 64), (64,), (64, 64), (64,)]
names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
variables = [
    tf.Variable(tf.random.stateless_uniform(shape, (1, k), -0.1, 0.1), name=name)
    for k, (name, shape) in enumerate(zip(names, shapes))
]
velocity = [tf.Variable(tf.zeros_like(v)) for v in variables]
{options}
factor = 1.0


def fault():
    {fault}


@tf.function(reduce_retracing=True)
def train(x):
    with tf.GradientTape() as tape:
        y = x
        for weight, bias in zip(variables[::2], variables[1::2]):
            y = y @ weight + bias
        loss = tf.reduce_mean(tf.square(y))
    gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)
    for v, speed, gradient in zip(variables, velocity, gradients):
        speed.assign(0.9 * speed + gradient)
        v.assign_sub(0.01 * speed)
    return loss


for step in range(steps):
    # The parameters are compared after step 10.
    if at_fault and step == 8:
        fault()
    if own:
        hvd.allreduce(tf.ones(()), name="loss")
    {instead_of_step}train(tf.fill((8, 64), factor))
    time.sleep(0.05)
print("trained", flush=True)
"""
)

#: Faults whose code and message are the same for all frameworks.
_SAME = (
    *("sleeps in its data", "loops", "loops in C with the GIL held"),
    *("waits for a lock that it holds", "waits for an event", "reads from a socket"),
    *("waits for a program", "waits for a queue", "opens a pipe without a writer"),
    *("waits for a file lock", "waits for a thread that never ends", "SIGSTOP", "SIGKILL"),
    *("raises an exception", "ends early with status 0", "ends early with os._exit(0)"),
    *("ends early with status 3", "SIGSEGV", "aborts", "SIGTERM", "recurses without end"),
    *("has a limit of memory", "reads a missing file", "shuts Horovod down"),
    "broadcasts an object that it cannot pickle",
    *("sleeps before init", "ends before init", "raises before init", "dies before init"),
    *("has another option", "has another wire format"),
    *("sleeps in its data (MPI)", "SIGSTOP (MPI)", "SIGKILL (MPI)", "raises an exception (MPI)"),
    "ends early with status 0 (MPI)",
)

_TOO_MUCH = Case("allocates too much", EXIT_1 + "MemoryError", "bytearray(1 << 60)")
_DIFFERS = r"Ranks differ in the allreduce 'loss': rank {rank} on \S+: allreduce of "
_OTHERS = [
    _TOO_MUCH,
    Case("does not add a process set",
         r"Rank \d is at \S*train\.py:\d+ in <module>: hvd\.add_process_set(.|\n)*" + STALL
         + r".*time\.sleep",
         options="if at_fault: time.sleep(100)\nhvd.add_process_set([0, 1])",
         env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}),
    Case("calls a collective alone",
         r"Rank {rank} (on \S+ )?.*'only on one rank'(.|\n)*a deadlock",
         "hvd.allreduce({ones}, name='only on one rank')"),
    Case("sends another shape", _DIFFERS + "12 bytes", "hvd.allreduce({ones}, name='loss')"),
    Case("sends another dtype", _DIFFERS + r"\d bytes of int64",
         "hvd.allreduce({whole}, name='loss')"),
    Case("calls another operation",
         r"Rank {rank} .*train\.py:\d+ in fault: hvd\.allgather(.|\n)*a deadlock",
         "hvd.allgather({ones}, name='loss')"),
    Case("has a larger layer",
         r"rank {rank}\b.*(0\.weight|dense/kernel)|(0\.weight|dense/kernel).*rank {rank}\b",
         build="hidden = 65"),
    Case("has NaN in its data", r"rank {rank}: .*('2\.bias\S*'|dense_2/bias)",
         "global factor; factor = float('nan')", options="options['on_nonfinite'] = 'raise'"),
]  # fmt: skip
_OF_KERAS = [
    Case("flips a bit of a weight", rf"after step 1\d: '\S*dense_1/kernel' {BIT}",
         "v = layers[1].kernel; a = np.array(v); a.view('int32')[0, 0] ^= 1 << 30; v.assign(a)"),
    Case("flips a bit of a bias", rf"after step 1\d: '\S*dense_2/bias' {BIT}",
         "v = layers[2].bias; a = np.array(v); a.view('int32')[3] ^= 1 << 28; v.assign(a)"),
    Case("flips a bit of the optimizer state", r"after step 1\d: .*momentum.* on rank {rank} ",
         "v = next(v for v in optimizer.variables if 'momentum' in v.path)\n"
         "a = np.array(v); a.view('int32')[0, 0] ^= 1 << 29; v.assign(a)"),
    Case("changes its learning rate",
         r"after step 1\d: '\S*learning_rate' on rank {rank} .*element 0 is 0\.5",
         "optimizer.learning_rate = 0.5"),
    Case("has fewer batches", r"rank {rank}\b.*\b9\b", options="steps = 9 if at_fault else steps"),
    Case("is slow in each step", r"rank {rank} on host \S+ is slow",
         options="options['check_interval'] = 4; steps = 50; own = False\n"
         "if at_fault: delay = 0.3"),
]  # fmt: skip
_DIFFERENT = (
    r"after reduction 10: '{}\S*' on rank {{rank}} \(host \S+\) differs in 1 of \S+ elements "
    r"from rank \d: element {}\b"
)
_OF_TENSORFLOW = [
    Case(
        "flips a bit of a weight",
        _DIFFERENT.format(r"1\.weight", 65),
        "v = variables[2]; a = v.numpy(); a.view('int32')[1, 1] ^= 1 << 25; v.assign(a)",
    ),
    Case(
        "flips a bit of a bias",
        _DIFFERENT.format(r"2\.bias", 3),
        "v = variables[5]; a = v.numpy(); a.view('int32')[3] ^= 1 << 25; v.assign(a)",
    ),
    Case(
        "skips a step",
        r"Rank {rank} on \S+ has not called it: the rank waits for .*: hvd\.allreduce",
        instead_of_step="if not (at_fault and step == 8): ",
    ),
    Case("has fewer batches", r"Rank {rank} on \S+ had ended without an error|Rank {rank}\b.*the "
         "process has ended", "sys.exit(0)"),
]  # fmt: skip

_KERAS_CODE = {"ones": "np.ones(3, 'float32')", "whole": "np.int64(1)"}
_TENSORFLOW_CODE = {"ones": "tf.ones(3)", "whole": "tf.constant(1, tf.int64)"}


def _cases(
    name: str, template: str, code: Mapping[str, str], own: list[Case], env: Mapping[str, str]
) -> list[Case]:
    same = [case for case in seeded.CASES if case.name in _SAME]
    assert len(same) == len(_SAME)

    def adapted(case: Case) -> Case:
        fault = case.fault
        for key, value in code.items():
            fault = fault.replace(f"{{{key}}}", value)
        return replace(
            case,
            name=f"{name}: {case.name}",
            fault=fault,
            template=template,
            ranks=_RANKS,
            env={**case.env, **env, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    return [adapted(case) for case in [*same, *_OTHERS, *own]]


CASES = [
    *_cases("Keras", KERAS, _KERAS_CODE, _OF_KERAS, {"KERAS_BACKEND": "tensorflow"}),
    *_cases("TensorFlow", TENSORFLOW, _TENSORFLOW_CODE, _OF_TENSORFLOW, {}),
]

if __name__ == "__main__":
    sys.exit(seeded.main(CASES))
