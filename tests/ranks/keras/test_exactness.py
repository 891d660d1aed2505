"""Compare n ranks with batch b to one process with batch n * b: weights after 20 steps."""

import functools

import keras
import numpy as np
import pytest

from tests.ranks.keras import oracle

STEPS = 20
# Tracing takes long.
SLOW = pytest.mark.long_with("keras-tensorflow")


def momentum():
    return keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True)


def clipped_adam():
    return keras.optimizers.Adam(0.01, global_clipnorm=0.05)


def scheduled():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.7)
    return keras.optimizers.SGD(schedule)


OPTIMIZERS = {
    "momentum": momentum,
    "adam with global clipping": clipped_adam,
    "schedule": scheduled,
    "adamw with clipping by norm": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.02),
    "rmsprop with clipping by value": lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.01),
    "averaged weights": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8),
}
MODELS = {
    "dense": oracle.dense_model,
    "embedding": oracle.word_model,
    "normalization at inference": oracle.frozen_normalization_model,
}


def trained(hvd, make_model, make_optimizer, data, passes, way, **options):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_optimizer(), accumulation_steps=passes, **options)
    if way == "fit":
        model.compile(optimizer, loss="mse")
        inputs, targets = data.of_rank(hvd.rank())
        model.fit(inputs, targets, batch_size=data.batch, shuffle=False, verbose=0)
    else:
        step = oracle.loop_step(model, optimizer)
        for inputs, targets in data.steps_of(hvd.rank()):
            step(inputs, targets)
        assert hvd.flush(optimizer) == (data.steps % passes != 0)
        optimizer.finalize_variable_values(model.trainable_variables)
    assert int(optimizer.iterations) == -(-data.steps // passes)
    return model.get_weights()


def data_of(make_model, size):
    return oracle.data(size, STEPS, words=make_model is oracle.word_model)


@functools.cache
def one_process(make_model, make_optimizer, size, passes):
    """Return the weights of one process with the data of `size` ranks, before and after."""
    model, optimizer = make_model(), make_optimizer()
    begin = model.get_weights()
    step = oracle.loop_step(model, optimizer)
    for inputs, targets in data_of(make_model, size).windows(passes):
        step(inputs, targets)
    optimizer.finalize_variable_values(model.trainable_variables)
    return begin, model.get_weights()


def check(hvd, make_model, make_optimizer, passes, way, bound=1e-5, **options):
    data = data_of(make_model, hvd.size())
    weights = trained(hvd, make_model, make_optimizer, data, passes, way, **options)
    assert oracle.same_everywhere(hvd, weights)
    if hvd.rank() == 0:
        begin, expected = one_process(make_model, make_optimizer, hvd.size(), passes)
        assert oracle.distance(weights, begin) > 0.01, "nothing was learned"
        assert oracle.distance(weights, expected) <= bound


# Clipping to a global norm reads all gradients after the reduction.
@pytest.mark.parametrize(
    "name",
    [
        "adam with global clipping",
        *(pytest.param(n, marks=SLOW) for n in OPTIMIZERS if n != "adam with global clipping"),
    ],
)
def test_optimizers(hvd, name):
    check(hvd, oracle.dense_model, OPTIMIZERS[name], 1, "fit")


@pytest.mark.parametrize(
    "name", ["momentum", pytest.param("adam with global clipping", marks=SLOW)]
)
def test_custom_loops(hvd, name):
    check(hvd, oracle.dense_model, OPTIMIZERS[name], 1, "loop")


# 20 steps are six windows of three and one of two.
@pytest.mark.parametrize(
    ("name", "passes", "way"),
    [
        pytest.param("momentum", 3, "fit", marks=SLOW),
        ("momentum", 4, "loop"),
        pytest.param("adam with global clipping", 3, "loop", marks=SLOW),
        ("averaged weights", 3, "fit"),
    ],
)
def test_accumulation(hvd, name, passes, way):
    check(hvd, oracle.dense_model, OPTIMIZERS[name], passes, way)


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize(
    ("name", "passes", "way"),
    [
        ("embedding", 1, "fit"),
        ("embedding", 3, "loop"),
        ("normalization at inference", 1, "loop"),
        ("normalization at inference", 3, "fit"),
    ],
)
def test_models(hvd, name, passes, way):
    check(hvd, MODELS[name], momentum, passes, way)


def test_embeddings_as_dense_gradients(hvd):
    check(hvd, oracle.word_model, momentum, 1, "fit", sparse_as_dense=True)


# Bounds for the weights after 20 steps. Gradients have relative rounding errors of 2^-11 and 2^-8.
@pytest.mark.parametrize(
    ("compression", "bound"), [("fp16", 2e-3), pytest.param("bf16", 2e-2, marks=SLOW)]
)
def test_wire_formats(hvd, compression, bound):
    check(hvd, oracle.dense_model, momentum, 1, "fit", bound, compression=compression)


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("options", [{"groups": 2}, {"bucket_bytes": 100}, {"num_groups": 1}])
def test_buckets(hvd, options):
    check(hvd, oracle.dense_model, momentum, 1, "fit", **options)


@pytest.mark.long_with("keras-tensorflow")
def test_gradient_predivide_factor(hvd):
    check(hvd, oracle.dense_model, momentum, 1, "fit", gradient_predivide_factor=2.0)


@pytest.mark.long_with("keras-tensorflow")
def test_sum_over_ranks_and_passes(hvd):
    data = oracle.data(hvd.size(), STEPS)

    def slower():
        return keras.optimizers.SGD(0.05 / hvd.size() / 2)

    model = oracle.dense_model()
    optimizer = hvd.DistributedOptimizer(slower(), op=hvd.Sum, backward_passes_per_step=2)
    step = oracle.loop_step(model, optimizer)
    for inputs, targets in data.steps_of(hvd.rank()):
        step(inputs, targets)
    if hvd.rank() == 0:
        _, expected = one_process(
            oracle.dense_model, lambda: keras.optimizers.SGD(0.05), hvd.size(), 2
        )
        assert oracle.distance(model.get_weights(), expected) <= 1e-5


def test_keras_gradient_accumulation(hvd):
    def accumulating():
        return keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)

    data = oracle.data(hvd.size(), STEPS)
    model = oracle.dense_model()
    model.compile(hvd.DistributedOptimizer(accumulating()), loss="mse")
    inputs, targets = data.of_rank(hvd.rank())
    model.fit(inputs, targets, batch_size=data.batch, shuffle=False, verbose=0)
    if hvd.rank() == 0:
        _, expected = one_process(
            oracle.dense_model, lambda: keras.optimizers.SGD(0.05, momentum=0.9), hvd.size(), 2
        )
        assert oracle.distance(model.get_weights(), expected) <= 1e-5


@pytest.mark.long_with("keras-tensorflow")
def test_a_custom_train_step_reduces_once(hvd):
    class Model(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, inputs, training=None):
            return self.inner(inputs, training=training)

        def train_step(self, data):
            return super().train_step(data)

    data = oracle.data(hvd.size(), STEPS)
    model = Model(oracle.dense_model())
    model.compile(hvd.DistributedOptimizer(momentum()), loss="mse")
    inputs, targets = data.of_rank(hvd.rank())
    model.fit(inputs, targets, batch_size=data.batch, shuffle=False, verbose=0)
    if hvd.rank() == 0:
        _, expected = one_process(oracle.dense_model, momentum, hvd.size(), 1)
        assert oracle.distance(model.inner.get_weights(), expected) <= 1e-5


@pytest.mark.parametrize("eagerly", [pytest.param(False, marks=pytest.mark.long), True])
def test_ranks_are_bit_identical(hvd, eagerly):
    model = oracle.dense_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss="mse", run_eagerly=eagerly)
    rng = np.random.default_rng(hvd.rank())
    inputs, targets = rng.normal(size=(64, 6)), rng.normal(size=(64, 3))
    model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0)
    assert oracle.same_everywhere(hvd, model.get_weights())
    assert oracle.same_everywhere(hvd, [v.numpy() for v in optimizer.variables])


@pytest.mark.parametrize("scaled", [True, pytest.param(False, marks=SLOW)])
def test_accumulated_gradients_of_a_local_layer_are_means(hvd, scaled):
    """An incomplete window at the end of the epoch, too."""
    plain = {"use_bias": False, "kernel_initializer": "zeros"}
    local, shared = keras.layers.Dense(1, **plain), keras.layers.Dense(1, **plain)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Add()([local(inputs), shared(inputs)]))
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0),
        local_layers=local,
        scale_local_gradients=scaled,
        accumulation_steps=2,
    )
    model.compile(optimizer, loss=lambda _, outputs: outputs)
    # The gradient of each batch is 1. Three batches are two updates.
    model.fit(np.ones((12, 2)), np.zeros((12, 1)), batch_size=4, verbose=0)
    assert shared.get_weights()[0].ravel().tolist() == [-2.0, -2.0]
    expected = -2.0 / (hvd.size() if scaled else 1)
    assert local.get_weights()[0].ravel().tolist() == [expected, expected]


def test_local_layers_are_not_reduced(hvd):
    model = oracle.dense_model()
    local, shared = model.layers
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05), local_layers=local, scale_local_gradients=False
    )
    model.compile(optimizer, loss="mse")
    inputs, targets = oracle.data(hvd.size(), 5).of_rank(hvd.rank())
    model.fit(inputs, targets, batch_size=4, shuffle=False, verbose=0)
    assert not oracle.same_everywhere(hvd, local.get_weights())
    assert oracle.same_everywhere(hvd, shared.get_weights())
