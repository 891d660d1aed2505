"""`hvd.callbacks.Checkpoint` on several ranks: interrupt `fit`, resume, compare."""

import functools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras, tf
from tests.ranks.keras.job import (
    distributed,
    of_every_rank,
    same_everywhere,
)

SAMPLES = 50
BATCH = 4
EPOCHS = 3


def values():
    random = np.random.default_rng(5)
    x = random.normal(size=(SAMPLES, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]] > 0.1).astype("float32")


def model_of(optimizer, rank=0, **compiled):
    keras.utils.set_random_seed(17 + rank)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    metrics = ["accuracy", keras.metrics.AUC(name="auc")]
    model.compile(optimizer, loss="binary_crossentropy", metrics=metrics, **compiled)
    return model


def sampled(hvd, **options):
    """Return a sampler, and its data for `fit`."""
    x, y = values()
    sampler = hvd.ResumableSampler(SAMPLES, BATCH, seed=3, **options)
    if keras.backend.backend() == "tensorflow":
        return sampler, sampler.dataset().map(lambda i: (tf.gather(x, i), tf.gather(y, i)))
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return sampler, DataLoader(data, BATCH, sampler=sampler)


class Interrupted(Exception):
    """Raised by a test to interrupt `fit`."""


def interrupt_after(batch):
    class InterruptAfter(keras.callbacks.Callback):
        count = 0

        def on_train_batch_begin(self, _, logs=None):
            self.count += 1
            if self.count > batch:
                raise Interrupted

    return InterruptAfter()


def everything(model):
    """Return the bytes of the weights and the optimizer state on this rank."""
    variables = [*model.weights, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable).tobytes() for variable in variables]


def run(
    hvd,
    folder=None,
    interrupted_after=None,
    make=None,
    callbacks=(),
    epochs=EPOCHS,
    validated=False,
    **options,
):
    """Run `fit`; return its state and logs, or None if it was interrupted.

    Args:
        interrupted_after: interrupt `fit` after this many batches.
    """
    make = make or (lambda: distributed(hvd, 0.1))
    model = model_of(make(), hvd.rank())
    sampler, data = sampled(hvd)
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    if folder is not None:
        own.insert(0, hvd.callbacks.Checkpoint(folder, data=sampler, **options))
    if interrupted_after is not None:
        own.append(interrupt_after(interrupted_after))
    try:
        history = model.fit(
            data,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=own,
            validation_data=values() if validated else None,
        )
    except Interrupted:
        own[0]._running.manager.close()
        return None
    return everything(model), history.history


# How often `fit` saves, and the number of batches after which it is interrupted.
@pytest.mark.parametrize(
    ("every", "after"),
    [
        pytest.param({"every_steps": 2}, 5, id="in the middle"),
        pytest.param({"every_epochs": 1}, 9, id="between epochs", marks=pytest.mark.long),
        pytest.param({"every_steps": 3}, 2, id="before the first", marks=pytest.mark.long),
    ],
)
def test_a_resumed_fit_is_bit_identical(hvd, every, after):
    with shared_folder(hvd) as folder:
        assert run(hvd, folder, interrupted_after=after, **every) is None
        resumed = run(hvd, folder, **every)
    assert resumed == uninterrupted(hvd)


@functools.cache
def uninterrupted(hvd):
    return run(hvd)


def loss_scaling(hvd):
    inner = keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9, clipnorm=1.0)
    return keras.optimizers.LossScaleOptimizer(
        distributed_of(hvd, inner), initial_scale=2.0**40, dynamic_growth_steps=3
    )


def float16_wire_and_accumulation(hvd):
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 20))
    return distributed_of(hvd, optimizer, compression="fp16", accumulation_steps=3)


def distributed_of(hvd, optimizer, **options):
    return hvd.DistributedOptimizer(optimizer, bucket_bytes=150, **options)


# One test each: with four ranks on two cores, tracing three fits takes a minute.
@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("make_optimizer", [loss_scaling, float16_wire_and_accumulation])
def test_optimizer_states_resume(hvd, make_optimizer):
    make = functools.partial(make_optimizer, hvd)
    with shared_folder(hvd) as folder:
        assert run(hvd, folder, interrupted_after=6, make=make, every_steps=1) is None
        resumed = run(hvd, folder, make=make)
    assert resumed == run(hvd, make=make)


@pytest.mark.long_with("keras-tensorflow")
def test_a_save_due_in_an_accumulation_window_waits_for_its_end(hvd):
    def make():
        return distributed(hvd, 0.1, accumulation_steps=3)

    with shared_folder(hvd) as folder:
        run(hvd, folder, interrupted_after=6, make=make, every_steps=2, keep_last=None)
        found = same_everywhere([info.step for info in Store(folder).steps()])
    # Saves are due after 2 and 4 batches. With four ranks, the first epoch, and so a window, ends
    # after 4 batches.
    assert found[:2] == ([3, 4] if hvd.size() == 4 else [3, 6])


@pytest.mark.long_with("keras-tensorflow")
def test_states_of_other_callbacks_resume(hvd):
    class Sums(keras.callbacks.Callback):
        total = 0.0

        def on_train_batch_end(self, batch, logs=None):
            self.total += float(logs["loss"])

        def state_dict(self):
            return {"total": self.total}

        def load_state_dict(self, state):
            self.total = state["total"]

    def make():
        return [
            keras.callbacks.EarlyStopping(
                "val_loss", patience=2, min_delta=10, restore_best_weights=True
            ),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10),
            Sums(),
        ]

    with shared_folder(hvd) as folder:
        broken, kept = make(), {"epochs": 9, "validated": True}
        assert run(hvd, folder, 9, callbacks=broken, every_steps=2, **kept) is None
        resumed, whole, again = make(), make(), make()
        content, logs = run(hvd, folder, callbacks=resumed, **kept)
        # After an early stop, a further `fit` does not train.
        same = run(hvd, folder, callbacks=again, **kept) == (content, logs)
        expected, expected_logs = run(hvd, callbacks=whole, **kept)
    assert logs == expected_logs
    assert len(logs["loss"]) == 3
    waits = [[c.__dict__.get("wait") for c in each] for each in (resumed, whole, again)]
    assert waits[0] == waits[1] == waits[2]
    # Callbacks of other ranks get the state of the first rank: its sum, and its moving statistics
    # in the best weights.
    if hvd.rank() == 0:
        assert same
        assert content == expected
        assert resumed[-1].total == whole[-1].total == again[-1].total


@pytest.mark.long_with("keras-tensorflow")
def test_data_without_a_sampler_are_read_up_to_the_position(hvd):
    x, y = values()

    def fit(folder=None, interrupted_after=None):
        model = model_of(distributed(hvd, 0.1), hvd.rank())
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if folder is not None:
            callbacks.append(hvd.callbacks.Checkpoint(folder, every_steps=1))
        if interrupted_after is not None:
            callbacks.append(interrupt_after(interrupted_after))
        # Keras's shuffle on PyTorch uses random states that are saved; on TensorFlow it does not.
        shuffle = keras.backend.backend() == "torch"
        try:
            history = model.fit(
                *(x, y), batch_size=BATCH, epochs=2, shuffle=shuffle, verbose=0, callbacks=callbacks
            )
        except Interrupted:
            callbacks[1]._running.manager.close()
            return None
        return everything(model), history.history

    with shared_folder(hvd) as folder:
        assert fit(folder, interrupted_after=17) is None
        resumed = fit(folder)
    assert resumed == fit()


@pytest.mark.long_with("keras-tensorflow")
def test_a_sampler_that_is_not_passed_to_the_callback_raises(hvd):
    model = model_of(distributed(hvd), 1)
    _, data = sampled(hvd)
    with shared_folder(hvd) as folder, pytest.raises(UsageError, match="data=sampler"):
        model.fit(data, shuffle=False, verbose=0, callbacks=[hvd.callbacks.Checkpoint(folder)])


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.long_with("keras-tensorflow")
def test_without_a_checkpoint_fit_counts_the_epochs_of_a_sampler(hvd, reduced):
    model = model_of(distributed(hvd) if reduced else keras.optimizers.SGD(), 1)
    sampler, data = sampled(hvd)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    assert sampler.epoch == 2


@pytest.mark.long_with("keras-tensorflow")
def test_a_checkpoint_of_separate_models_raises(hvd):
    model = model_of(keras.optimizers.SGD(), 1)
    with shared_folder(hvd) as folder, pytest.raises(UsageError, match="would train a separate"):
        model.fit(*values(), verbose=0, callbacks=[hvd.callbacks.Checkpoint(folder)])


# Batch 0: before the first call of `maybe_save`.
@pytest.mark.parametrize("asked_in", [0, 2])
@pytest.mark.long_with("keras-tensorflow")
def test_a_signal_to_one_rank_saves_and_exits_with_status_75(hvd, asked_in):
    class Asks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == asked_in and hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)

    with shared_folder(hvd) as folder:
        model = model_of(distributed(hvd), 1)
        sampler, data = sampled(hvd)
        callback = hvd.callbacks.Checkpoint(folder, data=sampler)
        with pytest.raises(hvd.Stopped) as stopped:
            model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[Asks(), callback])
        assert stopped.value.code == hvd.RESUMABLE == 75
        assert same_everywhere(callback.step) == asked_in + 1
        assert [p.name for p in Path(folder).glob("step-*")] == [f"step-{callback.step:012d}"]


def test_a_checkpointer_of_another_model_beside_the_callback_is_refused(hvd):
    from hvdkit.keras.backend import hvd as adapter

    with shared_folder(hvd) as folder:
        model = model_of(distributed(hvd), 1)
        other = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        callback = hvd.callbacks.Checkpoint(Path(folder) / "fit")
        with (
            adapter.Checkpointer(Path(folder) / "other", model=other),
            pytest.raises(UsageError, match="an attribute of the model"),
        ):
            model.fit(*values(), verbose=0, callbacks=[callback])


@pytest.mark.long_with("keras-tensorflow")
def test_a_checkpoint_of_another_model_raises_on_every_rank(hvd):
    with shared_folder(hvd) as folder:
        run(hvd, folder, epochs=1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(distributed(hvd), loss="mse")
        x, y = values()
        with pytest.raises(UsageError, match=r"does not fit the model \(saved -> here\)") as error:
            model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.Checkpoint(folder)])
        same_everywhere(str(error.value).splitlines()[0])


@pytest.mark.long_with("keras-tensorflow")
def test_local_layers_are_restored_on_their_rank(hvd):
    def fit(folder, epochs, resume=True):
        model = model_of("sgd", hvd.rank())
        optimizer = keras.optimizers.Adam(0.05)
        optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers[0])
        model.compile(optimizer, loss="binary_crossentropy")
        sampler, data = sampled(hvd)
        checkpoint = hvd.callbacks.Checkpoint(folder, data=sampler, resume=resume)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), checkpoint]
        model.fit(data, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
        return everything(model)

    with shared_folder(hvd) as folder, shared_folder(hvd) as other:
        fit(folder, 1)
        resumed = fit(folder, 2)
        assert resumed == fit(other, 2)
        # The local layers differ.
        assert len({str(each[0]) for each in gathered(resumed)}) == hvd.size()


def gathered(content):
    return of_every_rank([each.hex() for each in content])


def test_checkpointer_of_pytorch_with_other_numbers_of_layers(hvd):
    """Keras counts layers over all models of a process: "dense_10" comes before "dense_9"."""
    if keras.backend.backend() != "torch":
        pytest.skip("PyTorch saves only models of its own backend")
    import torch

    import hvdkit.torch as adapter

    def model(layers_before, value):
        keras.backend.clear_session()
        for _ in range(layers_before):
            keras.layers.Dense(1)
        layers = [keras.layers.Dense(units) for units in (4, 4, 2)]
        made = keras.Sequential([keras.Input((3,)), *layers])
        made.set_weights([np.full_like(w, value + k) for k, w in enumerate(made.get_weights())])
        return made, torch.optim.SGD([v.value for v in made.trainable_variables], 0.1)

    with shared_folder(hvd) as folder:
        # Rank 0 has dense_9, dense_10 and dense_11.
        saved, optimizer = model(9 - hvd.rank(), 1.0)
        with adapter.Checkpointer(folder, model=saved, optimizer=optimizer) as checkpointer:
            checkpointer.save(1)
        fresh, optimizer = model(3 * hvd.rank(), 0.0)
        with adapter.Checkpointer(folder, model=fresh, optimizer=optimizer) as checkpointer:
            assert checkpointer.restore().step == 1
    for own, expected in zip(fresh.get_weights(), saved.get_weights(), strict=True):
        assert own.tolist() == expected.tolist()


def test_a_loop_of_pytorch_with_a_keras_model(hvd):
    """Each rank has its own dropout masks and moving statistics, also after a restore."""
    if keras.backend.backend() != "torch":
        pytest.skip("PyTorch trains only models of its own backend")
    import torch

    import hvdkit.torch as adapter

    x, y = (torch.from_numpy(array) for array in hvd.shard(values()))

    def training():
        keras.backend.clear_session()  # layers get the same names on all ranks
        model = model_of("sgd", hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = adapter.DistributedOptimizer(optimizer, model.named_parameters())
        adapter.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, optimizer

    def train(model, optimizer):
        for _ in range(12):
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy(model(x, training=True), y).backward()
            optimizer.step()

    def contents(model, trainable):
        return [
            keras.ops.convert_to_numpy(v.value).tolist()
            for v in model.variables
            if v.trainable == trainable
        ]

    model, optimizer = training()
    train(model, optimizer)
    with shared_folder(hvd) as folder:
        with adapter.Checkpointer(folder, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.save(12)
        own = contents(model, trainable=False)
        for others in zip(*of_every_rank(own), strict=True):
            assert len({str(each) for each in others}) == hvd.size()
        train(model, optimizer)
        expected = contents(model, trainable=True)
        same_everywhere(expected)
        fresh, optimizer = training()
        with adapter.Checkpointer(folder, model=fresh, optimizer=optimizer) as checkpointer:
            assert checkpointer.restore().step == 12
    assert contents(fresh, trainable=False) == own
    train(fresh, optimizer)
    assert contents(fresh, trainable=True) == expected
