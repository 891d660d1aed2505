"""`MonitorCallback` on real ranks."""

import time

import numpy as np
import pytest

from hvdkit.errors import UsageError
from hvdkit.monitor import metrics
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras
from tests.ranks.keras.job import (
    skip_without_executions,
)
from tests.unit.monitor.simulated import Kept


def model_of(hvd, together=1, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), **options)
    model.compile(optimizer, loss="mse", metrics=["mae"], steps_per_execution=together)
    return model


def data(hvd, rows=20):
    x = np.random.default_rng(hvd.rank()).normal(size=(rows, 3)).astype("float32")
    return x, x[:, :1]


def test_records_of_fit(hvd):
    kept = Kept()
    x, y = data(hvd)

    class Slow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
            if epoch == 1:
                self.ended = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (0, 7):
                self.began = time.perf_counter()
            if (self.epoch, batch) == (1, 4):
                self.later = time.perf_counter()

        def on_test_batch_end(self, batch, logs=None):
            time.sleep(0.2)
            if self.epoch == 0:
                self.validated = time.perf_counter()

    model = model_of(hvd)
    slow = Slow()
    callback = hvd.callbacks.MonitorCallback([kept], every=4, batch_size=2)
    history = model.fit(
        *(x, y),
        batch_size=2,
        epochs=2,
        validation_data=(x[:4], y[:4]),
        validation_batch_size=2,
        verbose=0,
        callbacks=[slow, callback],
    )
    if hvd.rank() != 0:
        assert not kept.records
        return
    # 10 batches in an epoch, with a record of the epoch at its end.
    assert [(r.step, r.steps) for r in kept.records] == [
        *((4, 4), (8, 4), (10, 2)),
        *((14, 4), (18, 4), (20, 2)),
    ]
    first, epoch = kept.records[1], kept.records[2]
    assert first.samples == 4 * 2 * hvd.size()
    assert first.metrics["loss"].by_rank.keys() == set(range(hvd.size()))
    assert {"mae", metrics.LR, metrics.RSS, metrics.PAYLOAD} <= first.metrics.keys()
    assert epoch.metrics["val_loss"].mean == pytest.approx(history.history["val_loss"][0])
    assert epoch.metrics["loss"].mean == pytest.approx(history.history["loss"][0])
    assert epoch.metrics["epoch"].mean == 1
    for name in (metrics.FORWARD, metrics.BACKWARD, metrics.COMMUNICATION):
        assert first.metrics[name].min >= 0
    assert first.metrics[metrics.COMMUNICATION].max > 0
    # 21 parameters. TensorFlow pads each of the four gradients to 64 bytes.
    payload = {"tensorflow": 4 * 64, "torch": 4 * 21}[keras.backend.backend()]
    assert first.metrics[metrics.PAYLOAD].mean == payload
    # The two steps before the validation of 0.4 s, without the validation.
    spent = slow.ended - slow.began
    assert epoch.metrics[metrics.STEP].by_rank[0] * 2 <= spent - 0.4 + 1e-3
    # The validation of 0.4 s is not part of the four steps after it.
    spent = slow.later - slow.validated
    assert kept.records[3].metrics[metrics.STEP].by_rank[0] * 4 <= spent + 1e-3


def test_only_the_rank_that_reads_slowly_has_data_time(hvd):
    """On PyTorch, which reads a batch outside of the step."""
    if keras.backend.backend() != "torch":
        pytest.skip("TensorFlow reads a batch in the step")
    x, y = data(hvd)

    def batches():
        for _ in range(6):
            time.sleep(0.1 * (hvd.rank() == 1))
            yield x, y

    kept = Kept()
    callbacks = [hvd.callbacks.MonitorCallback([kept], every=6)]
    model_of(hvd).fit(batches(), steps_per_epoch=6, verbose=0, callbacks=callbacks)
    if hvd.rank() == 0:
        seconds = kept.records[0].metrics[metrics.DATA].by_rank
        assert seconds[0] < 0.04 < 0.06 < seconds[1], seconds


@pytest.mark.long_with("keras-tensorflow")
def test_the_learning_rate_of_a_multi_optimizer_is_that_of_its_first_optimizer(hvd):
    choice = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.5), {".*bias": keras.optimizers.SGD(0.25)}
    )
    model = model_of(hvd)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(choice)), loss="mse")
    kept = Kept()
    callback = hvd.callbacks.MonitorCallback([kept])
    model.fit(*data(hvd), batch_size=2, verbose=0, callbacks=[callback])
    if hvd.rank() == 0:
        assert kept.records[0].metrics[metrics.LR].mean == 0.25


@pytest.mark.long_with("keras-tensorflow")
def test_steps_continue_after_a_resume(hvd):
    x, y = data(hvd)
    runs = []
    with shared_folder(hvd) as folder:
        for epochs in (1, 2):
            kept = Kept()
            callbacks = [
                hvd.callbacks.MonitorCallback([kept], every=4),
                hvd.callbacks.Checkpoint(folder),
            ]
            model_of(hvd).fit(x, y, batch_size=2, epochs=epochs, verbose=0, callbacks=callbacks)
            runs.append(kept)
    if hvd.rank() == 0:
        assert [run.step for kept in runs for run in kept.runs] == [0, 10]
        assert [r.step for kept in runs for r in kept.records] == [4, 8, 10, 12, 16, 20, 20]


@pytest.mark.long_with("keras-tensorflow")
def test_a_second_fit_and_a_fit_that_raised(hvd):
    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyError("on all ranks")

    kept = Kept()
    x, y = data(hvd)
    model = model_of(hvd)
    callback = hvd.callbacks.MonitorCallback([kept], every=2)
    with pytest.raises(KeyError):
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[Raises(), callback])
    for _ in range(2):
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[callback])
    if hvd.rank() == 0:
        assert kept.records[-1].step == 25


@pytest.mark.long_with("keras-tensorflow")
def test_accumulation_counts_batches(hvd):
    kept = Kept()
    x, y = data(hvd)
    callback = hvd.callbacks.MonitorCallback([kept], every=5)
    model_of(hvd, accumulation_steps=4).fit(x, y, batch_size=2, verbose=0, callbacks=[callback])
    if hvd.rank() == 0:
        assert [r.step for r in kept.records if r.steps] == [5, 10]


def test_batches_that_are_executed_together(hvd):
    """Of the ten batches of an epoch, the last execution has only two."""
    skip_without_executions()
    kept = Kept()
    callback = hvd.callbacks.MonitorCallback([kept], every=4, batch_size=2)
    options = {"batch_size": 2, "epochs": 2, "verbose": 0, "callbacks": [callback]}
    model_of(hvd, together=4).fit(*data(hvd), **options)
    if hvd.rank() == 0:
        assert [r.step for r in kept.records] == [4, 8, 10, 14, 18, 20]
        assert [r.samples for r in kept.records] == [2 * hvd.size() * n for n in (4, 4, 2) * 2]


def test_one_rank_alone(hvd):
    x, y = data(hvd)
    if hvd.rank() == 0:
        with hvd.local_fit(), pytest.raises(UsageError, match="omit the callback there"):
            model_of(hvd).fit(x, y, verbose=0, callbacks=[hvd.callbacks.MonitorCallback([])])
