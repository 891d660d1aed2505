"""`hvd.elastic.run` after errors."""

import pytest

from hvdkit.errors import UsageError
from tests.alone import run_alone
from tests.commit_files import read_commit, write_commit

CODE = """
import tensorflow as tf, hvdkit.tensorflow as hvd
from hvdkit.tensorflow import runtime
hvd.init()
v = tf.Variable(0.0)
state = hvd.elastic.TensorFlowState([v], tries=0)
errors = [
    tf.errors.UnknownError(None, None, "[[{{node hvdkit.0123.0}}]] Connection closed by peer"),
    tf.errors.UnknownError(None, None, "{{function_node __wrapped__HorovodAllreduce}} lost"),
    tf.errors.UnknownError(None, None, "out of something else"),
]

@hvd.elastic.run
def train(state, by):
    v.assign_add(by)
    print("try", v.numpy(), runtime.generation())
    raise errors.pop(0)

try:
    train(state, 2.0)
except tf.errors.UnknownError as error:
    print("ended with:", error.message)
"""


def test_run_restores_and_retries_after_an_error_of_horovod():
    lines = run_alone(CODE, framework="tensorflow").splitlines()
    printed = [line for line in lines if line.startswith(("try", "ended"))]
    # Each time with the initial variable, after another initialisation of Horovod.
    assert printed == ["try 2.0 1", "try 2.0 2", "try 2.0 3", "ended with: out of something else"]


def test_a_commit_has_no_states_of_random_seeds(hvd, tmp_path):
    """After a restart, all ranks read the same commit, and must not drop the same units."""
    import keras
    import tensorflow as tf

    layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    state = hvd.elastic.TensorFlowKerasState(model, epoch=1)
    write_commit(state, tmp_path / "commit")
    weights = model.get_weights()
    model(tf.ones((2, 3)), training=True)
    model.layers[0].bias.assign([1.0, 2.0])
    seeds = [v for v in model.variables if not any(v is weight for weight in model.weights)]
    drawn = [seed.numpy().tolist() for seed in seeds]
    assert len(drawn) == 1
    state.epoch = 2
    read_commit(state, tmp_path / "commit")
    state.restore()
    assert state.epoch == 1
    assert [each.tolist() for each in model.get_weights()] == [each.tolist() for each in weights]
    assert [seed.numpy().tolist() for seed in seeds] == drawn


def test_a_state_contains_the_loss_scale_of_mixed_precision(hvd):
    """`compile` puts the given optimizer into a `LossScaleOptimizer`."""
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    inner = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse")
    state = hvd.elastic.TensorFlowKerasState(model, inner)
    model.optimizer.dynamic_scale.assign(8.0)
    state.save()
    model.optimizer.dynamic_scale.assign(2.0)
    state.restore()
    assert float(model.optimizer.dynamic_scale) == 8.0


@pytest.mark.parametrize("keeps", ["a model", "variables"])
def test_a_state_contains_what_a_loss_scale_optimizer_does_not_count(hvd, keeps):
    """It builds the inner optimizer without tracking, so `variables` lacks a part of the state."""
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    inner = keras.optimizers.Nadam(0.1)
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    scaled.build(model.trainable_variables)
    if keeps == "a model":
        state = hvd.elastic.TensorFlowKerasState(model, scaled)
    else:
        state = hvd.elastic.TensorFlowState(optimizer=scaled)
    inner._u_product.assign(0.25)
    state.save()
    inner._u_product.assign(0.5)
    state.restore()
    assert float(inner._u_product) == 0.25


@pytest.mark.parametrize("keeps", ["a model", "variables"])
def test_a_state_contains_the_variables_of_a_schedule(hvd, keeps):
    import keras

    class Shrinking(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self):
            self.rate = keras.Variable(1.0, trainable=False)

        def __call__(self, step):
            return self.rate * 1.0

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    schedule = Shrinking()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule))
    optimizer.build(model.trainable_variables)
    if keeps == "a model":
        state = hvd.elastic.TensorFlowKerasState(model, optimizer)
    else:
        state = hvd.elastic.TensorFlowState(optimizer=optimizer)
    schedule.rate.assign(0.25)
    state.save()
    schedule.rate.assign(0.5)
    state.restore()
    assert float(schedule.rate) == 0.25


def test_a_model_that_is_compiled_after_the_state_was_made(hvd):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    state = hvd.elastic.TensorFlowKerasState(model)
    model.compile("sgd", loss="mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(UsageError, match="compiled with a SGD that is not in the elastic state"):
        state.save()
