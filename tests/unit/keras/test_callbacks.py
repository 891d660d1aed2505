"""Horovod's callbacks on one rank: learning rates and errors."""

import numpy as np
import pytest


def model_of(optimizer):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    return model


def fit(model, epochs, *callbacks, **options):
    x = np.ones((8, 1), "float32")
    options = {"batch_size": 2} | options
    return model.fit(x, x, epochs=epochs, verbose=0, callbacks=list(callbacks), **options).history


@pytest.mark.long_with("keras-tensorflow")
def test_staircase_sets_the_rate_once_per_epoch(hvd):
    import keras

    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, 0.5, start_epoch=1, end_epoch=3, momentum_correction=False
    )
    later = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.01, start_epoch=3)
    history = fit(model_of(keras.optimizers.Adam(0.1)), 5, schedule, later)
    assert history["lr"] == pytest.approx([0.1, 0.1, 0.05, 0.001, 0.001])


def test_without_staircase_the_rate_is_set_before_every_batch(hvd):
    import keras

    seen = []

    def multiplier(epoch):
        seen.append(epoch)
        return 1.0

    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier, staircase=False)
    fit(model_of(keras.optimizers.SGD(0.1)), 2, callback)
    assert seen == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


def test_a_schedule_counts_the_batches_of_each_fit(hvd):
    import keras

    seen = []

    def multiplier(epoch):
        seen.append(epoch)
        return 1.0

    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, multiplier, staircase=False)
    model = model_of(keras.optimizers.SGD(0.1))
    for samples in (8, 4):
        data = np.ones((samples, 1), "float32")
        model.fit(data, data, batch_size=2, callbacks=[callback], verbose=0)
    assert seen == [0, 0.25, 0.5, 0.75, 0, 0.5]


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adam"])
def test_momentum_correction_scales_velocities(hvd, name):
    import keras

    options = {} if name == "Adam" else {"momentum": 0.9}
    optimizer = getattr(keras.optimizers, name)(0.1, **options)
    model = model_of(optimizer)
    fit(model, 1)
    before = [keras.ops.convert_to_numpy(v).copy() for v in optimizer.variables]
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    for variable, old in zip(optimizer.variables, before, strict=True):
        halved = "learning_rate" in variable.path or (
            name != "Adam" and "momentum" in variable.path
        )
        found = keras.ops.convert_to_numpy(variable)
        np.testing.assert_allclose(found, old * 0.5 if halved else old, rtol=1e-6)
    assert any(np.any(old) for v, old in zip(optimizer.variables, before, strict=True)
               if "momentum" in v.path)  # fmt: skip


def test_an_optimizer_without_one_rate_and_a_learning_rate_callback_raise(hvd):
    import keras

    from hvdkit.errors import UsageError

    rates = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    choice = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    for optimizer, message in (
        (keras.optimizers.SGD(rates), "cannot set the rate"),
        (keras.optimizers.MultiOptimizer(choice), "sets the rate of one optimizer"),
    ):
        with pytest.raises(UsageError, match=message):
            fit(model_of(optimizer), 1, hvd.callbacks.LearningRateWarmupCallback(0.1))


def test_missing_or_invalid_arguments_raise(hvd):
    import keras

    from hvdkit.errors import UsageError

    def batches():
        while True:
            yield np.ones((2, 1), "float32"), np.ones((2, 1), "float32")

    model = model_of(keras.optimizers.SGD(0.1))
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1.0, staircase=False)
    schedule.set_model(model)
    schedule.set_params({"steps": None})
    with pytest.raises(UsageError, match="steps_per_epoch"):
        schedule.on_train_begin()
    with pytest.raises(UsageError, match="initial_lr is None"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)
    with pytest.raises(UsageError, match=r"expected a keras\.metrics\.Metric"):
        hvd.callbacks.additive("accuracy")
    with pytest.raises(UsageError, match="not built"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_verbose_warmup_prints_its_end(hvd):
    import contextlib
    import io

    import keras

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        callback = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1)
        fit(model_of(keras.optimizers.SGD(0.1)), 3, callback)
    assert "Epoch 2: finished gradual learning rate warmup to 0.1." in printed.getvalue()
