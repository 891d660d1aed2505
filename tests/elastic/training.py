"""The trainings of the elastic tests, and what one process trains with the same batches.

The state keeps the samples of each batch. So the final state tells which samples were trained, and
the weights must be those of these batches.
"""

import json

from tests.without_dynamo import WITHOUT_DYNAMO

#: Samples of the data set.
SAMPLES = 96
#: The most samples that a sampler of at most 3 ranks repeats at the end of an epoch.
REPEATED = 2
BATCH = 4
EPOCHS = 2

#: COMPRESSION, ACCUMULATION and MAGNITUDES are variables of the environment. With MAGNITUDES=1, the
#: magnitude of gradients changes so much that scales of fp16 change, and that sums overflow.
DATA = f"""
import os
import numpy as np

generator = np.random.default_rng(0)
inputs = generator.normal(size=({SAMPLES}, 8)).astype("float32")
targets = generator.normal(size=({SAMPLES}, 1)).astype("float32")
exponents = generator.integers(-24, 1, {SAMPLES} // {BATCH}) * int(os.environ.get("MAGNITUDES", 0))
weights = (2.0 ** np.repeat(exponents, {BATCH})).astype("float32")
accumulation = int(os.environ.get("ACCUMULATION", 1))


def compression(hvd):
    name = os.environ.get("COMPRESSION", "none")
    return hvd.Int8(as_bf16=lambda *_: False) if name == "int8" else name
"""

TORCH = f"""
{WITHOUT_DYNAMO}
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import hvdkit.torch as hvd
{DATA}
hvd.init()
torch.manual_seed(hvd.rank())
data = TensorDataset(*map(torch.from_numpy, (inputs, targets)), torch.arange({SAMPLES}))
model = torch.nn.Linear(8, 1)
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.constant_(model.bias, 0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size={BATCH}, sampler=sampler)


@hvd.elastic.run
def train(state):
    print("begin", state.epoch, state.batch, "size", hvd.size(), "resets", resets, flush=True)
    while state.epoch < {EPOCHS}:
        for number, (x, y, samples) in enumerate(loader):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            everywhere = sum(hvd.allgather_object(samples.tolist()), [])
            state.trained = [*state.trained, [state.epoch, everywhere]]
            state.sampler.record_batch(number, len(samples))
            state.batch += 1
            time.sleep(float(open("pause").read()))
            after_batch(state)
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def after_batch(state):
    if os.environ.get("COMMITS") == "rarely" and state.batch % 3:
        state.check_host_updates()
    else:
        state.commit()
    if hvd.rank() == 0:
        print("batch", state.epoch, state.batch, os.getpid(), flush=True)


resets = []
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, trained=[])
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
weights = [p.tolist() for p in model.parameters()]
print("trained", json.dumps([weights, state.trained]), flush=True)
"""

#: Rank r of n has the samples r, r + n, ..., in the same order in each epoch.
KERAS = f"""
import json, os, time
import keras
import hvdkit.keras as hvd
{DATA}
hvd.init()
inputs, targets, weights = (each[hvd.rank() :: hvd.size()] for each in (inputs, targets, weights))
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1), keras.layers.Dropout(0.0)])
model.layers[0].kernel.assign(np.full((8, 1), 0.5))
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
options = dict(compression=compression(hvd), accumulation_steps=accumulation)
model.compile(hvd.DistributedOptimizer(optimizer, **options), "mse", metrics=["mae"])


class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.count += 1


class Report(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if hvd.rank() == 0:
            print("batch", state.epoch, state.batch, os.getpid(), flush=True)
        time.sleep(float(open("pause").read()))


@hvd.elastic.run
def train(state):
    print("begin", state.epoch, state.batch, "size", hvd.size(), "resets", resets, flush=True)
    callbacks = [
        Count(),
        hvd.elastic.CommitStateCallback(state, int(os.environ.get("COMMIT_BATCHES", 1))),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        Report(),
    ]
    checkpoint = None
    if every_steps := os.environ.get("CHECKPOINT_STEPS"):
        options = dict(every_steps=int(every_steps), asynchronous=False)
        folder = os.environ["FOLDER"].format(hvd.rank(), os.environ["HVDKIT_ELASTIC_START"])
        checkpoint = hvd.callbacks.Checkpoint(folder, **options)
        callbacks.append(checkpoint)
    model.fit(
        inputs,
        targets,
        sample_weight=weights,
        batch_size={BATCH},
        shuffle=False,
        epochs={EPOCHS} - state.epoch,
        callbacks=callbacks,
        verbose=0,
    )
    if checkpoint is not None:
        print("counted", state.epoch, state.count, checkpoint.step, flush=True)


resets = []
state = hvd.elastic.KerasState(model, epoch=0, batch=0, count=0)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
weights = [np.asarray(w).T.tolist() for w in model.get_weights()]
print("trained", json.dumps([weights, []]), flush=True)
"""

_TENSORFLOW_DATA = f"""
import json, os, time
import tensorflow as tf
import hvdkit.tensorflow as hvd
{DATA}
hvd.init()
data = tuple(each[hvd.rank() :: hvd.size()] for each in (inputs, targets, weights))
data = tf.data.Dataset.from_tensor_slices(data).batch({BATCH})
"""

_TENSORFLOW_LOOP = f"""
@hvd.elastic.run
def train(state):
    print("begin", state.epoch, state.batch, "size", hvd.size(), "resets", resets, flush=True)
    while state.epoch < {EPOCHS}:
        for x, y, w in data.skip(state.batch):
            step(x, y, w)
            state.batch += 1
            state.commit()
            if hvd.rank() == 0:
                print("batch", state.epoch, state.batch, os.getpid(), flush=True)
            time.sleep(float(open("pause").read()))
        state.epoch += 1
        state.batch = 0
        state.commit()


resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
print("trained", json.dumps([[weight.numpy().T.tolist(), bias.numpy().tolist()], []]), flush=True)
"""

TENSORFLOW = f"""
{_TENSORFLOW_DATA}
weight, bias = tf.Variable(tf.fill((8, 1), 0.5)), tf.Variable(tf.zeros((1,)))
velocity = [tf.Variable(tf.zeros_like(v)) for v in (weight, bias)]


@tf.function
def step(x, y, w):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weight + bias - y) * w[:, None])
    tape = hvd.DistributedGradientTape(tape, compression=compression(hvd))
    gradients = tape.gradient(loss, [weight, bias])
    for v, speed, gradient in zip((weight, bias), velocity, gradients):
        speed.assign(0.9 * speed + gradient)
        v.assign_sub(0.01 * speed)


state = hvd.elastic.TensorFlowState([weight, bias, *velocity], epoch=0, batch=0)
{_TENSORFLOW_LOOP}
"""

#: A loop with a wrapped optimizer of Keras. Its accumulation windows do not end with an epoch.
TENSORFLOW_KERAS = f"""
{_TENSORFLOW_DATA}
import keras
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
weight, bias = (variable.value for variable in model.variables)
weight.assign(tf.fill((8, 1), 0.5))
optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
options = dict(compression=compression(hvd), backward_passes_per_step=accumulation)
optimizer = hvd.DistributedOptimizer(optimizer, **options)


@tf.function
def step(x, y, w):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y) * w[:, None])
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0)
{_TENSORFLOW_LOOP}
"""


def batches_in_order(ranks):
    """Return the batches of KERAS and TENSORFLOW with a fixed number of ranks."""
    size = BATCH * ranks
    starts = range(0, SAMPLES, size)
    return [[epoch, [*range(s, s + size)]] for epoch in range(EPOCHS) for s in starts]


def check(lines, ranks, trained=None):
    """Check the results of all ranks: equal weights, each sample trained, one process's weights.

    Args:
        lines: the lines of all ranks.
        ranks: the number of ranks at the end.
        trained: the batches, if the ranks do not tell them.
    """
    results = [line.partition("trained ")[2] for line in lines if "] trained " in line]
    assert len(results) == ranks
    assert len(set(results)) == 1
    weights, told = json.loads(results[0])
    trained = told or trained
    if trained is None:
        return None
    for epoch in range(EPOCHS):
        samples = [s for number, batch in trained if number == epoch for s in batch]
        assert set(samples) == set(range(SAMPLES))
        # The sampler repeats samples in the last batch, so that all ranks have the same number.
        assert len(samples) <= SAMPLES + REPEATED, len(samples)
    assert_close(weights, expected(trained))
    return trained


def assert_close(found, wanted):
    import numpy as np

    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.array(mine), theirs, rtol=1e-3, atol=1e-5)


def expected(trained):
    """Return weights and bias after the batches, by SGD with momentum in NumPy."""
    import numpy as np

    names = {}
    exec(DATA, names)
    weight, bias = np.full((1, 8), 0.5), np.zeros(1)
    velocity = [np.zeros_like(weight), np.zeros_like(bias)]
    for _, samples in trained:
        x, y = (names[name][samples].astype(np.float64) for name in ("inputs", "targets"))
        error = 2 * (x @ weight.T + bias - y) / len(x)
        velocity[0] = 0.9 * velocity[0] + error.T @ x
        velocity[1] = 0.9 * velocity[1] + error.sum(0)
        weight -= 0.01 * velocity[0]
        bias -= 0.01 * velocity[1]
    return [weight, bias]
