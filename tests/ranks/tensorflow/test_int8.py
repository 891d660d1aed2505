"""int8 in TensorFlow: encoded by TensorFlow for `alltoall`, and by the engine.

TensorFlow computes with zeros instead of subnormal numbers, so there are none in these tests.
"""

import functools
from unittest import mock

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.ranks.frameworks import tf

BLOCK = 256
LENGTH = 5003


def numbers_of(rank, kind):
    random = np.random.default_rng((rank, 7))
    normal = random.standard_normal(LENGTH)
    if kind == "cancelling":
        shared = np.random.default_rng(1).standard_normal(LENGTH)
        return (1000 * shared * (-1) ** rank + normal).astype("f4")
    factor = {"ordinary": 1.0, "huge": 1e30, "tiny": 1e-35, "zero": 0.0}
    if kind == "mixed":
        return (normal * np.logspace(-14, 4, LENGTH)).astype("f4")
    return (normal * factor[kind]).astype("f4")


def bound(everyone):
    """Return the largest error of the mean of numbers of shape [ranks, elements]."""
    padded = np.pad(np.abs(everyone.astype("f8")), [(0, 0), (0, -LENGTH % BLOCK)])
    largest = padded.reshape(len(everyone), -1, BLOCK).max((0, 2)).repeat(BLOCK)[:LENGTH]
    return (2 / 254 + (len(everyone) + 2) * 2.0**-24) * largest


def reducer(hvd, where, **options):
    """Return a function of a gradient that returns the reduced gradient."""
    from hvdkit.reduction.plan import Reduction
    from hvdkit.tensorflow.reduction.reducer import GradientReducer

    process_set = options.pop("process_set", hvd.global_process_set)
    reduction = Reduction(hvd.Int8(as_bf16=lambda name, shape: False), **options)
    reduce = GradientReducer(reduction, process_set)
    variable = tf.Variable(tf.zeros([LENGTH]))

    def call(gradient):
        return reduce([gradient], [variable])[0]

    return tf.function(call) if where == "graph" else call


def by_alltoall(test):
    """Let TensorFlow encode the blocks, as on a GPU. The ranks of these tests share memory."""

    @functools.wraps(test)
    def run(*arguments, **options):
        from hvdkit.tensorflow import runtime

        with mock.patch.object(runtime.host_collectives, "sends_int8", return_value=False):
            return test(*arguments, **options)

    return run


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("ordinary", "graph"),
        ("huge", "eager"),
        ("tiny", "graph"),
        ("zero", "eager"),
        ("mixed", "eager"),
        ("cancelling", "graph"),
    ],
)
@by_alltoall
def test_error_of_the_mean_is_bounded(hvd, kind, where):
    reduce = reducer(hvd, where)
    everyone = np.stack([numbers_of(rank, kind) for rank in range(hvd.size())])
    for _ in range(2):
        mean = reduce(tf.constant(everyone[hvd.rank()])).numpy()
        error = np.abs(mean.astype("f8") - everyone.astype("f8").mean(0))
        assert error.any() or kind == "zero", "nothing was rounded"
        assert (error <= bound(everyone)).all()
        assert len(set(hvd.allgather_object(mean.tobytes()))) == 1


@pytest.mark.parametrize("value", [np.inf, np.nan])
@by_alltoall
def test_a_number_that_is_not_finite_spreads_over_its_block_on_all_ranks(hvd, value):
    own = np.ones(LENGTH, "f4")
    if hvd.rank() == hvd.size() - 1:
        own[700] = value
    mean = reducer(hvd, "graph")(tf.constant(own)).numpy()
    assert np.isnan(mean[512:768]).all()
    assert (np.concatenate([mean[:512], mean[768:]]) == 1).all()


def test_ranks_that_share_memory_add_in_float32(hvd):
    everyone = np.stack([numbers_of(rank, "mixed") for rank in range(hvd.size())])
    mean = reducer(hvd, "graph", predivide=2.0)(tf.constant(everyone[hvd.rank()])).numpy()
    np.testing.assert_allclose(mean, everyone.astype("f8").mean(0), rtol=1e-4, atol=1e-6)


def test_ranks_that_would_send_in_different_ways_get_an_error(hvd):
    from hvdkit.tensorflow import runtime

    reduce = reducer(hvd, "eager")
    answer = hvd.rank() != 1
    with (
        mock.patch.object(runtime.host_collectives, "sends_int8", return_value=answer),
        pytest.raises(RankMismatchError, match="rank 1: int8: sent by alltoall"),
    ):
        reduce(tf.zeros([LENGTH]))


def test_a_tape_with_the_name_of_the_format(hvd):
    weight = tf.Variable(tf.ones([100, 100]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight) * float(hvd.rank())
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.int8)
    gradient = tape.gradient(loss, weight).numpy()
    assert (gradient == (hvd.size() - 1) / 2).all()


def test_options_that_int8_does_not_support(hvd):
    with pytest.raises(UsageError, match=r"Compression\.int8 was given for a single tensor"):
        hvd.allreduce(tf.ones([5000]), compression=hvd.Compression.int8)
    if hvd.mpi_enabled():
        with pytest.raises(UsageError, match=r"compression is int8 and op is hvd\.Adasum"):
            hvd.DistributedGradientTape(tf.GradientTape(), compression="int8", op=hvd.Adasum)
