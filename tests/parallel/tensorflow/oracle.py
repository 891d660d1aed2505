"""The oracle: one process with the data of all ranks; and checks that ranks are equal."""

import numpy as np


def numbers(seed, *shape, dtype="float64"):
    """Normally distributed, for everyone the same."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_raised_on_all_ranks(hvd, error, match, function):
    """`function` raises on every rank, and afterwards collectives still work."""
    import pytest
    import tensorflow as tf

    with pytest.raises(error, match=match):
        function()
    assert hvd.allreduce(tf.constant(1), op=hvd.Sum).numpy() == hvd.size()


def assert_same_on_all_ranks(hvd, values):
    """Bit for bit."""
    import tensorflow as tf

    flat = np.concatenate([np.asarray(value).ravel() for value in values])
    everyones = hvd.allgather(tf.constant(flat)[None]).numpy()
    for other in everyones:
        np.testing.assert_array_equal(other, everyones[0])
