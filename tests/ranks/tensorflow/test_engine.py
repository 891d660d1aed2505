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


def test_bfloat16_eagerly(hvd):
    numbers, own = small_bfloat16s(hvd)
    for op, reduced in ((hvd.Sum, np.sum), (hvd.Min, np.min), (hvd.Max, np.max)):
        result = hvd.allreduce(own, op=op, name=f"bfloat16 {reduced.__name__}")
        assert_bfloat16s(result, reduced(numbers, axis=0))
    half_mean = hvd.allreduce(own, op=hvd.Average, prescale_factor=0.5, name="bfloat16 mean")
    assert_bfloat16s(half_mean, bfloat16_of(numbers.mean(axis=0) / 2))
    summed = hvd.grouped_allreduce([own[:7], own], op=hvd.Sum, name="bfloat16 group")
    assert_bfloat16s(summed[0], numbers[:, :7].sum(axis=0))
    assert_bfloat16s(summed[1], numbers.sum(axis=0))
    root = hvd.size() - 1
    taken = hvd.broadcast(own, root_rank=root, name="bfloat16 root")
    assert_bfloat16s(taken, numbers[root])
    parts = [numbers[rank][: rank + 1] for rank in range(hvd.size())]
    joined = hvd.allgather(own[: hvd.rank() + 1], name="bfloat16 parts")
    assert_bfloat16s(joined, np.concatenate(parts))
    columns = numbers[:, : hvd.size()]
    received, _ = hvd.alltoall(own[: hvd.size()], [1] * hvd.size(), name="bfloat16 exchange")
    assert_bfloat16s(received, columns[:, hvd.rank()])
    part = hvd.reducescatter(own[: hvd.size()], op=hvd.Sum, name="bfloat16 scatter")
    assert_bfloat16s(part, columns.sum(axis=0)[hvd.rank()][None])


def bfloat16_of(numbers):
    return tf.cast(tf.constant(numbers, tf.float32), tf.bfloat16).numpy().astype(np.float64)


def test_bfloat16_in_a_graph(hvd):
    numbers, own = small_bfloat16s(hvd)
    root = hvd.size() - 1

    @tf.function
    def collectives(x):
        return (
            hvd.allreduce(x, op=hvd.Sum, name="bfloat16-sum"),
            hvd.grouped_allreduce([x[:7], x], op=hvd.Sum, name="bfloat16-group"),
            hvd.broadcast(x, root_rank=root, name="bfloat16-root"),
            hvd.allgather(x[: hvd.rank() + 1], name="bfloat16-parts"),
        )

    total, group, taken, joined = collectives(own)
    assert_bfloat16s(total, numbers.sum(axis=0))
    assert_bfloat16s(group[0], numbers[:, :7].sum(axis=0))
    assert_bfloat16s(group[1], numbers.sum(axis=0))
    assert_bfloat16s(taken, numbers[root])
    parts = [numbers[rank][: rank + 1] for rank in range(hvd.size())]
    assert_bfloat16s(joined, np.concatenate(parts))


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
