"""Gradients with NaN or infinity: the tape names their rank and variable."""

import pytest

from hvdkit.errors import UsageError
from hvdkit.reduction.nonfinite import NonFiniteGradients
from tests.ranks.frameworks import tf
from tests.ranks.tensorflow.test_tape import WHERE, data_of, loss_of, variables_of


def steps_of(hvd, where, variables, **options):
    """Return a function that computes gradients, which its second argument breaks."""

    def step(x, broken):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x) * tf.where(broken, float("inf"), 1.0)
        tape = hvd.DistributedGradientTape(tape, **options)
        return tape.gradient(loss, variables)

    return tf.function(step) if where == "graph" else step


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("compression", ["none", pytest.param("fp16", marks=pytest.mark.long)])
def test_the_rank_and_the_variable_are_named(hvd, where, compression):
    variables = variables_of(dtype="float32")
    step = steps_of(hvd, where, variables, on_nonfinite="raise", compression=compression)
    for number in range(4):
        x = tf.constant(data_of(hvd.rank(), number))
        if number != 2:
            assert all(tf.reduce_all(tf.math.is_finite(g)) for g in step(x, tf.constant(False)))
            continue
        with pytest.raises((NonFiniteGradients, tf.errors.OpError)) as caught:
            step(x, tf.constant(hvd.rank() == 1))
        message = str(caught.value)
        assert f"on 1 of {hvd.size()} ranks, before the reduction" in message
        listed = "'Variable:0 (3)', 'Variable:0 (2)', 'Variable:0 (1)' and 1 more"
        assert f"rank 1: {listed}" in message
        if where == "eager":
            assert set(hvd.allgather_object(message)) == {message}
            assert caught.type is NonFiniteGradients


def test_wrong_uses(hvd):
    with pytest.raises(UsageError, match="a tape cannot skip a step of the script"):
        hvd.DistributedGradientTape(tf.GradientTape(), on_nonfinite="skip")
