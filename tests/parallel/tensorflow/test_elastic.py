"""States of an elastic job: saved, restored, brought to all ranks."""

import numpy as np
import pytest

from hvdkit.errors import UsageError
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
    of_rank_0 = hvd.broadcast_object(values(variables), root_rank=0)
    state.sync()
    assert_equal(values(variables), of_rank_0)
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


def test_a_model_that_is_not_built(hvd):
    import keras

    with pytest.raises(UsageError, match="the model is not built"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))
