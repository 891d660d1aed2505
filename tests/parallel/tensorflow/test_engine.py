"""The engine under TensorFlow: values, and what its fixes change.

TensorFlow is imported by the ranks, not by the process that collects these tests.
"""

import numpy as np
import pytest

DTYPES = ["float16", "float32", "float64", "int32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_give_what_all_ranks_have(hvd, dtype):
    import tensorflow as tf

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


def test_allreduce_in_a_graph_is_differentiable(hvd):
    import tensorflow as tf

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            weighted = hvd.allreduce(x, op=hvd.Sum, name="in-a-graph") * (hvd.rank() + 1.0)
        return tape.gradient(weighted, x)

    expected = sum(rank + 1 for rank in range(hvd.size()))
    assert gradient(tf.ones(5)).numpy().tolist() == [expected] * 5


def test_keras_3_variables_are_broadcast(hvd):
    import keras

    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(7 * (hvd.rank() + 1))
    variables = [*model.variables, *optimizer.variables]
    before = flat(model.variables)
    hvd.broadcast_variables(variables, root_rank=1)
    assert optimizer.iterations.numpy() == 14
    everywhere = hvd.allgather(flat(model.variables)[None], name="now").numpy()
    assert (everywhere == everywhere[1]).all()
    if hvd.rank() == 1:
        np.testing.assert_array_equal(everywhere[1], before)
    else:
        assert (everywhere[1] != before).any()


def flat(variables):
    return np.concatenate([variable.numpy().ravel() for variable in variables])
