"""Elastic states: save, restore, sync; and a job whose ranks change."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from hvdkit.errors import UsageError
from tests.commit_files import read_commit, write_commit
from tests.ranks.elastic_samplers import check_that_a_commit_keeps_the_position
from tests.ranks.frameworks import keras, tf
from tests.ranks.rank_pool import Configuration, start_ranks_of
from tests.ranks.tensorflow.oracle import assert_same_on_all_ranks


def values(variables):
    return [v.numpy().copy() for v in variables]


def assert_equal(own, expected):
    for mine, theirs in zip(own, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def model_of(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
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
    variables = [tf.Variable(float(hvd.rank())), tf.Variable([hvd.rank(), 1])]
    state = hvd.elastic.TensorFlowState(variables, step=hvd.rank())
    state.sync()
    assert [v.numpy().tolist() for v in variables] == [0, [0, 1]]
    variables[0].assign(5)
    state.step = 5
    state.restore()
    assert variables[0].numpy() == 0
    assert state.step == 0


def forget_tapes():
    """Forget the reductions of tapes, as a new process does."""
    from hvdkit.tensorflow import tape_reducers

    tape_reducers.reducer_of.cache_clear()
    tape_reducers._reducers.clear()
    tape_reducers._saved_states.clear()


@pytest.mark.parametrize("state_class", ["TensorFlowState", "TensorFlowKerasState"])
def test_a_commit_contains_the_scales_of_tapes(hvd, state_class):
    """The last rank has no commit, as on a host that was lost. It gets the state of rank 0."""

    def make():
        forget_tapes()
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(model.trainable_variables)

        def step(x, magnitude):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2) * magnitude
            tape = hvd.DistributedGradientTape(tape, compression="fp16", bucket_bytes=30)
            gradients = tape.gradient(loss, model.trainable_variables)
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.assign_sub(gradient)

        if state_class == "TensorFlowState":
            return model, hvd.elastic.TensorFlowState(model.variables, step=0), step
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, step=0)
        return model, state, tf.function(step)

    def train(model, state, step, commit=None):
        seen = []
        while state.step < 12:
            if state.step == 6 and commit is not None:
                state.save()
                write_commit(state, commit)
            x = np.random.default_rng([state.step, hvd.rank()]).normal(size=(3, 6))
            # The magnitude of the gradients changes, and with it the scales.
            step(tf.constant(x, tf.float32), tf.constant(2.0 ** (9 * (state.step % 4) - 30)))
            state.step += 1
            seen.append(values(model.variables))
        return seen[-6:]

    model, state, step = make()
    with tempfile.TemporaryDirectory() as folder:
        commit = Path(folder) / "commit"
        expected = train(model, state, step, commit)
        restarted, restarted_state, step = make()
        if hvd.rank() < hvd.size() - 1:
            read_commit(restarted_state, commit)
            restarted_state.restore()
    restarted_state.sync()
    # In the same process, too.
    for _ in range(2):
        assert restarted_state.step == 6
        for mine, before in zip(train(restarted, restarted_state, step), expected, strict=True):
            assert_equal(mine, before)
        restarted_state.restore()


def test_a_state_contains_the_variables_of_its_optimizers(hvd):
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    with pytest.raises(UsageError, match="optimizer-a is a SGD that is not built"):
        hvd.elastic.TensorFlowState(model.variables, optimizer={"a": optimizer})
    optimizer.build(model.trainable_variables)
    optimizer.variables[-1].assign_add([hvd.rank() + 1.0] * 2)
    state = hvd.elastic.TensorFlowState(model.variables, optimizer={"a": optimizer}, step=0)
    state.sync()
    assert optimizer.variables[-1].numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["ObjectState", "TensorFlowState"])
def test_a_state_keeps_the_position_of_a_sampler(hvd, kind):
    with tempfile.TemporaryDirectory() as folder:
        check_that_a_commit_keeps_the_position(hvd, kind, Path(folder) / "commit")


def test_values_that_cannot_be_copied(hvd):
    """The copy of a variable would not be used by a traced function."""
    variable = tf.Variable(1.0)
    for kind in (hvd.elastic.ObjectState, hvd.elastic.TensorFlowState):
        for value in (variable, [variable], {"a": variable}):
            with pytest.raises(UsageError, match=r"ResourceVariable.*use the argument `variables`"):
                kind(weight=value)
    with pytest.raises(UsageError, match=r"weight .* refers to a ResourceVariable"):
        hvd.elastic.TensorFlowState([variable], weight=Holder(variable))


class Holder:
    """An object of a script."""

    def __init__(self, held):
        self.held = held


def test_a_model_that_is_not_built_raises(hvd):
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
        model.optimizer.iterations.assign(0)  # of a rank that starts later
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


def test_a_state_of_several_process_sets_is_refused(hvd, tmp_path):
    """Commits, `sync` and checkpoints would have the model of rank 0 only."""
    model = model_of(1)
    first = hvd.add_process_set([0])
    try:
        own = first if hvd.rank() == 0 else hvd.global_process_set
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=own)
        optimizer.build(model.trainable_variables)
        for state in (
            hvd.elastic.TensorFlowState(model.variables, optimizer=optimizer),
            hvd.elastic.TensorFlowKerasState(model, optimizer),
        ):
            with pytest.raises(UsageError, match=r"rank 0: .* over ranks \[0\]; ranks? 1.*: all"):
                state.sync()
        if hvd.rank() == 0:
            with pytest.raises(UsageError, match=r"optimizer over ranks \[0\]"):
                hvd.Checkpointer(tmp_path, model=model, optimizer=optimizer)
    finally:
        hvd.remove_process_set(first)
