"""Functions for tests of `fit` on several ranks."""

import json

import numpy as np

from tests.ranks.frameworks import keras

STEPS = 3
BATCH = 4


def of_every_rank(value):
    """Return the arguments of all ranks, in the order of the ranks."""
    from hvdkit.keras import backend

    gathered = backend.collectives().allgather(json.dumps(value).encode(), "tests.of_every_rank")
    return [json.loads(data) for data in gathered]


def same_everywhere(value):
    """Assert that all ranks pass the same value; return the value."""
    values = of_every_rank(value)
    assert all(other == values[0] for other in values), values
    return value


def samples(rank, seed=0):
    """Return a rank's data: the same number of batches on every rank, not of samples."""
    random = np.random.default_rng(100 * seed + rank)
    count = STEPS * BATCH - rank % BATCH
    x = random.normal(size=(count, 3)).astype("float32")
    y = (x @ [[1.0], [-2.0], [0.5]] + 0.8 * rank > 0.7).astype("float32")
    return x, y


def all_samples(size, seed=0):
    """Return the data of all ranks."""
    parts = [samples(rank, seed) for rank in range(size)]
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def classifier(optimizer, metrics=("accuracy",), seed=1, **compiled):
    """Return a compiled model, the same on every rank for equal seeds."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(optimizer, loss="binary_crossentropy", metrics=list(metrics), **compiled)
    return model


def skip_without_executions():
    """Skip the test if Keras cannot train several batches in an execution."""
    import pytest

    if keras.backend.backend() == "torch":
        pytest.skip("Keras trains one batch at a time on PyTorch")


def distributed(hvd, rate=0.0, **options):
    """Return a `DistributedOptimizer`. At a rate of 0, metrics are those of one set of weights."""
    return hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)


def fit(hvd, model, *, epochs=1, data=None, **options):
    """Call `fit` with this rank's data, without a shuffle."""
    x, y = samples(hvd.rank()) if data is None else data
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    return model.fit(x, y, epochs=epochs, **options)
