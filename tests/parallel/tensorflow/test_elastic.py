"""Elastic states: save, restore, sync; and a job whose ranks change."""

import sys

import numpy as np
import pytest

from hvdkit.errors import UsageError
from tests.parallel.rank_pool import Configuration, start_ranks_of
from tests.parallel.tensorflow.oracle import assert_same_on_all_ranks


def values(variables):
    return [v.numpy().copy() for v in variables]


def assert_equal(own, expected):
    for mine, theirs in zip(own, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def model_of(seed):
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def train(model, steps):
    x = np.random.default_rng(steps).normal(size=(4, 3))
    for _ in range(steps):
        model.train_on_batch(x, x[:, :2])


@pytest.mark.parametrize("has_trained", ["all", "all but the last"])
def test_a_keras_model(hvd, has_trained):
    model = model_of(hvd.rank())
    new = has_trained == "all but the last" and hvd.rank() == hvd.size() - 1
    if not new:
        train(model, 2 + hvd.rank())
    state = hvd.elastic.TensorFlowKerasState(model, epoch=hvd.rank(), batch=0)
    variables = [*model.variables, *model.optimizer.variables]
    root_values = hvd.broadcast_object(values(variables), root_rank=0)
    state.sync()
    assert_equal(values(variables), root_values)
    assert state.epoch == 0
    state.epoch = 7
    train(model, 1)
    state.save()
    saved = values(variables)
    train(model, 1)
    state.epoch = 8
    with np.testing.assert_raises(AssertionError):
        assert_equal(values(variables), saved)
    state.restore()
    assert_equal(values(variables), saved)
    assert state.epoch == 7
    assert_same_on_all_ranks(hvd, saved)


def test_variables(hvd):
    import tensorflow as tf

    variables = [tf.Variable(float(hvd.rank())), tf.Variable([hvd.rank(), 1])]
    state = hvd.elastic.TensorFlowState(variables, step=hvd.rank())
    state.sync()
    assert [v.numpy().tolist() for v in variables] == [0, [0, 1]]
    variables[0].assign(5)
    state.step = 5
    state.restore()
    assert variables[0].numpy() == 0
    assert state.step == 0


def test_a_model_that_is_not_built_raises(hvd):
    import keras

    with pytest.raises(UsageError, match="the model is not built"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))


CHANGING_RANKS = """
import os
import time

import keras
import numpy as np
import tensorflow as tf

import hvdkit.keras as hvd
import hvdkit.tensorflow as tape_hvd

job = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
first = job["HOROVOD_RANK"] == "0"
weight = tf.Variable([1.0, 2.0])
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), lambda _, y: y)
hvd.shutdown()


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * x)
    return tape_hvd.DistributedGradientTape(tape).gradient(loss, weight)


def train(alone):
    if alone:
        for name in job:
            os.environ.pop(name, None)
    else:
        os.environ.update(job)
    hvd.init()
    x = np.full((1, 2), hvd.rank() + 1.0, "float32")
    kernel = model.layers[0].kernel
    for _ in range(2):
        kernel.assign(tf.ones((2, 1)))
        model.fit(x, x, verbose=0)
        print("gradients", hvd.size(), step(x[0]).numpy()[0], 1 - kernel.numpy()[0, 0], flush=True)
    hvd.shutdown()


if first:
    train(alone=True)
train(alone=False)
if first:
    train(alone=True)
"""


def test_functions_are_traced_again_if_the_ranks_change():
    """A job grows from one rank to two and shrinks again. The second rank has no traces."""
    env = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"}
    command = [sys.executable, "-c", CHANGING_RANKS]
    ranks = start_ranks_of(Configuration("tensorflow", "gloo", 2), command, env)
    found = [
        [line.split()[1:] for line in result.output.splitlines() if line.startswith("gradients")]
        for result in ranks.wait(100, 5.0)
    ]
    alone, together = [["1", "1.0", "1.0"]] * 2, [["2", "1.5", "1.5"]] * 2
    assert found == [[*alone, *together, *alone], together]
