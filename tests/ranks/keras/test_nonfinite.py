"""Gradients with NaN or infinity: their rank and variable are named before the sum hides them."""

import re

import numpy as np
import pytest

from hvdkit.errors import UsageError
from hvdkit.reduction.nonfinite import NonFiniteGradients
from tests.logs import recorded
from tests.ranks.frameworks import keras, tf
from tests.ranks.keras.job import same_everywhere
from tests.ranks.keras.test_uses import weights_of

BATCH, STEPS, BROKEN = 4, 6, 3


def model_of(hvd, **options):
    """Return a model in which only `first/kernel` gets NaN if the inputs are 0."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, use_bias=False, name="first"),
            keras.layers.Activation(lambda x: keras.ops.sqrt(keras.ops.abs(x))),
            keras.layers.Dense(1, name="last"),
        ]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **options)
    model.compile(optimizer, loss="mse")
    return model


def batches(hvd, broken=True):
    """Return data of which batch `BROKEN` of rank 1 gives NaN, or without this batch."""
    x = np.random.default_rng(hvd.rank()).normal(size=(STEPS, BATCH, 3)).astype("float32")
    if not broken:
        x = np.delete(x, BROKEN, 0)
    elif hvd.rank() == 1:
        x[BROKEN] = 0
    return x.reshape(-1, 3)


def fit(model, x):
    return model.fit(x, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0)


def errors():
    """Return the errors that a graph, or code outside of graphs, raises."""
    if keras.backend.backend() == "torch":
        return NonFiniteGradients
    return tf.errors.OpError


def test_the_rank_and_the_variable_are_named(hvd):
    model = model_of(hvd, on_nonfinite="raise", bucket_bytes=20)
    with pytest.raises(errors()) as caught:
        fit(model, batches(hvd))
    message = str(caught.value)
    assert f"NaN or infinity on 1 of {hvd.size()} ranks, before the reduction" in message
    assert re.search(r"rank 1: '[\w/]*first/kernel'\. No rank makes this step.", message)
    assert int(model.optimizer.iterations) == BROKEN
    same_everywhere(weights_of(model))
    fit(model, batches(hvd, broken=False))
    same_everywhere(weights_of(model))


@pytest.mark.long_with("keras-tensorflow")
def test_a_loop_continues_after_the_error(hvd):
    """The next accumulation window does not contain the gradients that are not finite."""
    model = model_of(hvd, on_nonfinite="raise", accumulation_steps=2)
    raised = []
    for batch, x in enumerate(np.repeat(batches(hvd).reshape(STEPS, BATCH, 3), 2, 0)):
        try:
            model.train_on_batch(x, x[:, :1])
        except errors():
            raised.append(batch)
    assert raised == [2 * BROKEN + 1]
    twin = model_of(hvd)
    fit(twin, batches(hvd, broken=False))
    for own, expected in zip(model.weights, twin.weights, strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_all_ranks_skip_the_update(hvd, passes):
    """Also if the gradient was broken in an earlier batch of an accumulation window."""
    model = model_of(hvd, on_nonfinite="skip", accumulation_steps=passes)
    x = np.repeat(batches(hvd).reshape(STEPS, 1, BATCH, 3), passes, 1).reshape(-1, 3)
    with recorded("hvdkit") as log:
        fit(model, x)
    twin = model_of(hvd)
    fit(twin, batches(hvd, broken=False))
    assert int(model.optimizer.iterations) == STEPS - 1
    for own, expected in zip(model.weights, twin.weights, strict=True):
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    same_everywhere(weights_of(model))
    lines = [record.getMessage() for record in log]
    assert len(lines) == (hvd.rank() == 0)
    assert all(re.search(r"rank 1: '[\w/]*first/kernel'\.", line) for line in lines)
    assert all("All ranks skip this step." in line for line in lines)


@pytest.mark.long_with("keras-tensorflow")
def test_one_rank(hvd):
    own = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    try:
        model = model_of(hvd, on_nonfinite="skip", process_set=own[hvd.rank()])
        with hvd.local_fit():
            fit(model, batches(hvd))
        assert int(model.optimizer.iterations) == STEPS - (hvd.rank() == 1)
        assert all(np.isfinite(weight.numpy()).all() for weight in model.weights)
    finally:
        for each in own:
            hvd.remove_process_set(each)


def test_loss_scaling_finds_infinity_itself(hvd):
    with pytest.raises(UsageError, match="'skip' with a LossScaleOptimizer"):
        hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), on_nonfinite="skip"
        )
    with pytest.raises(UsageError, match="expected 'ignore', 'raise' or 'skip'"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), on_nonfinite="stop")
