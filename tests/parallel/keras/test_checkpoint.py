"""`fit` that is broken off and goes on: as if nothing had been, on all ranks."""

import functools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.parallel.keras.job import common_folder, distributed, of_every_rank, same_everywhere
from tests.parallel.rank_pool import REPOSITORY
from tests.parallel.torch.test_digits import run_plain

SAMPLES = 50
BATCH = 4
EPOCHS = 3


def values():
    random = np.random.default_rng(5)
    x = random.normal(size=(SAMPLES, 3)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5]] > 0.1).astype("float32")


def model_of(optimizer, rank=0, **compiled):
    import keras

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
    """A sampler, and the data that `fit` gets of it."""
    import keras

    x, y = values()
    sampler = hvd.ResumableSampler(SAMPLES, BATCH, seed=3, **options)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return sampler, sampler.dataset().map(lambda i: (tf.gather(x, i), tf.gather(y, i)))
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return sampler, DataLoader(data, BATCH, sampler=sampler)


class Broken(Exception):
    """Raised by a test to interrupt `fit`."""


def breaking(batch):
    import keras

    class Breaks(keras.callbacks.Callback):
        count = 0

        def on_train_batch_begin(self, _, logs=None):
            self.count += 1
            if self.count > batch:
                raise Broken

    return Breaks()


def everything(model):
    """The bytes of what has been trained on this rank."""
    import keras

    variables = [*model.weights, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable).tobytes() for variable in variables]


def run(
    hvd,
    folder=None,
    broken_after=None,
    make=None,
    callbacks=(),
    epochs=EPOCHS,
    validated=False,
    **options,
):
    """A whole fit, or one that is broken off after so many batches."""
    make = make or (lambda: distributed(hvd, 0.1))
    model = model_of(make(), hvd.rank())
    sampler, data = sampled(hvd)
    own = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    if folder is not None:
        own.insert(0, hvd.callbacks.Checkpoint(folder, data=sampler, **options))
    if broken_after is not None:
        own.append(breaking(broken_after))
    try:
        history = model.fit(
            data,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=own,
            validation_data=values() if validated else None,
        )
    except Broken:
        own[0]._manager.close()
        return None
    return everything(model), history.history


# Fit, broken off after the batches that it may have been saved after, and on again.
@pytest.mark.parametrize(
    ("every", "after"),
    [({"every_steps": 2}, 5), ({"every_epochs": 1}, 9), ({"every_steps": 3}, 2)],
    ids=["in the middle", "between epochs", "before the first"],
)
def test_a_fit_that_goes_on_ends_with_the_same_bytes_and_logs(hvd, every, after):
    with common_folder(hvd) as folder:
        assert run(hvd, folder, broken_after=after, **every) is None
        resumed = run(hvd, folder, **every)
    assert resumed == never_broken_off(hvd)


@functools.cache
def never_broken_off(hvd):
    return run(hvd)


def with_scaled_loss(hvd):
    import keras

    inner = keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9, clipnorm=1.0)
    return keras.optimizers.LossScaleOptimizer(
        distributed_of(hvd, inner), initial_scale=2.0**40, dynamic_growth_steps=3
    )


def in_16_bits(hvd):
    import keras

    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 20))
    return distributed_of(hvd, optimizer, compression="fp16", accumulation_steps=3)


def distributed_of(hvd, optimizer, **options):
    return hvd.DistributedOptimizer(optimizer, bucket_bytes=150, **options)


# One test each: with four ranks on two cores, tracing three fits takes a minute.
@pytest.mark.parametrize("make_optimizer", [with_scaled_loss, in_16_bits])
def test_state_beside_the_weights_resumes(hvd, make_optimizer):
    make = functools.partial(make_optimizer, hvd)
    with common_folder(hvd) as folder:
        assert run(hvd, folder, broken_after=6, make=make, every_steps=1) is None
        resumed = run(hvd, folder, make=make)
    assert resumed == run(hvd, make=make)


def test_in_a_window_what_is_due_waits_for_its_end(hvd):
    from hvdkit.checkpoint.store import Store

    def make():
        return distributed(hvd, 0.1, accumulation_steps=3)

    with common_folder(hvd) as folder:
        run(hvd, folder, broken_after=6, make=make, every_steps=2, keep_last=None)
        found = same_everywhere([info.step for info in Store(folder).steps()])
    # Due after 2 and 4: with four ranks the first epoch, and a window with it, ends there.
    assert found[:2] == ([3, 4] if hvd.size() == 4 else [3, 6])


def test_other_callbacks_go_on_counting(hvd):
    import keras

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

    with common_folder(hvd) as folder:
        broken, kept = make(), {"epochs": 9, "validated": True}
        assert run(hvd, folder, 9, callbacks=broken, every_steps=2, **kept) is None
        resumed, whole, again = make(), make(), make()
        content, logs = run(hvd, folder, callbacks=resumed, **kept)
        # Nobody trains on after an early stop, however often it is started.
        same = run(hvd, folder, callbacks=again, **kept) == (content, logs)
        expected, expected_logs = run(hvd, callbacks=whole, **kept)
    assert logs == expected_logs
    assert len(logs["loss"]) == 3
    waits = [[c.__dict__.get("wait") for c in each] for each in (resumed, whole, again)]
    assert waits[0] == waits[1] == waits[2]
    # The callback of the other ranks gets the state of the first rank: its sum, and its
    # statistics in the best weights.
    if hvd.rank() == 0:
        assert same
        assert content == expected
        assert resumed[-1].total == whole[-1].total == again[-1].total


def test_data_of_fits_own_are_read_again_up_to_that_place(hvd):
    import keras

    x, y = values()

    def fit(folder=None, broken_after=None):
        model = model_of(distributed(hvd, 0.1), hvd.rank())
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        if folder is not None:
            callbacks.append(hvd.callbacks.Checkpoint(folder, every_steps=1))
        if broken_after is not None:
            callbacks.append(breaking(broken_after))
        # Keras shuffles on PyTorch with random numbers that are kept, on TensorFlow it does not.
        shuffle = keras.backend.backend() == "torch"
        try:
            history = model.fit(
                *(x, y), batch_size=BATCH, epochs=2, shuffle=shuffle, verbose=0, callbacks=callbacks
            )
        except Broken:
            callbacks[1]._manager.close()
            return None
        return everything(model), history.history

    with common_folder(hvd) as folder:
        assert fit(folder, broken_after=17) is None
        resumed = fit(folder)
    assert resumed == fit()


def test_a_sampler_that_the_callback_is_not_told_of_is_an_error(hvd):
    from hvdkit.errors import UsageError

    model = model_of(distributed(hvd), 1)
    _, data = sampled(hvd)
    with common_folder(hvd) as folder, pytest.raises(UsageError, match="data=sampler"):
        model.fit(data, shuffle=False, verbose=0, callbacks=[hvd.callbacks.Checkpoint(folder)])


def test_without_a_checkpoint_every_epoch_has_an_order_of_its_own(hvd):
    model = model_of(distributed(hvd), 1)
    sampler, data = sampled(hvd)
    model.fit(data, epochs=2, shuffle=False, verbose=0)
    assert sampler.epoch == 2


def test_a_signal_to_one_rank_saves_and_ends_all_with_status_75(hvd):
    import keras

    class Asks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)

    before = signal.getsignal(signal.SIGTERM)
    with common_folder(hvd) as folder:
        model = model_of(distributed(hvd), 1)
        sampler, data = sampled(hvd)
        callback = hvd.callbacks.Checkpoint(folder, data=sampler)
        with pytest.raises(hvd.Stopped) as stopped:
            model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[Asks(), callback])
        assert stopped.value.code == hvd.RESUMABLE == 75
        assert same_everywhere(callback.step) in (3, 4)
        assert [p.name for p in Path(folder).glob("step-*")] == [f"step-{callback.step:012d}"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_checkpoint_of_another_model_is_refused_everywhere(hvd):
    import keras

    from hvdkit.errors import UsageError

    with common_folder(hvd) as folder:
        run(hvd, folder, epochs=1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(distributed(hvd), loss="mse")
        x, y = values()
        with pytest.raises(UsageError, match=r"does not fit the model \(saved -> here\)") as error:
            model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.Checkpoint(folder)])
        same_everywhere(str(error.value).splitlines()[0])


def test_half_of_the_ranks_go_on_with_the_rest_of_the_epoch(hvd):
    import keras

    class Numbers(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_begin(self, batch, logs=None):
            self.seen.append(batch)

    with common_folder(hvd) as folder:
        assert run(hvd, folder, broken_after=3, every_steps=1) is None
        half = hvd.add_process_set(range(hvd.size() // 2))
        try:
            if half.included():
                numbers = Numbers()
                model = model_of(distributed(hvd, 0.1, process_set=half), hvd.rank())
                sampler, data = sampled(hvd, process_set=half)
                checkpoint = hvd.callbacks.Checkpoint(folder, data=sampler)
                model.fit(
                    *(data,), epochs=2, shuffle=False, verbose=0, callbacks=[checkpoint, numbers]
                )
                left = -(-(SAMPLES - 3 * BATCH * hvd.size()) // (half.size() * BATCH))
                whole = sampler.batches_per_epoch
                assert numbers.seen == [*range(whole - left, whole), *range(whole)]
                assert checkpoint.step == 3 + left + whole
            of_every_rank("done")
        finally:
            hvd.remove_process_set(half)


def test_moving_statistics_come_back(hvd):
    with common_folder(hvd) as folder:
        model = model_of(distributed(hvd, 0.1), 1)
        sampler, data = sampled(hvd)
        checkpoint = hvd.callbacks.Checkpoint(folder, data=sampler)
        model.fit(data, epochs=1, shuffle=False, verbose=0, callbacks=[checkpoint])
        means = model.layers[1].moving_mean
        import keras

        before = keras.ops.convert_to_numpy(means).tolist()
        assert same_everywhere(before) != [0.0] * len(before)
        other = model_of(distributed(hvd, 0.1), hvd.rank())
        sampler, data = sampled(hvd)
        checkpoint = hvd.callbacks.Checkpoint(folder, data=sampler)
        other.fit(data, epochs=1, shuffle=False, verbose=0, callbacks=[checkpoint])
        assert keras.ops.convert_to_numpy(other.layers[1].moving_mean).tolist() == before


def test_layers_that_each_rank_has_for_itself_come_back_to_it(hvd):
    import keras

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

    with common_folder(hvd) as folder, common_folder(hvd) as other:
        fit(folder, 1)
        resumed = fit(folder, 2)
        assert resumed == fit(other, 2)
        # Really its own.
        assert len({str(each[0]) for each in gathered(resumed)}) == hvd.size()


def gathered(content):
    return of_every_rank([each.hex() for each in content])


@pytest.mark.parametrize(
    ("framework", "wire", "ranks", "kills"),
    [
        ("keras", "fp16", 2, 1),
        pytest.param("keras", "fp16", 4, 25, marks=pytest.mark.long),
        pytest.param("keras-torch", "fp32", 2, 25, marks=pytest.mark.long),
    ],
)
def test_a_job_killed_at_random_moments_ends_as_one_never_stopped(framework, wire, ranks, kills):
    done = run_plain(
        *(sys.executable, str(REPOSITORY / "scripts" / "chaos_checkpoint")),
        *("--framework", framework, "--wire", wire, "--ranks", str(ranks)),
        *("--kills", str(kills)),
        timeout=120 + 60 * kills,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"the same bytes after {kills} kills as without any" in done.stdout
