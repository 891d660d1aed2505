"""A model with optimizers as attributes beside that of `compile`, such as a GAN."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from hvdkit.monitor import metrics
from tests.commit_files import read_commit, write_commit
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import LazyModule, keras, tf
from tests.ranks.keras.job import (
    of_every_rank,
    same_everywhere,
)
from tests.ranks.keras.test_checkpoint import Interrupted, interrupt_after
from tests.unit.monitor.simulated import Kept

comparisons = LazyModule("hvdkit.keras.fit.comparisons")

EPOCHS, BATCHES, BATCH = 3, 4, 4


def network(outputs):
    layers = [keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(outputs)]
    return keras.Sequential([keras.Input((3,)), *layers])


def gan(hvd, rank=0, **options):
    """Return a GAN without `call`, whose discriminator and generator have an optimizer each."""

    class GAN(keras.Model):
        def compile(self, optimizers):
            super().compile()
            self.optimizer_d = optimizers[0]
            self.others = {"g": optimizers[1]}

        def train_step(self, data):
            x, _ = data
            weights = self.discriminator.trainable_weights
            loss = update(self.optimizer_d, lambda: self.loss_d(x), weights)
            update(self.others["g"], lambda: self.loss_g(x), self.generator.trainable_weights)
            return {"loss": loss}

        def loss_d(self, x):
            real, fake = self.discriminator(x), self.discriminator(self.generator(x))
            return keras.ops.mean((real - 1.0) ** 2) + keras.ops.mean(fake**2)

        def loss_g(self, x):
            return keras.ops.mean((self.discriminator(self.generator(x)) - 1.0) ** 2)

    keras.utils.set_random_seed(3 + rank)
    model = GAN()
    model.discriminator, model.generator = network(1), network(3)
    # `fit` on Keras's PyTorch backend needs a model that is built.
    model.built = keras.backend.backend() == "torch"
    adams = [keras.optimizers.Adam(0.05), keras.optimizers.Adam(0.02)]
    model.compile([hvd.DistributedOptimizer(each, bucket_bytes=64, **options) for each in adams])
    return model


def trainer(hvd, rank=0, **options):
    """Return a model that trains with the optimizer of a nested model."""

    class Trainer(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = network(1)

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data

            def loss():
                return keras.ops.mean((self.net(x) - y) ** 2)

            return {"loss": update(self.net.optimizer, loss, self.net.trainable_weights)}

    keras.utils.set_random_seed(3 + rank)
    model = Trainer()
    model.build((None, 3))
    adam = keras.optimizers.Adam(0.05)
    model.net.compile(hvd.DistributedOptimizer(adam, bucket_bytes=64, **options))
    model.compile()
    return model


def update(optimizer, compute, weights):
    """Apply the gradients of a loss, with any backend."""
    if keras.backend.backend() == "tensorflow":
        with tf.GradientTape() as tape:
            loss = compute()
        optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
        return loss
    import torch

    loss = compute()
    gradients = torch.autograd.grad(loss, [weight.value for weight in weights])
    with torch.no_grad():
        optimizer.apply(list(gradients), weights)
    return loss


def data(hvd):
    x = np.random.default_rng(hvd.rank()).normal(size=(BATCHES * BATCH, 3)).astype("float32")
    return x, x[:, :1]


def content(model):
    """Return the weights and the states of the optimizers of this rank."""
    nested = hasattr(model, "net")
    optimizers = [model.net.optimizer] if nested else [model.optimizer_d, model.others["g"]]
    variables = [*model.weights, *(v for each in optimizers for v in each.variables)]
    return [keras.ops.convert_to_numpy(variable).tobytes().hex() for variable in variables]


def fit(hvd, model, callbacks, interrupted_after=None, epochs=EPOCHS):
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    if interrupted_after is not None:
        own.append(interrupt_after(interrupted_after))
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(*data(hvd), epochs=epochs, callbacks=own, **options)
    return content(model)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (gan, {"compression": "fp16", "accumulation_steps": 2}),
        pytest.param(trainer, {}, marks=pytest.mark.long_with("keras-tensorflow")),
    ],
)
def test_a_resumed_fit_is_bit_identical(hvd, make, options):
    expected = same_everywhere(fit(hvd, make(hvd, hvd.rank(), **options), []))
    with shared_folder(hvd) as folder:
        checkpoint = hvd.callbacks.Checkpoint(folder, every_steps=1)
        with pytest.raises(Interrupted):
            fit(hvd, make(hvd, hvd.rank(), **options), [checkpoint], BATCHES + 3)
        checkpoint._running.manager.close()
        resumed = fit(hvd, make(hvd, 9, **options), [hvd.callbacks.Checkpoint(folder)])
    assert resumed == expected


@pytest.mark.long_with("keras-tensorflow")
def test_a_plain_optimizer_beside_a_wrapped_one_logs_a_warning(hvd):
    texts = []
    for generator in [hvd.DistributedOptimizer(keras.optimizers.Adam()), keras.optimizers.Adam()]:
        comparisons.logged.discard("unreduced")
        model = gan(hvd, hvd.rank())
        model.others["g"] = generator
        with recorded("hvdkit.keras") as records:
            fit(hvd, model, [])
        texts.append([each.getMessage() for each in records if "separately" in each.msg])
    assert not texts[0]
    assert len(texts[1]) == (hvd.rank() == 0)
    weight = model.generator.weights[0].path
    assert all(f"after the first epoch: {weight!r} on rank 1" in text for text in texts[1])


@pytest.mark.long_with("keras-tensorflow")
def test_an_optimizer_that_is_not_an_attribute(hvd):
    """Its windows end with the epochs, and moving statistics are averaged, as for an attribute."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            layers = [keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
            self.net = keras.Sequential([keras.Input((3,)), *layers])

        def call(self, x):
            return self.net(x)

        def train_step(self, data):
            x, y = data

            def loss():
                return keras.ops.mean((self.net(x, training=True) - y) ** 2)

            return {"loss": update(optimizer, loss, self.net.trainable_weights)}

    comparisons.logged.discard("elsewhere")
    found = []
    for is_attribute in (True, False):
        keras.utils.set_random_seed(3)
        model = Model()
        model.build((None, 3))
        model.compile()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), accumulation_steps=3)
        if is_attribute:
            model.own = optimizer
        with recorded("hvdkit.keras") as records:
            for epochs in (2, 1):
                options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
                model.fit(*data(hvd), epochs=epochs, **options)
        weights = [keras.ops.convert_to_numpy(v).tobytes().hex() for v in model.weights]
        lines = [each.getMessage() for each in records if "attribute" in each.msg]
        found.append((same_everywhere(weights), int(optimizer.iterations)))
        assert len(lines) == (hvd.rank() == 0 and not is_attribute)
    assert found[0] == found[1]
    assert found[0][1] == 3 * 2
    optimizer.variables[-1].assign(1.0 + hvd.rank())
    with pytest.raises(RankMismatchError):
        model.fit(*data(hvd), verbose=0)


@pytest.mark.long_with("keras-tensorflow")
def test_other_variables_beside_a_wrapped_optimizer_log_a_warning(hvd):
    comparisons.logged.discard("unreduced")
    model = gan(hvd)
    model.extra = keras.layers.Dense(1 + hvd.rank())
    model.extra.build((None, 3))
    with recorded("hvdkit.keras") as records:
        model.fit(*data(hvd), batch_size=BATCH, verbose=0)
    texts = [each.getMessage() for each in records if "separately" in each.msg]
    assert len(texts) == (hvd.rank() == 0)
    assert all("kernel, float32 [3, 2]. Each rank trains" in text for text in texts)


def test_a_broadcast_builds_the_optimizers(hvd):
    # Only the last rank has optimizers with a state, as after it has loaded a file.
    root = hvd.size() - 1
    model = gan(hvd, hvd.rank())
    if hvd.rank() == root:
        model.optimizer_d.build(model.discriminator.trainable_weights)
        model.others["g"].build(model.generator.trainable_weights)
        for variable in [*model.optimizer_d.variables, *model.others["g"].variables]:
            variable.assign(np.full(variable.shape, 7))
    hvd.broadcast_model(model, root)
    assert same_everywhere(content(model)) == of_every_rank(content(model))[root]
    assert int(model.others["g"].iterations) == 7


@pytest.mark.long_with("keras-tensorflow")
def test_a_nested_model_that_one_rank_has_loaded(hvd):
    """Its optimizer is not used, so the broadcast and `fit` do not need it on the other ranks."""
    base = network(2)
    if hvd.rank() == 0:
        base.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
        base.optimizer.build(base.trainable_weights)
    model = keras.Sequential([keras.Input((3,)), base, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    hvd.broadcast_model(model, 0)
    model.fit(*data(hvd), batch_size=BATCH, verbose=0)
    same_everywhere([weight.tolist() for weight in model.get_weights()])


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("make", [gan, trainer])
def test_a_broadcast_over_the_ranks_that_the_optimizers_reduce_over(hvd, make):
    first = hvd.add_process_set([0])
    try:
        if hvd.rank() == 0:
            fit(hvd, make(hvd, process_set=first), [], epochs=1)
    finally:
        hvd.remove_process_set(first)


@pytest.mark.long_with("keras-tensorflow")
def test_a_frozen_model_is_trained_later(hvd):
    """As the discriminator in the combined model of a GAN."""
    model = network(1)
    keras.utils.set_random_seed(hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.trainable = False
    hvd.broadcast_model(model, 0)
    hvd.elastic.KerasState(model).sync()
    model.trainable = True
    model.train_on_batch(*data(hvd))
    same_everywhere([weight.tolist() for weight in model.get_weights()])


def test_a_broadcast_builds_the_optimizer_as_on_a_rank_that_has_trained(hvd):
    model = network(1)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    last = hvd.size() - 1
    if hvd.rank() == last:
        # Of some weights only, as when layers are frozen.
        model.optimizer.build(model.layers[1].trainable_weights)
        model.optimizer.iterations.assign(7)
    hvd.broadcast_model(model, last)
    state = [np.array(keras.ops.convert_to_numpy(v)).tolist() for v in model.optimizer.variables]
    assert len(same_everywhere(state)) == 2 + 2 * 2
    assert int(model.optimizer.iterations) == 7


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("make", [gan, trainer])
def test_a_commit_contains_the_optimizers(hvd, make):
    """The last rank has no commit, as on a host that was lost. It gets the state of rank 0."""
    options = {"compression": "fp16"}
    model = make(hvd, **options)
    state = hvd.elastic.KerasState(model)
    fit(hvd, model, [], epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        state.save()
        commit = Path(folder) / "commit"
        write_commit(state, commit)
        expected = same_everywhere(fit(hvd, model, [], epochs=1))
        restarted = make(hvd, 9, **options)
        restarted_state = hvd.elastic.KerasState(restarted)
        if hvd.rank() < hvd.size() - 1:
            read_commit(restarted_state, commit)
            restarted_state.restore()
    restarted_state.sync()
    assert fit(hvd, restarted, [], epochs=1) == expected
    # In the same process.
    state.restore()
    assert fit(hvd, model, [], epochs=1) == expected


@pytest.mark.long_with("keras-tensorflow")
def test_the_optimizer_of_compile_trains_nothing(hvd):
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1)
    with pytest.raises(UsageError, match="WarmupCallback sets the rate .* as in a GAN: omit"):
        fit(hvd, gan(hvd), [warmup])
    kept = Kept()
    fit(hvd, gan(hvd), [hvd.callbacks.MonitorCallback([kept])], epochs=1)
    if hvd.rank() == 0:
        assert kept.records[0].metrics[metrics.LR].mean == pytest.approx(0.05)
        assert metrics.COMMUNICATION in kept.records[0].metrics


@pytest.mark.long_with("keras-tensorflow")
def test_an_optimizer_that_is_missing_is_named(hvd):
    with shared_folder(hvd) as folder:
        fit(hvd, gan(hvd), [hvd.callbacks.Checkpoint(folder)], epochs=1)
        model = gan(hvd)
        model.others = {}
        with pytest.raises(UsageError, match=r"optimizers \(saved -> here\): others\.g -> nothing"):
            fit(hvd, model, [hvd.callbacks.Checkpoint(folder)])
