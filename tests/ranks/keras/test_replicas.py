"""Variables that change on one rank only are found in `fit`."""

import contextlib
import os
import re

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.agreement.replicas import FOLDER
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras
from tests.ranks.keras import oracle
from tests.ranks.keras.job import (
    skip_without_executions,
)
from tests.ranks.keras.test_uses import same_everywhere, weights_of


def model_of(hvd, local=False, use_ema=False, together=1, **options):
    keras.utils.set_random_seed(1)
    first, last = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((3,)), first, last])
    optimizer = keras.optimizers.Adam(0.01, use_ema=use_ema)
    if local:
        optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=first, **options)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
    model.compile(optimizer, loss="mse", steps_per_execution=together)
    return model


def fit(hvd, model, change=lambda batch: None, batches=8, rank=-1, callbacks=()):
    """Train, and call `change(batch)` before each batch on one rank."""

    class Change(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if hvd.rank() == rank % hvd.size():
                change(batch)

    x = np.random.default_rng(hvd.rank()).normal(size=(batches * 4, 3)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0, callbacks=[Change(), *callbacks])


def times_two(variable):
    variable.assign(variable * 2)


@pytest.mark.parametrize("kind", ["weight", "slot", "learning rate"])
@pytest.mark.long_with("keras-tensorflow")
def test_a_changed_variable_is_named(hvd, tmp_path, kind):
    model = model_of(hvd, check_interval=3)

    def change(batch):
        if batch == 1:
            times_two(
                {
                    "weight": model.layers[1].kernel,
                    "slot": model.optimizer.variables[3],
                    "learning rate": model.optimizer._learning_rate,
                }[kind]
            )

    name = {
        "weight": r"dense[_0-9]*/kernel' on",
        "slot": r"dense[_0-9]*_kernel_velocity' on",
        "learning rate": r"after step 3: '\w+/learning_rate' on",
    }
    with contextlib.chdir(tmp_path), pytest.raises(RankMismatchError) as caught:
        fit(hvd, model, change)
    assert "after step 3: " in str(caught.value)
    assert ("different options" in str(caught.value)) == (kind == "learning rate")
    assert re.search(name[kind], str(caught.value))
    assert f"on rank {hvd.size() - 1} (host " in str(caught.value)
    saves = hvd.rank() in (0, hvd.size() - 1)
    assert (tmp_path / FOLDER / f"step-3-rank-{hvd.rank()}.npz").exists() == saves


@pytest.mark.long_with("keras-tensorflow")
def test_an_optimizer_state_that_was_not_broadcast(hvd):
    model = model_of(hvd)
    model.optimizer.build(model.trainable_variables)
    if hvd.rank() == 1:
        times_two(model.optimizer._learning_rate)
    match = r"at the first comparison: '\w+/learning_rate' on rank 1"
    with pytest.raises(RankMismatchError, match=match):
        fit(hvd, model, batches=2)


@pytest.mark.long_with("keras-tensorflow")
def test_ranks_are_compared_at_the_end_of_fit(hvd, tmp_path):
    """The last comparison was after step 20, and the next one would be after step 40."""
    model = model_of(hvd)

    def change(batch):
        if batch == 25:
            times_two(model.layers[1].kernel)

    with contextlib.chdir(tmp_path), pytest.raises(RankMismatchError, match="after step 35: "):
        fit(hvd, model, change, batches=35)


@pytest.mark.long_with("keras-tensorflow")
def test_a_callback_of_one_rank_that_changes_weights_at_the_end(hvd, tmp_path):
    """The comparison is after `on_train_end`, also in a `fit` of a few batches."""

    class Double(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights([2 * weight for weight in self.model.get_weights()])

    model = model_of(hvd)
    function = keras.callbacks.LambdaCallback(
        on_train_end=lambda _: model.set_weights([2 * weight for weight in model.get_weights()])
    )
    for callback in (Double(), function):
        own = [callback] if hvd.rank() == 0 else []
        with contextlib.chdir(tmp_path), pytest.raises(RankMismatchError) as caught:
            fit(hvd, model, batches=3, callbacks=own)
        name = type(callback).__name__
        assert f"on_train_end differ between ranks (rank 0: {name}; rank" in str(caught.value)
        model = model_of(hvd)
    # On all ranks, it is right.
    model = model_of(hvd)
    fit(hvd, model, batches=3, callbacks=[Double()])
    same_everywhere(weights_of(model))


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize(
    "kind", ["EarlyStopping", "SwapEMAWeights", "LearningRateScheduler", "ReduceLROnPlateau"]
)
def test_a_callback_that_changes_the_model_must_be_on_every_rank(hvd, kind):
    callback = {
        "EarlyStopping": lambda: keras.callbacks.EarlyStopping(
            "loss", patience=0, restore_best_weights=True
        ),
        "SwapEMAWeights": keras.callbacks.SwapEMAWeights,
        "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(lambda _: 0.1),
        "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=0),
    }[kind]()
    model = model_of(hvd, use_ema=kind == "SwapEMAWeights")
    before = weights_of(model)
    text = rf"different callbacks \(rank 0: {kind}; ranks? .*: none\)"
    with pytest.raises(UsageError, match=text):
        fit(hvd, model, batches=3, callbacks=[callback] if hvd.rank() == 0 else [])
    assert weights_of(model) == before
    fit(hvd, model, batches=3, callbacks=[callback])
    same_everywhere(weights_of(model))


@pytest.mark.long_with("keras-tensorflow")
def test_early_stopping_of_one_rank_stops_all_ranks(hvd):
    """Without `restore_best_weights`, it changes nothing on its rank."""
    stopping = keras.callbacks.EarlyStopping("loss", patience=0, baseline=0.0)
    model = model_of(hvd)
    fit(hvd, model, batches=3, callbacks=[stopping] if hvd.rank() == 0 else [])
    same_everywhere(weights_of(model))


@pytest.mark.long_with("keras-tensorflow")
def test_the_majority_repairs(hvd, tmp_path):
    model = model_of(hvd, check_interval=2, on_mismatch="repair")

    def change(batch):
        if batch == 2:
            times_two(model.layers[0].kernel)

    with contextlib.chdir(tmp_path), recorded("hvdkit") as log:
        if hvd.size() == 2:
            with pytest.raises(RankMismatchError, match="No majority of ranks agrees"):
                fit(hvd, model, change, rank=0)
            return
        fit(hvd, model, change, rank=0)
    assert any("were copied" in each.getMessage() for each in log) == (hvd.rank() == 0)
    same_everywhere(weights_of(model))
    same_everywhere([np.array(v).tolist() for v in model.optimizer.variables])


@pytest.mark.long_with("keras-tensorflow")
def test_batches_of_several_fits_are_counted(hvd, tmp_path):
    model = model_of(hvd, check_interval=10)
    for _ in range(4):
        fit(hvd, model, batches=2)
    with (
        contextlib.chdir(tmp_path),
        pytest.raises(RankMismatchError, match="after step 10: "),
    ):
        fit(hvd, model, lambda batch: batch and times_two(model.layers[0].kernel), batches=4)


def test_batches_that_are_executed_together_are_counted(hvd, tmp_path):
    """Of the ten batches, the last execution has only two."""
    skip_without_executions()
    model = model_of(hvd, check_interval=10, together=4)

    def change(batch):
        if batch == 8:
            times_two(model.layers[0].kernel)

    with (
        contextlib.chdir(tmp_path),
        pytest.raises(RankMismatchError, match="after step 10: "),
    ):
        fit(hvd, model, change, batches=10)


@pytest.mark.long_with("keras-tensorflow")
def test_ranks_that_number_layers_differently(hvd, tmp_path):
    """A rank may have made other models before."""
    if hvd.rank() == 1:
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model = model_of(hvd, check_interval=1)
    with contextlib.chdir(tmp_path):
        fit(hvd, model)
        with pytest.raises(RankMismatchError, match="kernel' on rank"):
            fit(hvd, model, lambda batch: batch and times_two(model.layers[0].kernel))


@pytest.mark.long_with("keras-tensorflow")
def test_an_option_of_the_optimizer_on_one_rank(hvd):
    model = model_of(hvd, check_interval=3, use_ema=hvd.rank() == 0)
    # hvdkit.keras has no `broadcast_optimizer_state`.
    advice = r"the same options on all ranks. .* \(hvd.broadcast_optimizer_state of PyTorch\)\.$"
    with pytest.raises(RankMismatchError, match=advice):
        fit(hvd, model)


@pytest.mark.long_with("keras-tensorflow")
def test_a_backup_is_kept_if_ranks_differ_at_the_end(hvd, tmp_path):
    """`BackupAndRestore` deletes its files in `on_train_end`."""
    model = model_of(hvd)
    with shared_folder(hvd) as folder:
        with contextlib.chdir(tmp_path), pytest.raises(RankMismatchError, match="after step 3: "):
            fit(
                hvd,
                model,
                lambda batch: times_two(model.layers[1].kernel) if batch == 2 else None,
                batches=3,
                callbacks=[keras.callbacks.BackupAndRestore(f"{folder}/backup", save_freq=1)],
            )
        assert same_everywhere(os.path.exists(f"{folder}/backup"))


def test_a_fit_without_an_epoch_compares_nothing(hvd):
    """As after a resume of a complete training, where only rank 0 may have loaded an optimizer."""
    model = model_of(hvd)
    if hvd.rank() == 0:
        model.optimizer.build(model.trainable_variables)
    x = np.ones((4, 3))
    model.fit(x, x[:, :1], initial_epoch=2, epochs=2, verbose=0)


@pytest.mark.long_with("keras-tensorflow")
def test_local_layers_differ(hvd):
    model = model_of(hvd, local=True, check_interval=1)
    fit(hvd, model)


@pytest.mark.long_with("keras-tensorflow")
def test_local_layers_of_several_optimizers(hvd):
    """Their slots differ between ranks, and each rank saves its own."""

    def fitted(folder):
        inside = keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.Adam(0.01)
        choice = keras.optimizers.OptimizerMap(inside[0], {".*bias": inside[1]})
        model = model_of(hvd)
        optimizer = keras.optimizers.MultiOptimizer(choice)
        model.compile(
            hvd.PartialDistributedOptimizer(
                optimizer, local_layers=model.layers[0], check_interval=1
            ),
            loss="mse",
        )
        fit(hvd, model, batches=2, callbacks=[hvd.callbacks.Checkpoint(folder)])
        return [np.array(keras.ops.convert_to_numpy(v)) for v in model.optimizer.variables]

    with shared_folder(hvd) as folder:
        trained = fitted(folder)
        # The next job restores the state, and has no batch left to train.
        restored = fitted(folder)
    for one, other in zip(trained, restored, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not oracle.same_everywhere(hvd, trained)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_ranks_that_differ_are_not_saved(hvd, tmp_path, rank):
    with shared_folder(hvd) as folder, contextlib.chdir(tmp_path):
        model = model_of(hvd)
        saves = hvd.callbacks.Checkpoint(folder, every_steps=2)
        change = {3: lambda: times_two(model.layers[0].kernel)}
        with pytest.raises(RankMismatchError) as caught:
            fit(hvd, model, lambda batch: change.get(batch, int)(), rank=rank, callbacks=[saves])
        assert "after step 4: " in str(caught.value)
        assert str(caught.value).endswith("Step 4 was not saved.")
        assert [info.step for info in Store(folder).steps()] == [2]
        saves = hvd.callbacks.Checkpoint(folder, every_steps=2)
        fit(hvd, model_of(hvd), callbacks=[saves])
        assert saves.step == 8


@pytest.mark.long_with("keras-tensorflow")
def test_local_layers_are_saved(hvd, tmp_path):
    with shared_folder(hvd) as folder:
        fit(hvd, model_of(hvd, local=True), callbacks=[hvd.callbacks.Checkpoint(folder)], batches=2)
