"""Broadcast of variables, and broadcast and allgather of objects."""

import numpy as np
import pytest

from hvdkit.agreement import collectives, objects
from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from tests.ranks.frameworks import keras, tf
from tests.ranks.objects import objects_and_errors
from tests.ranks.tensorflow.oracle import assert_raised_on_all_ranks, assert_same_on_all_ranks

DTYPES = [
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32",
    "uint32", "int64", "uint64", "bool", "complex64", "complex128",
]  # fmt: skip


def variables_of_all_dtypes(rank):
    """Return variables of all dtypes and some shapes, with different values on each rank."""
    generator = np.random.default_rng(rank)
    shapes = {dtype: (3, k) for k, dtype in enumerate(DTYPES, start=1)} | {"float32": ()}
    kinds = {}
    for dtype, shape in shapes.items():
        values = generator.integers(0, 2 if dtype == "bool" else 100, shape)
        kinds[dtype] = tf.Variable(tf.cast(values, dtype), name=f"of_{dtype}")
    kinds["nothing"] = tf.Variable(tf.zeros((0, 3)), name="nothing")
    kinds["nan"] = tf.Variable([np.nan, -0.0, np.inf, float(rank)], name="nan")
    return kinds


def assert_values(variables, expected):
    for name, variable in variables.items():
        own, wanted = variable.numpy(), expected[name].numpy()
        assert own.dtype == wanted.dtype
        assert own.shape == wanted.shape
        assert own.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize(("where", "root"), [("eager", 0), ("graph", 1)])
def test_variables_of_every_dtype(hvd, where, root):
    variables = variables_of_all_dtypes(hvd.rank())

    def broadcast():
        return hvd.broadcast_variables(variables.values(), root_rank=root)

    run = broadcast if where == "eager" else tf.function(broadcast)
    assert run() is None
    assert_values(variables, variables_of_all_dtypes(root))


@pytest.mark.parametrize("where", ["eager", "graph"])
def test_variables_in_place(hvd, where):
    # Two variables have the same name, which differs between ranks.
    variables = [
        tf.Variable(tf.fill((3, k), 10.0 * hvd.rank() + k), name=f"of_rank_{hvd.rank()}")
        for k in (1, 2)
    ]
    variables.append(tf.Variable(tf.range(hvd.rank(), hvd.rank() + 4)))

    def broadcast():
        hvd.broadcast_variables(variables, root_rank=1, inplace=True)

    tf.function(broadcast)() if where == "graph" else broadcast()
    assert [v.numpy()[0, 0] for v in variables[:2]] == [11, 12]
    assert variables[2].numpy().tolist() == [1, 2, 3, 4]


def test_small_variables_share_a_broadcast(hvd):
    from horovod.tensorflow import mpi_ops

    variables = [tf.Variable(tf.fill([1000], float(k * (hvd.rank() + 1)))) for k in range(60)]
    large = tf.Variable(tf.fill([6_000_000], float(hvd.rank())))
    calls = []
    original = mpi_ops.broadcast
    mpi_ops.broadcast = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        hvd.broadcast_variables([*variables[:30], large, *variables[30:]], root_rank=1)
    finally:
        mpi_ops.broadcast = original
    assert len(calls) == 3
    assert [v.numpy()[-1] for v in variables] == [2.0 * k for k in range(60)]
    assert (large.numpy() == 1).all()


def test_a_large_variable_is_sent_in_chunks(hvd):
    from hvdkit.tensorflow import functions

    size, functions._CHUNK_BYTES = functions._CHUNK_BYTES, 1000
    try:
        variable = tf.Variable(tf.range(777, dtype=tf.float64) * (hvd.rank() + 1))
        hvd.broadcast_variables([variable], root_rank=1)
    finally:
        functions._CHUNK_BYTES = size
    np.testing.assert_array_equal(variable.numpy(), np.arange(777) * 2.0)


def test_a_keras_model_and_its_optimizer(hvd):
    def make(rank):
        # The numbers in the names of layers differ between ranks.
        for _ in range(rank):
            keras.layers.Dense(1)
        keras.utils.set_random_seed(rank)
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1 * (rank + 1)), "mse", run_eagerly=True)
        x = np.random.default_rng(rank).normal(size=(8, 3))
        model.fit(x, x[:, :2], epochs=1 + rank, verbose=0)
        return model

    model = make(hvd.rank())
    root = 1
    expected = make(root)
    variables = [*model.variables, *model.optimizer.variables]
    assert "int64" in {v.dtype for v in variables}
    before = [v.numpy() for v in variables]
    hvd.broadcast_variables(variables, root_rank=root)
    wanted = [*expected.variables, *expected.optimizer.variables]
    for own, other, old in zip(variables, wanted, before, strict=True):
        # Seeds are not broadcast.
        kept = own.name == "seed_generator_state"
        np.testing.assert_array_equal(own.numpy(), old if kept else other.numpy())
    (seed,) = (v.numpy() for v in variables if v.name == "seed_generator_state")
    by_rank = hvd.allgather(seed[None].astype("int64")).numpy()
    assert len(np.unique(by_rank, axis=0)) == hvd.size()
    assert_same_on_all_ranks(hvd, [v.numpy() for v in model.trainable_variables])


def test_broadcast_in_the_first_step_of_a_graph(hvd):
    # Horovod's examples do this.
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    @tf.function
    def step(x, first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)

    x = tf.constant(np.random.default_rng(hvd.rank()).normal(size=(4, 3)), tf.float32)
    for k in range(4):
        step(x, k == 0)
        assert_same_on_all_ranks(hvd, [v.numpy() for v in model.variables])


def test_different_variables_raise_on_every_rank(hvd):
    other = hvd.rank() == hvd.size() - 1
    variables = [tf.Variable(1.0, name="a"), tf.Variable(tf.ones(3 if other else 2), name="b")]
    assert_raised_on_all_ranks(
        hvd,
        RankMismatchError,
        r"'b', float32 \(2,\).*'b', float32 \(3,\)",
        lambda: hvd.broadcast_variables(variables, root_rank=0),
    )
    # Ranks may trace at different times, so only Horovod compares sizes, when the graph runs.
    assert_raised_on_all_ranks(
        hvd,
        tf.errors.FailedPreconditionError,
        "Mismatched BROADCAST tensor shapes",
        tf.function(lambda: hvd.broadcast_variables(variables, root_rank=0)),
    )


def test_invalid_variables_raise(hvd):
    with pytest.raises(UsageError, match="is one ResourceVariable: expected a list"):
        hvd.broadcast_variables(tf.Variable([1.0]), root_rank=0)
    with tf.Graph().as_default(), pytest.raises(UsageError, match="a tf.Graph of TensorFlow 1"):
        hvd.broadcast_variables([], root_rank=0)


def test_process_set(hvd):
    members = [1, *range(3, hvd.size())] if hvd.size() != 3 else [1, 2]
    process_set = hvd.add_process_set(members)
    try:
        variable = tf.Variable(float(hvd.rank()))
        hvd.broadcast_variables([variable], root_rank=1, process_set=process_set)
        inside = hvd.rank() in members
        assert variable.numpy() == (1 if inside else hvd.rank())
        own = {"rank": hvd.rank()}
        taken = hvd.broadcast_object(own, root_rank=1, process_set=process_set)
        assert taken == {"rank": 1 if inside else hvd.rank()}
        gathered = hvd.allgather_object(hvd.rank(), process_set=process_set)
        assert gathered == (members if inside else [hvd.rank()])
    finally:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("where", ["eager", "while tracing"])
def test_objects_of_different_types(hvd, where):
    def exchange():
        own = {"epoch": 3, "best": np.arange(3)} if hvd.rank() == 1 else None
        mixed = "text" if hvd.rank() % 2 else hvd.rank()
        return (
            hvd.broadcast_object(own, root_rank=1),
            hvd.allgather_object(mixed),
            hvd.broadcast_object_fn(root_rank=0)([hvd.rank()]),
        )

    results = []
    if where == "eager":
        results.append(exchange())
    else:
        tf.function(lambda: results.append(exchange()), autograph=False)()
    taken, gathered, from_0 = results[0]
    assert taken["epoch"] == 3
    assert taken["best"].tolist() == [0, 1, 2]
    assert gathered == ["text" if rank % 2 else rank for rank in range(hvd.size())]
    assert from_0 == [0]


def test_a_large_object_is_sent_in_chunks(hvd):
    data = np.random.default_rng(hvd.rank()).bytes(12_345)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_CHUNK_BYTES", 1000)
        taken = hvd.broadcast_object(data, root_rank=1)
    assert taken == np.random.default_rng(1).bytes(12_345)


def test_an_object_that_cannot_be_sent_raises_on_every_rank(hvd):
    for own, error in objects_and_errors(hvd.rank()):
        for call in (lambda o: hvd.broadcast_object(o, root_rank=1), hvd.allgather_object):
            with pytest.raises(HvdkitError, match=error):
                call(own)
            assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1


def test_too_little_memory_on_one_rank_raises_on_every_rank(hvd):
    def allocate(size):
        if hvd.rank() == 0:
            raise MemoryError
        return np.empty(size, np.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "_allocate", allocate)
        patch.setattr(objects, "_LARGE", 1000)
        with pytest.raises(HvdkitError, match=r"too little memory .* \(rank 0: MemoryError"):
            hvd.broadcast_object(bytes(2000), root_rank=1)
    assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1


# The call, with an argument that depends on the rank; the argument of most ranks and of one rank;
# and the error on all ranks.
BAD_ARGUMENTS = {
    "broadcast_variables": (
        lambda hvd, value: hvd.broadcast_variables([variable(value)], root_rank=0),
        1.0,
        "text",
        r"'words:0', has dtype string: expected numbers",
    ),
    "broadcast_variables in place": (
        lambda hvd, value: hvd.broadcast_variables([variable(value)], root_rank=0, inplace=True),
        1.0,
        "text",
        r"'words:0', has dtype string: expected numbers",
    ),
    "broadcast_variables of": (
        lambda hvd, kind: hvd.broadcast_variables([kind(1.0)], root_rank=0),
        lambda value: variable(value),
        float,
        r"variables\[0\]: found a float",
    ),
    "broadcast_variables from": (
        lambda hvd, root: hvd.broadcast_variables([variable(1.0)], root_rank=root),
        0,
        99,
        r"root_rank is 99: expected one of \[0, 1",
    ),
    "broadcast_object": (
        lambda hvd, root: hvd.broadcast_object("text", root_rank=root),
        0,
        99,
        r"rank 1: UsageError: root_rank is 99: expected one of",
    ),
    "Monitor": (
        lambda hvd, every: hvd.Monitor([], every=every),
        1,
        0,
        "every is 0: expected a whole number",
    ),
}


def variable(value):
    return tf.Variable(value, name="words")


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_of_one_rank_raises_on_every_rank(hvd, name):
    call, good, bad, error = BAD_ARGUMENTS[name]
    with pytest.raises(HvdkitError, match=error):
        call(hvd, bad if hvd.rank() == 1 else good)
    assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1
