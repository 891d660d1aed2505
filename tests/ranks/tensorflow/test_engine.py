"""The engine under TensorFlow: results of collectives, and effects of its patches."""

import numpy as np
import pytest

from tests.ranks.frameworks import keras, tf

DTYPES = ["float16", "float32", "float64", "int32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_give_what_all_ranks_have(hvd, dtype):
    numbers = [np.arange(1, 102).astype(dtype) * (rank + 1) for rank in range(hvd.size())]
    own = tf.constant(numbers[hvd.rank()])
    total = hvd.allreduce(own, op=hvd.Sum, name=f"sum {dtype}")
    np.testing.assert_array_equal(total.numpy(), sum(numbers))
    root = hvd.size() - 1
    taken = hvd.broadcast(own, root_rank=root, name=f"root {dtype}")
    np.testing.assert_array_equal(taken.numpy(), numbers[root])
    # Each rank has one element more than the one before it.
    parts = [numbers[rank][: rank + 1] for rank in range(hvd.size())]
    joined = hvd.allgather(own[: hvd.rank() + 1], name=f"parts {dtype}")
    np.testing.assert_array_equal(joined.numpy(), np.concatenate(parts))


def small_bfloat16s(hvd):
    """Return each rank's whole numbers, whose sum over four ranks is exact in bfloat16."""
    numbers = np.random.default_rng(1).integers(-60, 61, (hvd.size(), 103))
    return numbers, tf.constant(numbers[hvd.rank()], tf.bfloat16)


def assert_bfloat16s(tensor, expected):
    assert tensor.dtype.name == "bfloat16"
    np.testing.assert_array_equal(tensor.numpy().astype(np.float64), expected)


def collectives_of_bfloat16(hvd, numbers, own):
    """Call collectives; return their results, and the expected ones."""
    root, one_each = hvd.size() - 1, numbers[:, : hvd.size()]
    pairs = [
        (hvd.allreduce(own, op=hvd.Sum, name="bfloat16-sum"), numbers.sum(axis=0)),
        (hvd.allreduce(own, op=hvd.Min, name="bfloat16-min"), numbers.min(axis=0)),
        (hvd.allreduce(own, op=hvd.Max, name="bfloat16-max"), numbers.max(axis=0)),
        (
            hvd.allreduce(own, op=hvd.Average, prescale_factor=0.5, name="bfloat16-mean"),
            bfloat16_of(numbers.mean(axis=0) / 2),
        ),
        (hvd.broadcast(own, root_rank=root, name="bfloat16-root"), numbers[root]),
        (
            hvd.allgather(own[: hvd.rank() + 1], name="bfloat16-parts"),
            np.concatenate([numbers[rank][: rank + 1] for rank in range(hvd.size())]),
        ),
        (
            hvd.alltoall(own[: hvd.size()], [1] * hvd.size(), name="bfloat16-exchange")[0],
            one_each[:, hvd.rank()],
        ),
        (
            hvd.reducescatter(own[: hvd.size()], op=hvd.Sum, name="bfloat16-scatter"),
            one_each.sum(axis=0)[hvd.rank()][None],
        ),
    ]
    group = hvd.grouped_allreduce([own[:7], own], op=hvd.Sum, name="bfloat16-group")
    sums = numbers[:, :7].sum(axis=0), numbers.sum(axis=0)
    return zip(*pairs, *zip(group, sums, strict=True), strict=True)


def bfloat16_of(numbers):
    with tf.init_scope():  # eagerly, also where a function is traced
        rounded = tf.cast(tf.constant(numbers, tf.float32), tf.bfloat16)
    return rounded.numpy().astype(np.float64)


def test_bfloat16_eagerly(hvd):
    results, expected = collectives_of_bfloat16(hvd, *small_bfloat16s(hvd))
    for result, right in zip(results, expected, strict=True):
        assert_bfloat16s(result, right)


def test_bfloat16_in_a_graph(hvd):
    numbers, own = small_bfloat16s(hvd)
    kept = []

    @tf.function(autograph=False)
    def run(x):
        results, expected = collectives_of_bfloat16(hvd, numbers, x)
        kept[:] = expected
        return results

    for result, right in zip(run(own), kept, strict=True):
        assert_bfloat16s(result, right)


def test_bfloat16_variables_are_broadcast_in_place(hvd):
    numbers, own = small_bfloat16s(hvd)
    variable = tf.Variable(own, name="bfloat16")
    hvd.broadcast_([variable], root_rank=1, name="bfloat16-variable")
    assert_bfloat16s(variable, numbers[1])


def test_keras_3_variables_are_broadcast(hvd):
    # Horovod's function; hvdkit's has another implementation.
    from horovod.tensorflow import broadcast_variables

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    for variable in model.trainable_variables:
        variable.assign(np.full(variable.shape, hvd.rank() + 1.0))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(7 * (hvd.rank() + 1))
    variables = [*model.variables, *optimizer.variables]
    before = flat(model.variables)
    broadcast_variables(variables, root_rank=1)
    assert optimizer.iterations.numpy() == 14
    everywhere = hvd.allgather(flat(model.variables)[None], name="now").numpy()
    assert (everywhere == everywhere[1]).all()
    if hvd.rank() == 1:
        np.testing.assert_array_equal(everywhere[1], before)
    else:
        assert (everywhere[1] != before).any()


def flat(variables):
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def test_an_input_that_is_used_elsewhere_is_left_alone(hvd):
    @tf.function
    def function(x):
        made = x * 2.0
        total = hvd.allreduce(made, op=hvd.Sum, name="in-place")
        return made, total, hvd.allreduce(x, op=hvd.Sum, name="of-an-argument"), x + 0.0

    made, total, of_argument, argument = function(tf.fill([1000], hvd.rank() + 1.0))
    ranks = hvd.size() * (hvd.size() + 1) / 2
    assert (made.numpy() == 2 * (hvd.rank() + 1)).all()
    assert (total.numpy() == 2 * ranks).all()
    assert (of_argument.numpy() == ranks).all()
    assert (argument.numpy() == hvd.rank() + 1).all()
