"""An optimizer of the user around a wrapped one, such as Lookahead or SWA."""

from pathlib import Path

import keras
import numpy as np
import pytest

from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import LazyModule
from tests.ranks.keras.job import (
    of_every_rank,
    same_everywhere,
)
from tests.ranks.keras.test_checkpoint import Interrupted, interrupt_after

comparisons = LazyModule("hvdkit.keras.fit.comparisons")

BATCH, BATCHES, EPOCHS = 4, 4, 12


class Outer(keras.optimizers.Optimizer):
    """Pass gradients to an optimizer, which is an element of a list, and average the weights."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.1, name="outer")
        self.parts = {"of": [inner]}

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.parts["of"][0].build(variables)
            self.averages = [self.add_variable_from_reference(v, name="average") for v in variables]

    def apply(self, grads, trainable_variables=None):
        variables = list(trainable_variables or self._trainable_variables)
        if not self.built:
            self.build(variables)
        self.parts["of"][0].apply(grads, variables)
        for variable in variables:
            average = self.averages[self._get_variable_index(variable)]
            average.assign(0.9 * average + 0.1 * variable)
        self._iterations.assign_add(1)


class Whole(Outer):
    """An outer optimizer whose variables include those of the inner one."""

    @property
    def variables(self):
        return [*super().variables, *self.parts["of"][0].variables]


def compiled(optimizer, seed=1, **options):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer, loss="mse", **options)
    return model


def batches(rank, size):
    """Return a rank's rows of every global batch."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(BATCHES * BATCH * size, 3)).astype("float32")
    y = x[:, :1] * np.where(np.arange(len(x)) % size, 3, 1)[:, None]
    return x[rank::size], y[rank::size]


def fit(hvd, model, callbacks=(), **options):
    x, y = batches(hvd.rank(), hvd.size())
    settings = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0} | options
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    return model.fit(x, y, callbacks=own, **settings)


def state(model):
    """Return the weights, and the variables of both optimizers."""
    outer = model.optimizer
    outer = getattr(outer, "inner_optimizer", outer)
    variables = [*model.weights, *outer.variables, *outer.parts["of"][0].variables]
    return [keras.ops.convert_to_numpy(v).tobytes().hex() for v in variables]


def plateaus(path):
    return [
        keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.3, min_delta=0.02),
        keras.callbacks.EarlyStopping(patience=2, min_delta=0.02, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True),
    ]


@pytest.mark.parametrize("kind", [Outer, Whole])
def test_fit_is_distributed(hvd, kind):
    comparisons.logged.discard("separate")
    validation = batches(hvd.rank(), hvd.size())
    model = compiled(kind(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))))
    with shared_folder(hvd) as folder, recorded("hvdkit") as log:
        path = f"{folder}/rank{hvd.rank()}.weights.h5"
        history = fit(hvd, model, plateaus(path), validation_data=validation).history
        files = sorted(same_everywhere([f.name for f in Path(folder).iterdir()]))
    assert not [r.getMessage() for r in log if "separate" in r.getMessage()]
    assert files == ["rank0.weights.h5"]
    same_everywhere([history, state(model)])

    whole = compiled(kind(keras.optimizers.Adam(0.05)))
    x, y = batches(0, 1) if hvd.size() == 1 else global_rows(hvd)
    with hvd.local_fit(), shared_folder(hvd) as folder:
        path = f"{folder}/rank{hvd.rank()}.weights.h5"
        expected = whole.fit(
            *(x, y),
            batch_size=BATCH * hvd.size(),
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            validation_data=(x, y),
            callbacks=plateaus(path),
        ).history
    assert set(history) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-3, err_msg=name)


def global_rows(hvd):
    """Return all ranks' rows, in the order of the ranks within each global batch."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(BATCHES * BATCH * hvd.size(), 3)).astype("float32")
    return x, x[:, :1] * np.where(np.arange(len(x)) % hvd.size(), 3, 1)[:, None]


def test_wrapped_twice(hvd):
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
    outer = Outer(inner)
    with pytest.raises(UsageError, match=r"parts\.of\.0 in the Outer is already a Distributed"):
        hvd.DistributedOptimizer(outer, op=hvd.Sum)
    # The inner optimizer is not known when the outer one is wrapped.
    outer.parts = {"of": [keras.optimizers.SGD(0.1)]}
    model = compiled(hvd.DistributedOptimizer(outer, op=hvd.Sum))
    outer.parts["of"][0] = inner
    with pytest.raises(UsageError, match="would be reduced twice"):
        fit(hvd, model, epochs=1)


@pytest.mark.parametrize("is_outer_wrapped", [False, True])
def test_mixed_precision(hvd, is_outer_wrapped):
    """Infinity on one rank skips the step on all ranks."""
    inner = keras.optimizers.Adam(0.05)
    optimizer = (
        hvd.DistributedOptimizer(Outer(inner))
        if is_outer_wrapped
        else Outer(hvd.DistributedOptimizer(inner))
    )
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
    model = compiled(scaled)
    x, y = batches(hvd.rank(), hvd.size())
    if hvd.rank() == hvd.size() - 1:
        x[BATCH] = np.inf
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    same_everywhere(state(model))
    assert int(inner.iterations) == BATCHES - 1


def test_several_wrapped_optimizers_and_mixed_precision(hvd):
    outer = Outer(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    outer.parts["of"].append(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    with pytest.raises(UsageError, match="2 optimizers in the Outer are wrapped"):
        keras.optimizers.LossScaleOptimizer(outer)


@pytest.mark.parametrize("kind", [Outer, Whole])
def test_a_resumed_fit_is_bit_identical(hvd, kind):
    def make(seed):
        adam = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), compression="fp16")
        return compiled(kind(adam), seed)

    model = make(1 + hvd.rank())
    fit(hvd, model, epochs=2)
    expected = same_everywhere(state(model))
    with shared_folder(hvd) as folder:
        checkpoint = hvd.callbacks.Checkpoint(folder, every_steps=1)
        model, callbacks = make(1 + hvd.rank()), [checkpoint, interrupt_after(BATCHES + 2)]
        with pytest.raises(Interrupted):
            fit(hvd, model, callbacks, epochs=2)
        checkpoint._running.manager.close()
        model = make(9)
        fit(hvd, model, [hvd.callbacks.Checkpoint(folder)], epochs=2)
    assert same_everywhere(state(model)) == expected


def test_a_broadcast_includes_the_inner_optimizer(hvd):
    model = compiled(Outer(hvd.DistributedOptimizer(keras.optimizers.Adam())))
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.parts["of"][0].variables:
        variable.assign(np.full(variable.shape, 7 + hvd.rank()))
    hvd.broadcast_model(model, 0)
    assert same_everywhere(state(model)) == of_every_rank(state(model))[0]
    assert int(model.optimizer.parts["of"][0].iterations) == 7


def test_a_warm_up_sets_the_rate_of_the_inner_optimizer(hvd):
    adam = keras.optimizers.Adam(0.01)
    model = compiled(Outer(hvd.DistributedOptimizer(adam)))
    fit(hvd, model, [hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=1)], epochs=1)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(adam.learning_rate), 0.5, rtol=1e-6)
