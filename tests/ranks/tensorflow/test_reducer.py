"""`GradientReducer` in graphs and eagerly, with each wire format."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError
from hvdkit.reduction.compression import BFloat16, Float16, NoCompression
from hvdkit.reduction.plan import Reduction
from hvdkit.reduction.wire_format import AbsMax, GlobalMax, Sum, WireFormat
from tests.ranks.frameworks import LazyModule, tf

reducers = LazyModule("hvdkit.tensorflow.reduction.reducer")

SHAPES = [(10, 20), (7,), (300, 5), (3, 3, 3)]
FORMATS = {"none": NoCompression, "bf16": BFloat16, "fp16": Float16}
ROUNDING = {"none": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def gradients_of(rank, step, scale=1.0, dtype="float32"):
    rng = np.random.default_rng((rank, step))
    return [(rng.normal(size=shape) * scale).astype(dtype) for shape in SHAPES]


def mean_of(hvd, step, scale=1.0, dtype="float32"):
    ranks = [gradients_of(rank, step, scale, dtype) for rank in range(hvd.size())]
    return [np.mean(np.array(parts, "float64"), axis=0) for parts in zip(*ranks, strict=True)]


def magnitudes(hvd, step, scale=1.0):
    ranks = [gradients_of(rank, step, scale) for rank in range(hvd.size())]
    return [
        np.mean(np.abs(np.array(parts, "float64")), axis=0) for parts in zip(*ranks, strict=True)
    ]


def reducer(wire_format=None, **settings):
    passes = settings.pop("passes", 1)
    reduce = reducers.GradientReducer(
        Reduction(wire_format or NoCompression(), **settings), passes=passes
    )
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    return lambda gradients: reduce(gradients, variables)


@pytest.mark.parametrize(
    ("name", "bucket_bytes", "traced"),
    [
        ("none", 1, True),
        ("none", 4000, False),
        ("none", 25_000_000, True),
        ("fp16", 1, False),
        ("fp16", 4000, True),
        ("fp16", 25_000_000, False),
        ("bf16", 4000, True),
    ],
)
def test_means(hvd, name, bucket_bytes, traced):
    reduce = reducer(FORMATS[name](), bucket_bytes=bucket_bytes)
    function = tf.function(reduce) if traced else reduce
    for step in range(4):
        own = [tf.constant(g) for g in gradients_of(hvd.rank(), step)]
        for result, mean, size in zip(
            function(own), mean_of(hvd, step), magnitudes(hvd, step), strict=True
        ):
            # Values that are subnormal in float16 are much smaller.
            bound = (hvd.size() + 1) * ROUNDING[name] * size + 1e-6
            assert (np.abs(result.numpy() - mean) <= bound).all()


MAGNITUDES = {
    "growing by too much": [1.0, 1.0, 1e9, 1e9, 1e9, 1e9],
    "gone": [1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
}


# The simulated ranks of tests/unit/reduction/test_compression.py have more magnitudes.
@pytest.mark.parametrize("name", MAGNITUDES)
def test_float16_repeats_buckets_after_an_overflow(hvd, name):
    function = tf.function(reducer(Float16(), bucket_bytes=4000))
    for step, scale in enumerate(MAGNITUDES[name]):
        own = [tf.constant(g) for g in gradients_of(hvd.rank(), step, scale)]
        for result, mean, size in zip(
            function(own), mean_of(hvd, step, scale), magnitudes(hvd, step, scale), strict=True
        ):
            # If a step has much smaller gradients, float16 loses those below this limit.
            reach = 2.0**-33 * (max(MAGNITUDES[name][: step + 1]) * 8)
            bound = (hvd.size() + 1) * 2.0**-11 * size + reach
            assert (np.abs(result.numpy() - mean) <= bound).all(), f"step {step}"


@pytest.mark.parametrize(
    ("name", "poison"),
    [("none", math.nan), ("fp16", math.inf), ("fp16", math.nan), ("bf16", math.inf)],
)
def test_infinity_and_nan_reach_every_rank(hvd, name, poison):
    function = tf.function(reducer(FORMATS[name]()))
    for step in range(5):
        own = gradients_of(hvd.rank(), step)
        if step == 2 and hvd.rank() == hvd.size() - 1:
            own[1][3] = poison
        results = function([tf.constant(g) for g in own])
        finite = [bool(np.isfinite(result.numpy()).all()) for result in results]
        assert finite == [True, step != 2, True, True]


_SCALES = [1, 1, 1e9, 1, 1, 0, 3, 1e-9, 1e6, 1e6, 2, 2, 2, 2, 2]


def gradients_of_all(ranks, step):
    return [
        np.random.default_rng((rank, step)).normal(size=40) * _SCALES[step] for rank in range(ranks)
    ]


def simulated_states(ranks):
    """Return the state after each step of simulated ranks. They import PyTorch."""
    from tests.unit.reduction.test_compression import Ranks

    simulated, states = Ranks(ranks, elements=40), []
    for step in range(len(_SCALES)):
        simulated.step(gradients_of_all(ranks, step))
        states.append(simulated.codecs[0].state)
    return states


def test_the_float16_state_equals_that_of_the_simulation(hvd):
    """The scale computed in the graph equals that computed by Python."""
    program = f"import json; from {__name__} import *; print(json.dumps(simulated_states(%d)))"
    found = subprocess.run(
        [sys.executable, "-c", program % hvd.size()], check=True, stdout=subprocess.PIPE, timeout=60
    )
    reduce = reducers.GradientReducer(Reduction(Float16()))
    variable = tf.Variable(tf.zeros(40))
    function = tf.function(lambda gradient: reduce([gradient], [variable]))
    for step, expected in enumerate(json.loads(found.stdout)):
        own = gradients_of_all(hvd.size(), step)[hvd.rank()]
        function(tf.constant(own, tf.float32))
        ((state,),) = reduce.state().values()
        assert list(state) == expected, f"step {step}"


@pytest.mark.parametrize("saved_after", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_restored_state_is_bit_identical_eagerly_and_in_graphs(hvd, saved_after):
    """`fit` reduces in a graph, and eagerly if `flush` closes an accumulation window."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]

    def start(state=None):
        reduce = reducers.GradientReducer(Reduction(Float16(), bucket_bytes=4000))
        if state is not None:
            reduce.restore_state(state)
        return reduce, tf.function(lambda *gradients: reduce(gradients, variables))

    def run(reduce, function, steps):
        for step in steps:
            # Gradients shrink, so that the scale grows in each step.
            own = [tf.constant(g) for g in gradients_of(hvd.rank(), step, 1e8 / 50.0**step)]
            reduced = function(*own) if step % 3 else reduce(own, variables)
            yield b"".join(gradient.numpy().tobytes() for gradient in reduced)

    reduce, function = start()
    list(run(reduce, function, range(saved_after)))
    state = reduce.state()
    expected = list(run(reduce, function, range(saved_after, 8)))
    resumed, function = start(state)
    assert list(run(resumed, function, range(saved_after, 8))) == expected
    assert resumed.state() == reduce.state()
    hvd.join()
    assert resumed.state() == {}  # a rank that starts now has no state


@pytest.mark.parametrize(
    ("settings", "factor"),
    [({"passes": 4}, "1 / 4"), ({"average": False}, "ranks"), ({"predivide": 3.0}, "1")],
    ids=str,
)
def test_divisors(hvd, settings, factor):
    own = [tf.constant(g) for g in gradients_of(hvd.rank(), 0)]
    factor = eval(factor, {"ranks": hvd.size()})
    for result, mean in zip(reducer(**settings)(own), mean_of(hvd, 0), strict=True):
        np.testing.assert_allclose(result.numpy(), factor * mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "sparse"), [((None, 4), True), (None, False)])
def test_a_variable_of_unknown_shape_is_an_error(hvd, shape, sparse):
    reduce = reducers.GradientReducer(Reduction(NoCompression()))
    table = tf.Variable(tf.zeros((5, 4)), shape=tf.TensorShape(shape), name="table")
    dense = tf.ones((5, 4))
    gradient = tf.IndexedSlices(dense, tf.range(5), tf.constant([5, 4])) if sparse else dense
    with pytest.raises(HvdkitError, match="'table.*Give the variable a static shape"):
        reduce([gradient], [table])


class Int8(WireFormat):
    """A wire format of one byte per value, for graphs."""

    name = "int8"

    def reduce(self, memory, scaling):
        own = yield AbsMax(memory.pack("float32", 1.0))
        largest = yield GlobalMax(self.ops.exponent(own) + 1000)
        factor = 127 // scaling.ranks * self.ops.power_of_two(1000 - largest)
        wire = memory.pack("int8", factor)
        yield Sum(wire)
        memory.unpack(wire, scaling.total / factor)


def test_a_custom_wire_format(hvd):
    function = tf.function(reducer(Int8(), bucket_bytes=4000))
    own = [tf.constant(g) for g in gradients_of(hvd.rank(), 0)]
    for result, mean in zip(function(own), mean_of(hvd, 0), strict=True):
        # Each rank rounds by half a quantization step of the bucket's largest value.
        assert np.abs(result.numpy() - mean).max() <= 8.0 / (127 // hvd.size())


def test_different_variables_raise_while_tracing(hvd):
    length = 4 if hvd.rank() else 5
    reduce = reducers.GradientReducer(Reduction(NoCompression()))
    variable = tf.Variable(tf.zeros(length), name="mine")
    with pytest.raises(RankMismatchError, match=r"rank 0: gradient 0 is 'mine:0', float32 \[5\]"):
        tf.function(lambda: reduce([tf.ones(length)], [variable]))()
