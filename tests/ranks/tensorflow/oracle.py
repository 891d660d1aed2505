"""Random numbers, and assertions about all ranks."""

import time

import numpy as np

from tests.ranks.frameworks import tf


def numbers(seed, *shape, dtype="float64"):
    """Return normally distributed numbers, the same on every rank for equal seeds."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_raised_on_all_ranks(hvd, error, match, function):
    """Assert that `function` raises on every rank, and that collectives work afterwards."""
    import pytest

    with pytest.raises(error, match=match):
        function()
    assert hvd.allreduce(tf.constant(1), op=hvd.Sum).numpy() == hvd.size()


def assert_same_on_all_ranks(hvd, values):
    """Assert that the values are bit-identical on all ranks."""
    flat = np.concatenate([np.asarray(value).ravel() for value in values])
    gathered = hvd.allgather(tf.constant(flat)[None]).numpy()
    for other in gathered:
        np.testing.assert_array_equal(other, gathered[0])


def slowly(x, seconds):
    """Return `x` after some seconds, and its gradient after the same time, in a graph."""

    def sleep(x, seconds):
        time.sleep(seconds)
        return x

    def after(x):
        # Not stateful, so that TensorFlow may call it at any time.
        slept = tf.numpy_function(sleep, [x, seconds], x.dtype, stateful=False)
        return tf.ensure_shape(slept, x.shape)

    @tf.custom_gradient
    def both(x):
        return after(x), after

    return both(x)
