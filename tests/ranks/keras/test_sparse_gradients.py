"""Sparse gradients (`tf.IndexedSlices`) of Keras optimizers, compared with dense gradients.

Ranks have rows in common, and a rank has rows several times. The oracle is a plain optimizer with
the dense gradient of all ranks.
"""

import inspect

import keras
import numpy as np
import pytest

from tests.ranks.frameworks import tf
from tests.ranks.keras import oracle

ROWS, COLUMNS, STEPS = 6, 3, 3
#: Options that are not linear in the gradient, or that read all rows.
OPTIONS = [
    {},
    {"clipnorm": 0.5},
    {"global_clipnorm": 0.5},
    {"clipvalue": 0.2},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"weight_decay": 0.01},
]


def optimizers():
    """Return the classes of optimizers of Keras, without those that contain other optimizers."""
    found = vars(keras.optimizers).values()
    return [
        kind
        for kind in found
        if inspect.isclass(kind) and "learning_rate" in inspect.signature(kind).parameters
    ]


def rows_of(step, rank):
    """Return indices and values of a rank's rows in a step."""
    rng = np.random.default_rng([step, rank])
    count = int(rng.integers(1, 9))
    return rng.integers(0, ROWS, count), rng.normal(size=(count, COLUMNS)).astype("float32")


def slices(step, rank):
    indices, values = rows_of(step, rank)
    shape = tf.constant([ROWS, COLUMNS], tf.int64)
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), shape)


def dense(step, ranks):
    """Return the mean gradient of the ranks."""
    total = np.zeros((ROWS, COLUMNS))
    for rank in ranks:
        indices, values = rows_of(step, rank)
        np.add.at(total, indices, values)
    return (total / len(ranks)).astype("float32")


def variables():
    values = np.linspace(-1, 1, ROWS * COLUMNS, dtype="float32")
    return [keras.Variable(values.reshape(ROWS, COLUMNS))]


def check(hvd, kind, options, ranks, **wrapped):
    """Train with sparse gradients on `ranks`, and compare with dense gradients in one process."""
    own, expected = variables(), variables()
    optimizer = hvd.DistributedOptimizer(kind(0.1, **options), **wrapped)
    plain = kind(0.1, **options)
    for step in range(STEPS):
        optimizer.apply([slices(step, hvd.rank())], own)
        plain.apply([keras.ops.convert_to_tensor(dense(step, ranks))], expected)
    (result,), (right,) = own, expected
    message = f"{kind.__name__} with {options}"
    np.testing.assert_allclose(result.numpy(), right.numpy(), 1e-5, 1e-5, err_msg=message)
    return result


def skip_without_sparse_gradients():
    if keras.backend.backend() == "torch":
        pytest.skip("Keras has no sparse gradients on PyTorch")


@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.long)])
def test_repeated_rows_count_as_in_a_dense_gradient(hvd, number):
    """All optimizers and options if `number` is 0, otherwise a seventh of them."""
    skip_without_sparse_gradients()
    pairs = [(kind, options) for kind in optimizers() for options in OPTIONS]
    assert len(pairs) > 60
    for kind, options in pairs[number :: 7 if number else 1]:
        result = check(hvd, kind, options, range(hvd.size()))
        assert oracle.same_everywhere(hvd, [result.numpy()])


def test_repeated_rows_on_a_single_rank(hvd):
    skip_without_sparse_gradients()
    own = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    for options in OPTIONS[:2]:
        process_set = own[hvd.rank()]
        check(hvd, keras.optimizers.Adam, options, [hvd.rank()], process_set=process_set)
    for each in own:
        hvd.remove_process_set(each)
