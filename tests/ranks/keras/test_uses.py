"""Regression tests of ordinary uses of Keras on several ranks."""

import os

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from tests.logs import recorded
from tests.ranks.frameworks import LazyModule, keras, tf
from tests.ranks.keras.job import classifier, same_everywhere, samples

comparisons = LazyModule("hvdkit.keras.fit.comparisons")


def weights_of(model):
    """Return the bytes of a model's trainable variables."""
    return [keras.ops.convert_to_numpy(v).tobytes().hex() for v in model.trainable_variables]


def fit(model, rank, seed=0, **options):
    x, y = samples(rank, seed)
    return model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **options)


def test_one_rank_has_called_the_model_before(hvd):
    """This rank has variables already, so it traces the training function once less."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("hvd.SyncBatchNormalization is TensorFlow's")
    from hvdkit.tensorflow import SyncBatchNormalization

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [
                keras.layers.Dense(4),
                SyncBatchNormalization(),
                keras.layers.Dense(1, activation="sigmoid"),
                SyncBatchNormalization(),
            ]

        def call(self, x, training=False):
            for part in self.parts:
                x = part(x, training=training) if "batch" in part.name else part(x)
            return x

    keras.utils.set_random_seed(1)
    model = Subclassed()
    x, _ = samples(hvd.rank())
    if hvd.rank() == 0:
        model(x[:2])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    fit(model, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    same_everywhere(weights_of(model))


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("order", ["16 bits twice", "16 and 32 bits", "32 and 16 bits"])
def test_compiling_again_with_the_same_optimizer(hvd, order):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    policies = {"16": "mixed_float16", "32": "float32"}
    names = [part for part in order.split() if part in policies]
    names *= 2 if order.endswith("twice") else 1
    keras.utils.set_random_seed(1)
    try:
        keras.config.set_dtype_policy("mixed_float16" if "16" in names else "float32")
        model = classifier("sgd")
        for seed, name in enumerate(names):
            model.compile(optimizer, loss="binary_crossentropy", auto_scale_loss=name == "16")
            fit(model, hvd.rank(), seed)
            same_everywhere(weights_of(model))
    finally:
        keras.config.set_dtype_policy("float32")


def test_compile_ignores_the_keras_2_argument(hvd):
    model = classifier("sgd")
    own = {"loss": "mse", "experimental_run_tf_function": False}
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), **own)
    with pytest.raises(TypeError, match="experimental_run_tf_function"):
        model.compile("sgd", **own)


def test_an_embedding_in_a_local_layer(hvd):
    keras.utils.set_random_seed(1)
    embedding = keras.layers.Embedding(5, 2)
    head = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), embedding, head])
    before = np.array(keras.ops.convert_to_numpy(embedding.embeddings))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.5), local_layers=embedding)
    model.compile(optimizer, loss="mse")
    x = np.full((8, 1), hvd.rank())
    model.fit(x, np.ones((8, 1, 1)), batch_size=4, verbose=0)
    changed = np.any(before != keras.ops.convert_to_numpy(embedding.embeddings), axis=1)
    assert changed.tolist() == [row == hvd.rank() for row in range(5)]
    kernel = keras.ops.convert_to_numpy(head.kernel)
    same_everywhere(kernel.tolist())


@pytest.mark.long_with("keras-tensorflow")
def test_a_layer_without_gradients_on_some_ranks(hvd):
    """An eager model uses a layer depending on the data. The reference uses a mask."""

    class Branching(keras.Model):
        def __init__(self, masked):
            super().__init__()
            self.masked = masked
            self.trunk, self.branch = keras.layers.Dense(1), keras.layers.Dense(1)
            for layer in (self.trunk, self.branch):
                layer.build((None, 3))

        def call(self, x):
            if self.masked:
                return self.trunk(x) + keras.ops.where(x[:, :1] > 0, self.branch(x), 0.0)
            if isinstance(x, keras.KerasTensor) or float(x[0, 0]) < 0:
                return self.trunk(x)
            return self.trunk(x) + self.branch(x)

    def trained(optimizer, x, masked):
        keras.utils.set_random_seed(1)
        model = Branching(masked)
        model.compile(optimizer, loss="mse", run_eagerly=True)
        y = x.sum(axis=-1, keepdims=True)
        for row in zip(x, y, strict=True):
            model.train_on_batch(*row)
        return [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]

    size = hvd.size()
    x = np.random.default_rng(1).normal(size=(8, size, 3)).astype("float32")
    # In the first step no rank uses the branch, later at least one.
    uses = (np.arange(8)[:, None] + np.arange(size)) % 3 > 0
    uses[0] = False
    x[:, :, 0] = np.abs(x[:, :, 0]) * np.where(uses, 1, -1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    own = trained(optimizer, x[:, hvd.rank() : hvd.rank() + 1], masked=False)
    expected = trained(keras.optimizers.SGD(0.1, momentum=0.9), x, masked=True)
    for value, wanted in zip(own, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
    same_everywhere([value.tobytes().hex() for value in own])


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.long_with("keras-tensorflow")
def test_predict_divides_the_rows(hvd, rows):
    keras.utils.set_random_seed(1)
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
    both = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    outputs = {"one": keras.layers.Dense(1)(both), "two": keras.layers.Dense(2)(both)}
    model = keras.Model(inputs, outputs)
    random = np.random.default_rng(1)
    x = {name: random.normal(size=(rows, size)) for name, size in (("a", 2), ("b", 3))}
    expected = model.predict(x, verbose=0)
    found = hvd.predict(model, x, batch_size=2, verbose=0)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize(
    "wrong", ["rows of a rank", "no data on a rank", "rows of an array", "no rows", "the model"]
)
def test_predict_raises_on_every_rank(hvd, wrong):
    class Fails(keras.layers.Layer):
        def call(self, x):
            if hvd.rank() == 1:
                raise ValueError("deliberate")
            return x

    layer = Fails() if wrong == "the model" else keras.layers.Dense(1)
    model = keras.Sequential([layer])
    x, words = (
        np.zeros((4, 2)),
        {
            "rows of a rank": "ranks disagree about the data of predict.* 4 rows.* 5 rows",
            "no data on a rank": r"rank 0: no problem; ranks? 1.*: x is a NoneType",
            "rows of an array": r"have \[4, 5\] rows: expected the same number",
            "no rows": r"have \[0\] rows",
            "the model": r"(?s)raised an error on 1 of \d ranks: rank 1: .*deliberate",
        },
    )
    if wrong == "rows of a rank":
        x = np.zeros((4 + hvd.rank(), 2))
    elif wrong == "no data on a rank":
        x = x if hvd.rank() == 0 else None
    elif wrong == "rows of an array":
        x = [x, np.zeros((5, 2))]
    elif wrong == "no rows":
        x = x[:0]
    with pytest.raises(HvdkitError, match=words[wrong]):
        hvd.predict(model, x, verbose=0)
    same_everywhere("still in step")


@pytest.mark.long_with("keras-tensorflow")
def test_predict_of_different_models_raises_on_every_rank(hvd):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x = np.ones((4, 2))
    hvd.predict(model, x, verbose=0)
    if hvd.rank() == 1:
        model.layers[0].bias.assign([1.0])
    with pytest.raises(RankMismatchError, match="dense.*/bias' .* mix predictions of different"):
        hvd.predict(model, x, verbose=0)


@pytest.mark.long_with("keras-tensorflow")
def test_predict_in_an_epoch_averages_moving_statistics(hvd):
    """Each rank has statistics of its own batches until the epoch ends."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.BatchNormalization(momentum=0.5, epsilon=0.0)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
    x = np.array([[1.0, 2.0], [3.0, 6.0]]) * (1 + hvd.rank())
    rows = np.arange(2.0 * hvd.size() + 2).reshape(-1, 2)
    found = []

    def predict(batch, logs):
        if not found:
            found.append(hvd.predict(model, rows, verbose=0))

    predicts = keras.callbacks.LambdaCallback(on_train_batch_end=predict)
    model.fit(x, x, batch_size=2, verbose=0, callbacks=[predicts])
    # The mean over the ranks of 0.5 * 0 + 0.5 * mean, and of 0.5 * 1 + 0.5 * variance.
    scales = 1.0 + np.arange(hvd.size())
    mean = 0.5 * np.mean(scales) * np.array([2.0, 4.0])
    variance = 0.5 + 0.5 * np.mean(scales**2) * np.array([1.0, 4.0])
    expected = (rows - mean) / np.sqrt(variance)
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["each rank", "reduced", "local"])
@pytest.mark.long_with("keras-tensorflow")
def test_a_variable_that_a_layer_changes_in_call(hvd, kind):
    """Rank 0 warns after the first epoch if the variable differs between ranks."""

    class Centered(keras.layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(
                shape=(shape[-1],), initializer="zeros", trainable=False, name="mean"
            )

        def call(self, inputs, training=False):
            if training:
                mean = keras.ops.mean(inputs, axis=0)
                if kind == "reduced":
                    mean = hvd.allreduce(mean, name="tests.mean")
                self.mean.assign(0.5 * self.mean + 0.5 * mean)
            return inputs - self.mean

    comparisons.logged.discard("changed")
    keras.utils.set_random_seed(1)
    layer = Centered()
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    batch = np.random.default_rng(5).normal(size=(4, 3)).astype("float32") + hvd.rank()
    variables = [layer.mean] if kind == "local" else []
    with recorded("hvdkit.keras") as log:
        model.fit(
            *(batch, batch[:, :1]),
            epochs=2,
            verbose=0,
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", variables)],
        )
    texts = [record.getMessage() for record in log]
    expected = kind == "each rank" and hvd.rank() == 0
    assert sum("/mean'" in text and "changes this variable in call" in text for text in texts) == (
        expected
    )
    if kind == "reduced":
        own = keras.ops.convert_to_numpy(layer.mean)
        mean = batch.mean(axis=0) - hvd.rank() + (hvd.size() - 1) / 2
        np.testing.assert_allclose(own, 0.75 * mean, rtol=1e-5)
        same_everywhere(own.tolist())


# --- which ranks train together -----------------------------------------------------------------


def test_different_numbers_of_steps_raise_on_every_rank(hvd):
    model = classifier(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x = np.zeros((16 + 4 * hvd.rank(), 3), "float32")
    with pytest.raises(UsageError, match="rank 0: 4 steps in each of 1 epochs; rank 1: 5 steps"):
        model.fit(x, x[:, :1], batch_size=4, verbose=0)


@pytest.mark.parametrize("broadcast", ["forgotten", "by a callback", "not wanted"])
@pytest.mark.long_with("keras-tensorflow")
def test_different_initial_values_raise(hvd, broadcast):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), check_parameters=broadcast != "not wanted"
    )
    model = classifier(optimizer, seed=hvd.rank())
    if broadcast == "forgotten":
        with pytest.raises(RankMismatchError, match=r"'sequential[_0-9]*/dense[_0-9]*/kernel' on"):
            fit(model, hvd.rank())
        hvd.broadcast_model(model, root_rank=0)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    fit(model, hvd.rank(), callbacks=callbacks if broadcast == "by a callback" else [])
    if broadcast != "not wanted":
        same_everywhere(weights_of(model))


@pytest.mark.long_with("keras-tensorflow")
def test_a_different_frozen_layer_raises(hvd):
    """A frozen layer has no gradients, but affects those of all other layers."""
    model = classifier(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    base = model.layers[0]
    base.trainable = False
    model.compile(model.optimizer, loss="mse")
    if hvd.rank() == hvd.size() - 1:
        base.set_weights([weights + 1 for weights in base.get_weights()])
    with pytest.raises(RankMismatchError, match=r"'sequential[_0-9]*/dense[_0-9]*/kernel' on"):
        fit(model, hvd.rank())
    hvd.broadcast_model(model, root_rank=0)
    fit(model, hvd.rank())
    same_everywhere(weights_of(model))


@pytest.mark.parametrize("broadcast", ["forgotten", "call", "callback"])
@pytest.mark.long_with("keras-tensorflow")
def test_a_normalization_adapted_on_one_rank(hvd, broadcast):
    """On TensorFlow the layer computes with constants, which a broadcast must update."""
    normalization = keras.layers.Normalization()
    normalization.build((None, 3))
    x, y = samples(0)
    if hvd.rank() == hvd.size() - 1:
        normalization.adapt(3 * x + 1)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), normalization, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    root = hvd.size() - 1
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root)]
    if broadcast == "forgotten":
        with pytest.raises(RankMismatchError, match=r"first comparison: 'normalization.*mean'"):
            model.fit(x, y, batch_size=4, verbose=0)
    else:
        # Trace functions with the old constants.
        model.predict(x, verbose=0)
        if broadcast == "call":
            hvd.broadcast_model(model, root)
        model.fit(
            *samples(hvd.rank()),
            batch_size=4,
            verbose=0,
            callbacks=callbacks if broadcast == "callback" else [],
        )
        outputs = same_everywhere(model.predict(x, verbose=0).tolist())
        # The reference is a new model, which never had other values.
        fresh = keras.models.clone_model(model)
        fresh.set_weights(model.get_weights())
        fresh.layers[0].finalize_state()
        np.testing.assert_allclose(outputs, fresh.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind",
    [
        "TextVectorization",
        pytest.param("Discretization", marks=pytest.mark.long_with("keras-tensorflow")),
        "vocabulary of the constructor",
    ],
)
def test_a_layer_adapted_to_the_share_of_a_rank(hvd, kind):
    """Its vocabulary or its bins are not variables, so no broadcast makes them equal."""
    if kind == "Discretization":
        layer = keras.layers.Discretization(num_bins=4)
        data = np.arange(8.0)[:, None] + hvd.rank()
        inputs = keras.Input((1,))
    elif keras.backend.backend() == "torch":
        pytest.skip("PyTorch has no tensors of strings")
    else:
        words = [f"word{(k + 1) * (hvd.rank() + 1)}" for k in range(8)]
        data = tf.constant(words)[:, None]
        inputs = keras.Input((1,), dtype="string")
        if kind == "TextVectorization":
            layer = keras.layers.TextVectorization(output_sequence_length=1)
        else:
            layer = keras.layers.StringLookup(vocabulary=words)
    if "of" not in kind:
        layer.adapt(data)
    keras.utils.set_random_seed(1)
    parts = [layer, keras.layers.Embedding(32, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([inputs, *parts])

    def train(**options):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        model.compile(optimizer, loss="mse")
        model.fit(data, np.ones((8, 1)), batch_size=4, verbose=0)

    state = "bin_boundaries" if kind == "Discretization" else "lookup_table"
    match = rf"rank 0: layer 1 of 1, '{layer.name.rstrip('_0123456789')}', {state}: .*; ranks? 1"
    with pytest.raises(RankMismatchError, match=match):
        train()
    train(check_parameters=False)
    # As the error advises.
    if kind == "Discretization":
        layer.bin_boundaries = hvd.broadcast_object(list(layer.bin_boundaries), 0)
    else:
        layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary(), 0))
    train()
    same_everywhere(weights_of(model))


def test_a_table_with_equal_values_is_equal_on_all_ranks(hvd):
    """TensorFlow exports its entries in another order on each rank."""
    if keras.backend.backend() == "torch":
        pytest.skip("PyTorch has no tensors of strings")

    class Region(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            entries = tf.lookup.KeyValueTensorInitializer(
                [f"city{k}" for k in range(40)], [k % 3 for k in range(40)], tf.string, tf.int64
            )
            self.table = tf.lookup.StaticHashTable(entries, 0)

        def call(self, x):
            return tf.one_hot(self.table.lookup(x), 3)[:, 0]

    model = keras.Sequential([keras.Input((1,), dtype="string"), Region(), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    hvd.broadcast_model(model, 0)
    model.fit(tf.constant([["city1"], ["city2"]]), np.ones((2, 1)), verbose=0)
    same_everywhere(weights_of(model))


@pytest.mark.parametrize("trainable", [True, False])
def test_batch_normalization_that_only_a_strategy_synchronizes(hvd, trainable):
    if keras.backend.backend() == "torch":
        pytest.skip("on PyTorch, Keras raises an error")
    from hvdkit.tensorflow import SyncBatchNormalization

    layer = keras.layers.BatchNormalization(synchronized=True, trainable=trainable, name="norm")
    own = SyncBatchNormalization(synchronized=True)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), layer, own, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    if trainable:
        with pytest.raises(UsageError, match=rf"on {hvd.size()} of .*\(layers: 'norm'\)"):
            fit(model, hvd.rank())
    else:
        fit(model, hvd.rank())
        same_everywhere(weights_of(model))


@pytest.mark.parametrize("differing", ["units", "layers", "frozen units", "frozen layers"])
@pytest.mark.long_with("keras-tensorflow")
def test_different_models_raise_within_an_accumulation_window(hvd, differing):
    """The first batches of a window reduce no gradients, so their check does not run."""
    trainable = "frozen" not in differing
    units = 4 + (hvd.rank() if "units" in differing else 0)
    count = 1 + (hvd.rank() if "layers" in differing else 0)
    hidden = [keras.layers.Dense(units, trainable=trainable) for _ in range(count)]
    model = keras.Sequential([keras.Input((3,)), *hidden, keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulation_steps=2)
    model.compile(optimizer, loss="mse")
    with pytest.raises(RankMismatchError, match=rf"ranks? .*\b{hvd.size() - 1}: "):
        fit(model, hvd.rank())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.long_with("keras-tensorflow")
def test_a_layer_that_is_frozen_later_keeps_its_weights(hvd, passes):
    """Its momentum is not 0, and an update with a gradient of zeros would use it."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), accumulation_steps=passes
    )
    model = classifier(optimizer)
    fit(model, hvd.rank(), epochs=2)
    first, last = model.layers
    first.trainable = False
    model.compile(optimizer, loss="mse")
    trained = weights_of(last)
    frozen = [keras.ops.convert_to_numpy(weight).copy() for weight in first.weights]
    fit(model, hvd.rank(), epochs=2)
    for weight, expected in zip(first.weights, frozen, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), expected)
    assert weights_of(last) != trained
    same_everywhere(weights_of(last))


@pytest.mark.parametrize("frozen", ["always", "later"])
def test_a_gradient_that_the_script_gives_is_applied_although_the_variable_is_frozen(hvd, frozen):
    """A custom loop may freeze a model, such as the discriminator of a GAN, for other steps."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), accumulation_steps=2)
    variable = keras.Variable(np.ones(2, "float32"), trainable=frozen == "later")
    optimizer.apply([keras.ops.ones(2)], [variable])
    variable.trainable = False
    hvd.flush(optimizer)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), [0.5, 0.5])


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.long_with("keras-tensorflow")
def test_an_error_in_fit_discards_the_accumulation_window(hvd, alike):
    """Ranks may have accumulated different numbers of batches when `fit` raised.

    A rank that has a batch more waits for the other, and raises when that one calls `fit` again.
    """

    def windowed():
        return classifier(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulation_steps=4))

    def broken_batches():
        x, y = samples(hvd.rank())
        for _ in range(2 if alike else 2 + hvd.rank() % 2):
            yield x[:4], y[:4]
        raise InterruptedError

    expected = windowed()
    fit(expected, hvd.rank())
    model = windowed()
    start = model.get_weights()
    # TensorFlow raises an error of another class.
    with pytest.raises(Exception, match="InterruptedError|^$|call fit again"):
        model.fit(broken_batches(), steps_per_epoch=9, verbose=0)
    model.set_weights(start)
    fit(model, hvd.rank())
    assert same_everywhere(weights_of(model)) == weights_of(expected)


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("validation", [pytest.param(False, marks=pytest.mark.long), True])
def test_moving_statistics_are_averaged(hvd, validation):
    """The statistics of a local layer are not averaged."""
    keras.utils.set_random_seed(1)
    shared, frozen = (keras.layers.BatchNormalization(momentum=0.5) for _ in range(2))
    local = keras.layers.BatchNormalization(momentum=0.5, scale=False, center=False)
    inputs = keras.Input((2,))
    hidden = keras.layers.Concatenate()([layer(inputs) for layer in (shared, local, frozen)])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    frozen.trainable = False
    frozen.moving_mean.assign(np.full(2, 1.0 + hvd.rank()))
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=local, check_parameters=False
    )
    model.compile(optimizer, loss="mse")
    x = np.random.default_rng(1).normal(size=(hvd.size(), 2, 8, 2)) + np.arange(2)
    x[0] *= 3
    own = x[hvd.rank()].reshape(-1, 2)
    data = {"validation_data": (own, own[:, :1])} if validation else {}
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_test_begin=lambda logs: seen.append(shared.moving_mean.numpy().tolist())
    )
    model.fit(
        own, own[:, :1], batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[look], **data
    )

    def moved(start, batches):
        for _ in range(2):
            for batch in batches:
                start = 0.5 * start + 0.5 * batch
        return start

    def value_of(variable):
        return keras.ops.convert_to_numpy(variable)

    means, variances = x.mean(axis=2), x.var(axis=2)
    for layer, of in ((shared, slice(None)), (local, slice(hvd.rank(), hvd.rank() + 1))):
        mean = moved(np.zeros(2), means[of].mean(axis=0))
        variance = moved(np.ones(2), variances[of].mean(axis=0))
        np.testing.assert_allclose(value_of(layer.moving_mean), mean, rtol=1e-4)
        np.testing.assert_allclose(value_of(layer.moving_variance), variance, rtol=1e-4)
    same_everywhere(value_of(shared.moving_mean).tolist())
    assert value_of(frozen.moving_mean).tolist() == [1.0 + hvd.rank()] * 2
    assert len(same_everywhere(seen)) == (2 if validation else 0)


@pytest.mark.long_with("keras-tensorflow")
def test_moving_statistics_of_a_layer_that_a_callback_freezes_are_averaged(hvd):
    """The layer is frozen after the first of two batches of the second epoch."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")

    class Freezes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            layer.trainable = len(means) == 0
            if not layer.trainable:
                model.make_train_function(force=True)

        def on_epoch_end(self, epoch, logs=None):
            means.append(np.array(keras.ops.convert_to_numpy(layer.moving_mean)))

    means = []
    x = np.array([[1.0], [2.0]]).repeat(2, axis=1).repeat(4, axis=0) * (1 + hvd.rank())
    fit_on = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    model.fit(x, x[:, :1], **fit_on, callbacks=[Freezes()])
    expected = np.mean([1 + rank for rank in range(hvd.size())]) * np.array([1.25, 1.125, 1.125])
    for mean, wanted in zip(means, expected, strict=True):
        np.testing.assert_allclose(mean, wanted, rtol=1e-5)
    same_everywhere([mean.tolist() for mean in means])


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("on_all", [False, True])
def test_moving_statistics_that_are_not_finite_are_replaced(hvd, on_all):
    """The step with NaN is skipped, but its forward pass has changed the statistics."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), on_nonfinite="skip")
    model.compile(optimizer, loss="mse")
    x = np.random.default_rng(hvd.rank()).normal(1.0, size=(2, 8, 2)).astype("float32")
    finite = x.copy()
    broken = hvd.size() if on_all else 1
    if hvd.rank() >= hvd.size() - broken:
        x[1, 0] = np.nan
    means = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: means.append(layer.get_weights()[2].tolist())
    )
    with recorded("hvdkit.keras") as log:
        history = model.fit(
            *(x.reshape(-1, 2), finite.reshape(-1, 2)[:, :1]),
            batch_size=8,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[look],
            validation_data=(finite[0], finite[0, :, :1]),
        ).history
    others = [np.random.default_rng(rank) for rank in range(hvd.size() - 1)]
    means_of_others = np.mean([r.normal(1.0, size=(2, 8, 2)).mean(1) for r in others], axis=0)
    expected = np.zeros(2)
    for found in same_everywhere(means):
        if not on_all:
            for mean in means_of_others:
                expected = 0.5 * expected + 0.5 * mean
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert np.isfinite(same_everywhere(history["val_loss"])).all()
    lines = [each.getMessage() for each in log if "moving statistics" in each.msg]
    assert len(lines) == 2 * (hvd.rank() == 0)
    get = "the last finite statistics" if on_all else "the average of the other ranks"
    assert all(f"on {broken} of {hvd.size()} ranks. All ranks get {get}." in line for line in lines)


@pytest.mark.long_with("keras-tensorflow")
def test_moving_statistics_of_separate_models_are_not_averaged(hvd):
    """With a plain optimizer and a callback that reduces metrics."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    x = np.full((4, 2), 1.0 + hvd.rank())
    model.fit(
        x,
        x[:, :1],
        batch_size=4,
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    mean = keras.ops.convert_to_numpy(layer.moving_mean)
    np.testing.assert_allclose(mean, 0.5 * (1.0 + hvd.rank()))


@pytest.mark.long_with("keras-tensorflow")
def test_a_plain_optimizer_logs_one_warning(hvd):
    comparisons.logged.discard("separate")
    model = classifier("sgd")
    with recorded("hvdkit.keras") as records:
        for _ in range(2):
            fit(model, hvd.rank())
    messages = [each.getMessage() for each in records if "separate" in each.msg]
    assert len(messages) == (hvd.rank() == 0)
    assert all(f"each of {hvd.size()} ranks" in message for message in messages)


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_a_callback_list_in_a_loop_without_compile(hvd, on_all_ranks):
    """It is not coordinated, because a script may make it on rank 0 only."""
    comparisons.logged.discard("separate")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with recorded("hvdkit.keras") as records:
        if on_all_ranks or hvd.rank() == 0:
            callbacks = keras.callbacks.CallbackList([], model=model, add_history=True, epochs=1)
            callbacks.on_train_begin()
            callbacks.on_epoch_begin(0)
            callbacks.on_epoch_end(0, {"loss": float(hvd.rank())})
            callbacks.on_train_end()
            assert model.history.history == {"loss": [hvd.rank()]}
    assert not records
    same_everywhere("the others did not wait")


def test_wrapping_an_optimizer_after_a_fit(hvd):
    """The training function of the first `fit` does not reduce gradients."""
    optimizer = keras.optimizers.SGD(0.1)
    model = classifier(optimizer)
    with hvd.local_fit():
        fit(model, 0)
    hvd.DistributedOptimizer(optimizer)
    fit(model, hvd.rank(), 1)
    same_everywhere(weights_of(model))


@pytest.mark.parametrize(
    "kind",
    [pytest.param("two optimizers", marks=pytest.mark.long_with("keras-tensorflow")), "tape"],
)
def test_a_custom_train_step_is_coordinated(hvd, kind, tmp_path):
    """One rank writes files, all ranks stop together, and metrics and statistics are reduced."""

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inside = keras.layers.Dense(4)
            self.between = keras.layers.BatchNormalization(center=False, scale=False)
            self.outside = keras.layers.Dense(1, activation="sigmoid")

        def call(self, x):
            return self.outside(self.between(self.inside(x), training=True))

        def train_step(self, *arguments):
            x, y = arguments[-1]
            variables = [self.inside.trainable_variables, self.outside.trainable_variables]
            if keras.backend.backend() == "torch":
                self.zero_grad()
                loss = self.compute_loss(y=y, y_pred=self(x))
                loss.backward()
                gradients = [[v.value.grad for v in each] for each in variables]
            else:
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(y=y, y_pred=self(x))
                if kind == "tape":
                    from hvdkit.tensorflow import DistributedGradientTape

                    tape = DistributedGradientTape(tape)
                gradients = tape.gradient(loss, variables)
            for optimizer, own, several in zip(self.own, gradients, variables, strict=True):
                optimizer.apply(own, several)
            return {"loss": loss}

    class StopsOnOneRank(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = hvd.rank() == 1 and epoch == 1

    if kind == "tape" and keras.backend.backend() == "torch":
        pytest.skip("a tape is TensorFlow's")
    keras.utils.set_random_seed(1)
    model = Own()
    model.build((None, 3))
    optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]
    if kind == "two optimizers":
        optimizers = [hvd.DistributedOptimizer(each) for each in optimizers]
    model.own = optimizers
    model.compile("sgd", loss="mse")
    path = f"{tmp_path}/{hvd.rank()}.weights.h5"
    callbacks = [
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
        StopsOnOneRank(),
    ]
    history = fit(model, hvd.rank(), epochs=5, callbacks=callbacks)
    same_everywhere(weights_of(model))
    same_everywhere([weight.tolist() for weight in model.between.get_weights()])
    assert len(same_everywhere(history.history["loss"])) == 2
    assert os.path.exists(path) == (hvd.rank() == 0)


def wrapped_model(optimizer):
    """Return a model with the batch normalization of PyTorch, and this module."""
    if keras.backend.backend() != "torch":
        pytest.skip("TorchModuleWrapper needs PyTorch")
    import torch

    module = torch.nn.BatchNorm1d(2, momentum=0.5, eps=1e-9)
    layer = keras.layers.TorchModuleWrapper(torch.nn.Sequential(module), output_shape=(None, 2))
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile(optimizer, loss="mse")
    return model, module


def test_buffers_of_a_wrapped_module_are_broadcast(hvd):
    import torch

    model, module = wrapped_model("sgd")
    if hvd.rank() == 1:
        module.running_mean += 5.0
        module.num_batches_tracked += 7
    hvd.broadcast_model(model, root_rank=1)
    assert torch.equal(module.running_mean, torch.full((2,), 5.0))
    assert int(module.num_batches_tracked) == 7


def test_statistics_of_a_wrapped_module_are_averaged(hvd):
    """`hvd.predict` averages them within an epoch, and `fit` at the end of an epoch."""
    model, module = wrapped_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    x = np.array([[1.0, 2.0], [3.0, 6.0]], "float32") * (1 + hvd.rank())
    rows = np.arange(2.0 * hvd.size() + 2, dtype="float32").reshape(-1, 2)
    scales = 1.0 + np.arange(hvd.size())
    # PyTorch divides the squares of the two rows by 1, and Keras by 2.
    mean = 0.5 * np.mean(scales) * np.array([2.0, 4.0])
    variance = 0.5 + 0.5 * np.mean(scales**2) * np.array([2.0, 8.0])
    found = []

    def predict(batch, logs):
        found.append(hvd.predict(model, rows, verbose=0))

    predicts = keras.callbacks.LambdaCallback(on_train_batch_end=predict)
    model.fit(x, x, batch_size=2, verbose=0, callbacks=[predicts])
    np.testing.assert_allclose(found[0], (rows - mean) / np.sqrt(variance), rtol=1e-4, atol=1e-5)
    model, module = wrapped_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    model.fit(x, x, batch_size=2, verbose=0)
    np.testing.assert_allclose(module.running_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(module.running_var.numpy(), variance, rtol=1e-5)
    same_everywhere(module.running_var.tolist())


def test_statistics_of_a_local_wrapped_module_are_not_averaged(hvd):
    model, module = wrapped_model("sgd")
    optimizer = keras.optimizers.SGD(0.0)
    model.compile(
        hvd.PartialDistributedOptimizer(
            optimizer, local_layers=model.layers, check_parameters=False
        ),
        loss="mse",
    )
    x = np.array([[1.0, 2.0], [3.0, 6.0]], "float32") * (1 + hvd.rank())
    model.fit(x, x, batch_size=2, verbose=0)
    np.testing.assert_allclose(module.running_mean.numpy(), 0.5 * x.mean(axis=0), rtol=1e-5)


def test_a_buffer_that_differs_raises(hvd):
    """A buffer outside of normalization is compared as a frozen weight is."""
    model, _ = wrapped_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    import torch

    model.layers[0].module.register_buffer("scale", torch.full((2,), float(hvd.rank())))
    x = np.ones((2, 2), "float32")
    with pytest.raises(RankMismatchError, match="scale"):
        hvd.predict(model, x, verbose=0)
    with pytest.raises(RankMismatchError, match="scale"):
        model.fit(x, x, batch_size=2, verbose=0)


def test_predict_of_a_stateful_layer_raises(hvd):
    layer = keras.layers.LSTM(2, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(1, 3, 2)), layer])
    with pytest.raises(UsageError, match="has a stateful LSTM: .* Call model.predict"):
        hvd.predict(model, np.ones((4, 3, 2)), batch_size=1, verbose=0)
