"""Distributed gradient tapes compared with one process that has the data of all ranks."""

import contextlib
import functools
import itertools
import re
import tempfile

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.frameworks import keras, tf
from tests.ranks.tensorflow.oracle import (
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    numbers,
    slowly,
)

WHERE = ["eager", "graph"]
BATCH, INPUTS, HIDDEN = 6, 5, 7


def variables_of(seed=0, dtype="float64"):
    """Return the weights of two layers, all with the same default name."""
    shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
    return [tf.Variable(numbers(seed + k, *shape), dtype=dtype) for k, shape in enumerate(shapes)]


def loss_of(variables, x):
    w1, b1, w2, b2 = variables
    return tf.reduce_mean(tf.tanh(tf.cast(x, w1.dtype) @ w1 + b1) @ w2 + b2)


def data_of(rank, step=0):
    return numbers(1000 + 10 * step + rank, BATCH, INPUTS)


def plain_gradients(loss, variables):
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, variables)


def expected_gradients(variables, ranks, op="mean"):
    """Return the gradients of the mean or the sum of the ranks' losses."""
    each = [plain_gradients(lambda r=r: loss_of(variables, data_of(r)), variables) for r in ranks]
    return [getattr(np, op)([g.numpy() for g in gs], axis=0) for gs in zip(*each, strict=True)]


def reduced_gradients(hvd, variables, where, x, wrap=None, **options):
    """Return the tape's gradients for this rank's data, in the second call."""
    wrap = wrap or hvd.DistributedGradientTape

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x)
        tape = wrap(tape, **options)
        return tape.gradient(loss, variables)

    step = tf.function(step) if where == "graph" else step
    step(tf.constant(x))
    return step(tf.constant(x))


def assert_close(gradients, expected, tolerance=1e-12):
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert np.abs(gradient.numpy() - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("method", ["gradient", "jacobian"])
@pytest.mark.parametrize("models", [1, 2])
def test_two_calls_of_one_function_in_a_graph(hvd, models, method):
    """Each rank is slow in another call, so that it could meet other ranks' other call."""

    class Model:
        def __init__(self, seed):
            self.variables = variables_of(seed)

        @tf.function
        def gradients(self, x, seconds):
            with tf.GradientTape() as tape:
                loss = loss_of(self.variables, slowly(x, seconds))
            tape = hvd.DistributedGradientTape(tape)
            return getattr(tape, method)(loss, self.variables)

    trained = [Model(10 * k) for k in range(models)]
    calls = [trained[0], trained[-1]]

    @tf.function
    def step(data):
        is_slow = [0.3 * (hvd.rank() % 2 == k) for k in range(2)]
        return [
            model.gradients(x, tf.constant(seconds, tf.float64))
            for model, x, seconds in zip(calls, data, is_slow, strict=True)
        ]

    for _ in range(2):
        results = step([tf.constant(data_of(hvd.rank(), k)) for k in range(2)])
    for k, (model, reduced) in enumerate(zip(calls, results, strict=True)):
        each = [
            plain_gradients(
                functools.partial(loss_of, model.variables, data_of(r, k)), model.variables
            )
            for r in range(hvd.size())
        ]
        assert_close(reduced, [np.mean(gs, axis=0) for gs in zip(*each, strict=True)])


def test_comparisons_in_two_functions_of_a_graph(hvd):
    """Each rank is slow in another function, so that it could compare other variables first."""

    def gradients(variables, x, seconds):
        # The comparison of the values waits for this.
        variables[0].assign(slowly(variables[0].read_value(), seconds))
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x)
        return hvd.DistributedGradientTape(tape).gradient(loss, variables)

    models = [variables_of(seed) for seed in (0, 10)]

    @tf.function
    def first(x, seconds):
        return gradients(models[0], x, seconds)

    @tf.function
    def second(x, seconds):
        return gradients(models[1], x, seconds)

    @tf.function
    def step(x):
        is_slow = [tf.constant(0.3 * (hvd.rank() % 2 == k), tf.float64) for k in range(2)]
        return first(x, is_slow[0]), second(x, is_slow[1])

    with recorded("hvdkit") as lines:
        for _ in range(3):
            step(tf.constant(data_of(hvd.rank())))
    assert not lines


def test_a_custom_compressor(hvd):
    from horovod.tensorflow.compression import Compressor

    class Tenths(Compressor):
        """Round to tenths, and send integers."""

        @staticmethod
        def compress(tensor):
            return tf.cast(tf.round(10 * tensor), tf.int32), tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tf.cast(tensor, ctx) / 10

    variables = variables_of()
    gradients = reduced_gradients(
        hvd, variables, "graph", data_of(hvd.rank()), compression=Tenths, op=hvd.Sum
    )
    each = [
        plain_gradients(lambda r=r: loss_of(variables, data_of(r)), variables)
        for r in range(hvd.size())
    ]
    expected = [sum(np.round(10 * g.numpy()) for g in gs) / 10 for gs in zip(*each, strict=True)]
    assert_close(gradients, expected)
    averaged = reduced_gradients(hvd, variables, "eager", data_of(hvd.rank()), compression=Tenths)
    assert_close(averaged, [wanted / hvd.size() for wanted in expected])


@pytest.mark.parametrize(
    ("groups", "where"),
    [
        ("one", "eager"),
        ("hundred", "eager"),
        ("num_groups", "graph"),
        ("lists", "eager"),
        ("some", "graph"),
    ],
)
def test_groups(hvd, where, groups):
    variables = variables_of()
    elsewhere = variables_of(seed=50)
    options = {
        "one": {"groups": 1},
        "hundred": {"groups": 100},
        "num_groups": {"num_groups": 3, "gradient_predivide_factor": 2.0},
        "lists": {"groups": [variables[:2], variables[2:]]},
        "some": {"groups": [[variables[3], variables[0]], elsewhere]},
    }[groups]
    gradients = reduced_gradients(hvd, variables, where, data_of(hvd.rank()), **options)
    assert_close(gradients, expected_gradients(variables, range(hvd.size())))


@pytest.mark.parametrize("where", WHERE)
def test_process_set(hvd, where):
    members = [0, *range(2, hvd.size())]
    process_set = hvd.add_process_set(members)
    try:
        variables = variables_of()
        gradients = reduced_gradients(
            hvd, variables, where, data_of(hvd.rank()), process_set=process_set
        )
        together = members if hvd.rank() in members else [hvd.rank()]
        expected = expected_gradients(variables, together)
        assert_close(gradients, expected)

        def wrap(tape):
            tape = hvd.DistributedGradientTape(tape, process_set=process_set)
            tape.register_local_source(variables[1])
            return tape

        gradients = reduced_gradients(hvd, variables, where, data_of(hvd.rank()), wrap)
        # A rank outside of the process set has nothing to scale.
        expected[1] = expected_gradients(variables, [hvd.rank()])[1] / len(together)
        assert_close(gradients, expected)
    finally:
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize(("where", "scaled"), [("eager", True), ("graph", False)])
def test_local_sources_are_not_reduced(hvd, where, scaled):
    variables = variables_of()
    local = {1, 2}

    def wrap(tape):
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scaled)
        for k in local:
            tape.register_local_source(variables[k])
        return tape

    gradients = reduced_gradients(hvd, variables, where, data_of(hvd.rank()), wrap)
    of_all_ranks = expected_gradients(variables, range(hvd.size()))
    own = expected_gradients(variables, [hvd.rank()])
    factor = 1 / hvd.size() if scaled else 1
    assert_close(gradients, [factor * own[k] if k in local else of_all_ranks[k] for k in range(4)])

    with tf.GradientTape() as tape:
        loss = loss_of(variables, data_of(hvd.rank()))
    of_local, of_others = wrap(tape).get_local_and_global_gradients(loss, variables)
    assert all(source is variables[k] for (source, _), k in zip(of_local, (1, 2), strict=True))
    assert_close([g for _, g in of_local], [factor * own[k] for k in (1, 2)])
    assert_close([g for _, g in of_others], [of_all_ranks[k] for k in (0, 3)])


def test_local_layers_of_a_keras_model(hvd):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((INPUTS,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    )
    x = data_of(hvd.rank()).astype("float32")

    def gradients_with(wrap, sources):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return [g.numpy() for g in wrap(tape).gradient(loss, sources)]

    variables = model.trainable_variables
    own = gradients_with(lambda tape: tape, [v.value for v in variables])
    of_all_ranks = [
        np.mean(np.stack(each), axis=0) for each in zip(*hvd.allgather_object(own), strict=True)
    ]
    # Keras's variables and the tf.Variables in them are equivalent.
    for sources in (variables, [v.value for v in variables]):
        for layers in (model.layers[-1], [model.layers[-1]]):
            reduced = gradients_with(
                lambda tape, layers=layers: hvd.PartialDistributedGradientTape(
                    tape, local_layers=layers
                ),
                sources,
            )
            expected = [*of_all_ranks[:2], *(g / hvd.size() for g in own[2:])]
            for gradient, wanted in zip(reduced, expected, strict=True):
                np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)
    reduced = gradients_with(hvd.PartialDistributedGradientTape, variables)
    for gradient, wanted in zip(reduced, of_all_ranks, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("compression", "where"), [("none", "eager"), ("fp16", "graph")])
def test_ranks_use_different_variables(hvd, where, compression):
    """The gradient of a table is sparse, also on ranks that do not use the table."""
    variables = variables_of()
    branch, table, unused = (
        tf.Variable(numbers(k, *shape)) for k, shape in enumerate([(INPUTS, 1), (9, 1), (4,)])
    )
    sources = [*variables, branch, table, unused]

    def loss(rank, step, x, rows):
        value = loss_of(variables, x)
        if (rank + step) % 2:
            value += tf.reduce_mean(tf.sin(x @ branch))
        if (rank + step) % 3 == 0:
            value += tf.reduce_sum(tf.gather(table, rows) ** 2)
        return value

    def train_step(step, x, rows):
        with tf.GradientTape() as tape:
            value = loss(hvd.rank(), step, x, rows)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(value, sources)

    def input_of(rank, step):
        # Rows and their number differ between steps.
        return tf.constant(data_of(rank, step)), tf.constant(
            [0, 3, 3, step][: 1 + (rank + step) % 4]
        )

    run = tf.function(train_step) if where == "graph" else train_step
    for step in range(4):
        branches = step if where == "eager" else 0
        *result, of_unused = run(branches, *input_of(hvd.rank(), step))
        assert of_unused is None
        each = [
            plain_gradients(
                lambda r=r, s=step, b=branches: loss(r, b, *input_of(r, s)), sources[:-1]
            )
            for r in range(hvd.size())
        ]
        for k, gradient in enumerate(result):
            there = [tf.convert_to_tensor(gs[k]).numpy() for gs in each if gs[k] is not None]
            if not there:
                assert gradient is None, k
                continue
            expected = np.sum(there, axis=0) / hvd.size()
            gradient = tf.convert_to_tensor(gradient)
            tolerance = 1e-12 if compression == "none" else 2**-9
            assert_close([gradient], [expected], tolerance)
            assert_same_on_all_ranks(hvd, [gradient])


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_bucket_without_gradients_on_one_rank(hvd, kind):
    """TensorFlow must not fold a collective of zeros into a constant."""
    weight, other = tf.Variable(tf.ones(3)), tf.Variable(tf.ones((5, 2)))

    @tf.function
    def step(x, rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight) * x
            if hvd.rank() == 1:
                used = tf.gather(other, rows) if kind == "sparse" else other
                loss += tf.reduce_sum(used * used) * x
        tape = hvd.DistributedGradientTape(tape, bucket_bytes=8)
        return tape.gradient(loss, [weight, other])

    for x in (1.0, 2.0, 3.0):
        of_weight, of_other = step(tf.constant(x), tf.constant([1, 4]))
        np.testing.assert_allclose(of_weight.numpy(), np.full(3, 2 * x))
        expected = np.full((5, 2), 2 * x / hvd.size())
        if kind == "sparse":
            expected[[0, 2, 3]] = 0
        np.testing.assert_allclose(tf.convert_to_tensor(of_other).numpy(), expected)


@pytest.mark.parametrize(("compression", "where"), [("none", "eager"), ("fp16", "graph")])
def test_each_rank_trains_another_task(hvd, where, compression):
    """Each task has a head. A variable of unknown shape has no gradient."""
    shared = tf.Variable(numbers(1, 3))
    heads = [tf.Variable(numbers(2 + k, 3)) for k in range(hvd.size() + 1)]
    unknown = tf.Variable(1.0, shape=tf.TensorShape(None))

    def gradients(task):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared * heads[task])
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        found = tape.gradient(loss, [shared, *heads, unknown])
        return {k: g for k, g in enumerate(found) if g is not None}

    step = tf.function(gradients) if where == "graph" else gradients
    for turn in (0, 1, 0):
        tasks = [rank + turn for rank in range(hvd.size())]
        found = step(tasks[hvd.rank()])
        assert sorted(found) == [0, *(1 + task for task in tasks)]
        mean = np.mean([heads[task].numpy() for task in tasks], axis=0)
        bound = 1e-12 if compression == "none" else 2**-9
        assert_close([found[0]], [mean], bound)
        for task in tasks:
            assert_close([found[1 + task]], [shared.numpy() / hvd.size()], bound)


def test_a_rank_without_any_gradient(hvd):
    variables = variables_of()
    for step in range(3):
        with tf.GradientTape() as tape:
            value = loss_of(variables, data_of(hvd.rank(), step))
            if hvd.rank() == step % hvd.size():
                value = tf.constant(1.0)
        gradients = hvd.DistributedGradientTape(tape).gradient(value, variables)
        ranks = [r for r in range(hvd.size()) if r != step % hvd.size()]
        each = [
            plain_gradients(lambda r=r, s=step: loss_of(variables, data_of(r, s)), variables)
            for r in ranks
        ]
        expected = [sum(g.numpy() for g in gs) / hvd.size() for gs in zip(*each, strict=True)]
        assert_close(gradients, expected)


def test_two_tapes_and_equal_models_in_one_graph(hvd):
    # As in a GAN: two models with equal shapes and names are reduced concurrently.
    one, other = variables_of(), variables_of(seed=50)
    x = tf.constant(data_of(hvd.rank()))

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            losses = loss_of(one, x), loss_of(other, x), loss_of(one, 2 * x)
        tape = hvd.DistributedGradientTape(tape, compression="fp16")
        with tf.GradientTape() as second:
            loss = loss_of(other, x)
        second = hvd.DistributedGradientTape(second, compression="fp16")
        return (
            tape.gradient(losses[0], one),
            tape.gradient(losses[1], other),
            tape.gradient(losses[2], one),
            second.gradient(loss, other),
        )

    for _ in range(3):
        first, second, third, fourth = step()
    assert_close(first, expected_gradients(one, range(hvd.size())), 4e-3)
    for gradients in (second, fourth):
        assert_close(gradients, expected_gradients(other, range(hvd.size())), 4e-3)
    assert not np.array_equal(third[0].numpy(), first[0].numpy())


@pytest.mark.parametrize(
    ("difference", "message", "where"),
    [
        ("compression", "compression: fp16.*compression: none", "eager"),
        ("op", "op: average.*op: sum", "graph"),
        ("shape", r"\[2\].*\[3\]", "graph"),
    ],
)
def test_differences_between_ranks_raise_on_every_rank(hvd, where, difference, message):
    odd = hvd.rank() == hvd.size() - 1
    options = {
        "compression": {"compression": "none" if odd else "fp16"},
        "op": {"op": hvd.Sum if odd else hvd.Average},
        "shape": {},
    }[difference]
    v = tf.Variable(tf.ones(3 if odd and difference == "shape" else 2))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v**2)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, [v])

    assert_raised_on_all_ranks(
        hvd, RankMismatchError, message, tf.function(step) if where == "graph" else step
    )


_models = itertools.count(1)


def own_values(hvd, seed=0, name=None):
    """Return variables with different values on each rank, and with a name for this test."""
    name = name or "v" * next(_models)
    shapes = [(3,), (2, 2), ()]
    return [
        tf.Variable(numbers(seed + 7 * hvd.rank() + k, *shape), name=name)
        for k, shape in enumerate(shapes)
    ]


def step_of(hvd, variables, where, others=(), **options):
    """Return a training step, which also requests gradients of `others`, which have none."""

    def step():
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.tanh(v)) for v in variables])
        tape = hvd.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(loss, [*variables, *others])
        for variable, gradient in zip(variables, gradients, strict=False):
            variable.assign_sub(0.1 * gradient)
        assert gradients[len(variables) :] == [None] * len(others)

    return tf.function(step) if where == "graph" else step


@pytest.mark.parametrize("where", WHERE)
def test_different_values_raise(hvd, where):
    step = step_of(hvd, own_values(hvd, name="never"), where)
    with recorded("hvdkit") as records:
        for _ in range(101):
            step()
    messages = [each.getMessage() for each in records if "same data" not in each.getMessage()]
    # Only the first comparison with a difference logs it.
    assert len(messages) == (1 if hvd.rank() == 0 else 0)
    assert all("error after 100 reductions" in message for message in messages)
    kind = RankMismatchError if where == "eager" else tf.errors.OpError
    with contextlib.chdir(tempfile.mkdtemp()), pytest.raises(kind, match="values after") as caught:
        step()
    assert re.search(
        r"after reduction 101: 'never\S*' on rank 1 \(host \S+\) differs in 3 of 3 elements from "
        r"rank 0: element \d is \S+, and \S+ on rank 0",
        str(caught.value),
    )
    assert "check_parameters=False to hvd.Distributed" in str(caught.value)
    # After an error, reductions are counted from 0.
    with recorded("hvdkit") as records:
        step_of(hvd, own_values(hvd, name="never"), where)()
    assert not records


def test_a_difference_after_many_reductions(hvd):
    variables = own_values(hvd)
    hvd.broadcast_variables(variables, root_rank=0)
    step = step_of(hvd, variables, "eager")
    for _ in range(180):
        step()
    if hvd.rank() == 1:
        variables[0].assign_add([0.0, 1.0, 0.0])
    for _ in range(21):
        step()
    with (
        contextlib.chdir(tempfile.mkdtemp()),
        pytest.raises(RankMismatchError, match="after reduction 201"),
    ):
        step()


@pytest.mark.parametrize(("reductions", "expected", "where"), [(1, 0, "eager"), (25, 1, "graph")])
def test_a_late_broadcast(hvd, where, reductions, expected):
    """A loop may reduce many times before its first update."""
    variables = own_values(hvd)
    step = step_of(hvd, variables, where)
    with recorded("hvdkit") as records:
        for done in range(200):
            if done == reductions:
                hvd.broadcast_variables(variables, root_rank=0)
            step()
    different = [each for each in records if "different values" in each.getMessage()]
    assert len(different) == (expected if hvd.rank() == 0 else 0)
    assert_same_on_all_ranks(hvd, [v.numpy() for v in variables])


def test_local_values_are_not_compared(hvd):
    """With check_parameters=False, or without gradients, values may differ."""
    shared, statistics = own_values(hvd), own_values(hvd, seed=100)
    hvd.broadcast_variables(shared, root_rank=0)
    meant = step_of(hvd, own_values(hvd), "graph", check_parameters=False)
    moving = step_of(hvd, shared, "graph", others=statistics)
    with recorded("hvdkit") as records:
        for _ in range(105):
            meant()
            moving()
    assert not [each for each in records if "different values" in each.getMessage()]


@pytest.mark.parametrize(
    ("where", "value", "text"), [("graph", np.nan, "NaN"), ("eager", np.inf, "infinite")]
)
def test_weights_that_are_not_finite_on_all_ranks_are_reported_once(hvd, where, value, text):
    """NaN of one rank makes the gradients of all ranks NaN; infinity has the gradient 0 here."""
    variables = own_values(hvd, name="broken")
    hvd.broadcast_variables(variables, root_rank=0)
    step = step_of(hvd, variables, where)
    with recorded("hvdkit") as records:
        for done in range(25):
            if done == 3 and (text == "infinite" or hvd.rank() == 1):
                for variable in variables:
                    variable.assign(np.full(variable.shape, value))
            step()
    messages = [each.getMessage() for each in records if "same data" not in each.getMessage()]
    assert len(messages) == (hvd.rank() == 0), messages
    found = rf"After reduction 11, 'broken.*' is {text} on all ranks: the loss"
    assert all(re.match(found, message) for message in messages), messages


@pytest.mark.parametrize("where", WHERE)
def test_two_equal_models_are_both_compared(hvd, where):
    twins = [own_values(hvd, name="twin"), own_values(hvd, seed=50, name="twin")]
    hvd.broadcast_variables(twins[0], root_rank=0)
    steps = [step_of(hvd, twin, where) for twin in twins]
    with recorded("hvdkit") as records:
        for _ in range(4):
            for step in steps:
                step()
    assert any("different values" in each.getMessage() for each in records) == (hvd.rank() == 0)


def test_comparisons_of_two_tapes_in_one_graph(hvd):
    """With one thread, comparisons in another order on each rank would wait for each other."""
    twins = [own_values(hvd, name="one"), own_values(hvd, name="other")]

    @tf.function
    def step():
        for twin in twins:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.tanh(v)) for v in twin])
            hvd.DistributedGradientTape(tape).gradient(loss, twin)

    with recorded("hvdkit") as records:
        for _ in range(12):
            step()
    different = [each for each in records if "different values" in each.getMessage()]
    assert len(different) == (2 if hvd.rank() == 0 else 0)


def test_value_checks_after_join(hvd):
    """After `join`, ranks use a graph that was traced before."""
    variables = own_values(hvd)
    hvd.broadcast_variables(variables, root_rank=0)
    step = step_of(hvd, variables, "graph")
    for _ in range(1 if hvd.rank() == 0 else 4):
        step()
    hvd.broadcast_variables(variables, root_rank=int(hvd.join()))
    for _ in range(8):
        step()
    assert_same_on_all_ranks(hvd, [v.numpy() for v in variables])


def test_a_module_with_a_traced_training_step_can_be_saved(hvd):
    class Trainer(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable([1.0, 2.0])

        @tf.function(input_signature=[])
        def train(self):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.weight**2)
            tape = hvd.DistributedGradientTape(tape)
            self.weight.assign_sub(0.1 * tape.gradient(loss, self.weight))

    trainer = Trainer()
    for _ in range(3):
        trainer.train()
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(trainer, folder)


def test_adasum(hvd):
    variables = variables_of()
    if not hvd.mpi_enabled():
        with pytest.raises(UsageError, match="over MPI only"):
            reduced_gradients(hvd, variables, "eager", data_of(0), op=hvd.Adasum)
        return
    # Adasum is the mean of equal gradients, and the sum of orthogonal ones.
    same = reduced_gradients(hvd, variables, "eager", data_of(0), op=hvd.Adasum)
    assert_close(same, expected_gradients(variables, [0]), 1e-6)
    v = tf.Variable(tf.zeros(hvd.size()))
    for where, compression in itertools.product(WHERE, ["none", "fp16"]):

        def step(compression=compression):
            with tf.GradientTape() as tape:
                loss = v[hvd.rank()]
            tape = hvd.DistributedGradientTape(
                tape, op=hvd.Adasum, compression=compression, sparse_as_dense=True
            )
            return tape.gradient(loss, [v])

        (gradient,) = (tf.function(step) if where == "graph" else step)()
        np.testing.assert_allclose(gradient.numpy(), np.ones(hvd.size()), rtol=1e-3)


@pytest.mark.parametrize("where", WHERE)
def test_a_jacobian_is_that_of_the_mean_of_the_targets(hvd, where):
    a, b, local, unused = (tf.Variable([1.0, 2.0]) for _ in range(4))
    factor = hvd.rank() + 1.0

    def compute():
        with tf.GradientTape() as plain:
            target = factor * a * b[0] + local
        tape = hvd.DistributedGradientTape(plain)
        tape.register_local_source(local)
        return tape.jacobian(target, {"a": a, "others": (b, [local, unused])})

    found = compute() if where == "eager" else tf.function(compute)()
    mean = (hvd.size() + 1) / 2
    np.testing.assert_allclose(found["a"], mean * np.eye(2))
    np.testing.assert_allclose(found["others"][0], mean * np.array([[1.0, 0.0], [2.0, 0.0]]))
    np.testing.assert_allclose(found["others"][1][0], np.eye(2) / hvd.size())
    np.testing.assert_array_equal(found["others"][1][1], np.zeros((2, 2)))


def test_the_jacobian_of_each_sample_is_not_reduced(hvd):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0 + hvd.rank()]])
    with tf.GradientTape() as plain:
        plain.watch(x)
        target = x * x
    found = hvd.DistributedGradientTape(plain).batch_jacobian(target, x)
    np.testing.assert_array_equal(found, [np.diag(2 * row) for row in x.numpy()])
