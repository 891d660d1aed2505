"""Public collectives and those for core, eagerly and while a graph is traced."""

import warnings

import pytest

from hvdkit.agreement.consistency import RankMismatchError, check_consistency
from tests.ranks.frameworks import tf
from tests.ranks.tensorflow.oracle import assert_raised_on_all_ranks

WHERE = ["eager", "graph"]


def run(function, where, *arguments):
    return tf.function(function)(*arguments) if where == "graph" else function(*arguments)


def traced(function):
    """Call `function` while a graph is traced, and return the result."""
    results = []

    @tf.function(autograph=False)
    def graph():
        results.append(function())
        return tf.constant(0)

    graph()
    return results[0]


@pytest.mark.parametrize("where", WHERE)
def test_collectives_for_core(hvd, where):
    from hvdkit.tensorflow.collectives import TensorFlowCollectives

    collectives = TensorFlowCollectives(hvd.global_process_set)
    n, rank = hvd.size(), hvd.rank()
    big = 2**60

    def all_of_them():
        return (
            collectives.sum([rank, -5, big], "sum"),
            collectives.max([rank, big + rank], "max"),
            collectives.allgather(bytes(range(3 * rank)), "bytes"),
            collectives.allgather(b"", "nothing"),
            collectives.broadcast(b"from %d" % rank, 1, "one"),
            collectives.broadcast(b"" if rank == 1 else b"ignored", 1, "empty"),
            collectives.broadcast(b"%d" % rank * 5000, 1, "long"),
            collectives.alltoall([b"%d" % rank * (3 * r) for r in range(n)], "to each"),
            collectives.alltoall([b""] * n, "nothing to each"),
        )

    total, largest, gathered, nothing, taken, empty, long, to_each, nothing_to_each = (
        all_of_them() if where == "eager" else traced(all_of_them)
    )
    wrapped = (n * big + 2**63) % 2**64 - 2**63
    assert total == [n * (n - 1) // 2, -5 * n, wrapped]
    assert largest == [n - 1, big + n - 1]
    assert gathered == [bytes(range(3 * r)) for r in range(n)]
    assert nothing == [b""] * n
    assert taken == b"from 1"
    assert empty == b""
    assert long == b"1" * 5000
    assert to_each == [b"%d" % r * (3 * rank) for r in range(n)]
    assert nothing_to_each == [b""] * n
    assert list(collectives.ranks) == list(range(n))


def test_a_consistency_check_while_tracing_raises_on_every_rank(hvd):
    from hvdkit.tensorflow.collectives import TensorFlowCollectives

    collectives = TensorFlowCollectives(hvd.global_process_set)
    assert_raised_on_all_ranks(
        hvd,
        RankMismatchError,
        "ranks? 0.*: a 0; ranks? 1.*: a 1",
        lambda: traced(
            lambda: check_consistency(collectives, [f"a {min(hvd.rank(), 1)}"], "a thing")
        ),
    )


def test_process_set(hvd):
    from hvdkit.tensorflow.collectives import TensorFlowCollectives

    members = [0, *range(2, hvd.size())]
    process_set = hvd.add_process_set(members)
    try:
        collectives = TensorFlowCollectives(process_set)
        inside = hvd.rank() in members
        assert collectives.single_rank == (not inside or len(members) == 1)
        assert list(collectives.ranks) == (members if inside else [hvd.rank()])
        expected = sum(members) if inside else hvd.rank()
        assert collectives.sum([hvd.rank()], "sum") == [expected]
        if inside:
            total = hvd.allreduce(
                tf.constant(hvd.rank()), op=hvd.Sum, name="set", process_set=process_set
            )
            assert total.numpy() == sum(members)
    finally:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("where", WHERE)
def test_rank_and_size_ops(hvd, where):
    def of_the_job():
        return (
            hvd.rank_op(),
            hvd.size_op(),
            hvd.local_rank_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        )

    values = [value.numpy() for value in run(of_the_job, where)]
    assert values == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1]


def test_a_mean_of_integers_warns(hvd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.allreduce(tf.constant([hvd.rank()]), name="whole")
        hvd.allreduce(tf.constant([7]), op=hvd.Sum, name="sum")
        hvd.allreduce(tf.constant([7.0]), name="mean")
    texts = [str(each.message) for each in caught]
    expected = ["the mean of int32 tensors is cut to an integer"]
    assert [text.partition(",")[0] for text in texts] == (expected if hvd.rank() == 0 else [])


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_allreduce_with_compression(hvd, compression):
    kind = getattr(hvd.Compression, compression)
    result = hvd.allreduce(tf.fill([3], 0.26), op=hvd.Sum, compression=kind, name="compressed")
    assert result.dtype == tf.float32
    error = abs(result.numpy() / hvd.size() / 0.26 - 1).max()
    precision = {"none": (0, 1e-6), "fp16": (1e-5, 5e-4), "bf16": (1e-4, 4e-3)}[compression]
    assert precision[0] <= error <= precision[1]
    whole = hvd.allreduce(tf.constant([7]), op=hvd.Sum, compression=kind, name="whole")
    assert whole.numpy().tolist() == [7 * hvd.size()]


@pytest.mark.parametrize("where", WHERE)
def test_join_with_different_numbers_of_batches(hvd, where):
    from hvdkit.tensorflow import runtime

    join = tf.function(hvd.join) if where == "graph" else hvd.join
    # Several times, because TensorFlow treats an op without inputs as a constant.
    for epoch in range(3):
        for i in range(hvd.rank() + 1):
            total = hvd.allreduce(tf.ones(2), op=hvd.Sum, name=f"batch{i}")
            assert total.numpy().tolist() == [hvd.size() - i] * 2
        before = runtime.generation()
        if where == "graph" and epoch == 0:
            join.get_concrete_function()
            assert runtime.generation() == before
        last = join()
        assert last.shape == ()
        assert last.numpy() == hvd.size() - 1
        # Earlier consistency checks are void.
        assert runtime.generation() == before + 1


def test_different_shapes_raise_on_every_rank(hvd):
    own = tf.ones(3 + min(hvd.rank(), 1))
    for function in (
        lambda: hvd.allreduce(own, name="shapes"),
        tf.function(lambda: hvd.allreduce(own, name="graph-shapes")),
    ):
        assert_raised_on_all_ranks(
            hvd, tf.errors.FailedPreconditionError, "Mismatched ALLREDUCE tensor shapes", function
        )
