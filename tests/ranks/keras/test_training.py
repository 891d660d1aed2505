"""`fit` on several ranks: logs, decisions of callbacks, and files."""

import contextlib
import io
import os

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras
from tests.ranks.keras.job import (
    BATCH,
    STEPS,
    all_samples,
    classifier,
    distributed,
    fit,
    of_every_rank,
    same_everywhere,
    samples,
)


def kinds_of_metrics():
    return [
        "accuracy",
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.F1Score(threshold=0.5, average="micro", name="f1"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.MeanIoU(2, name="iou"),
    ]


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.long_with("keras-tensorflow")
def test_metrics_are_those_of_one_process_with_all_data(hvd):
    model = classifier(distributed(hvd), kinds_of_metrics())
    history = fit(hvd, model, validation_data=samples(hvd.rank(), 1)).history

    plain = classifier("sgd", kinds_of_metrics())
    train = plain.evaluate(*all_samples(hvd.size()), verbose=0, return_dict=True)
    validation = plain.evaluate(*all_samples(hvd.size(), 1), verbose=0, return_dict=True)
    expected = train | {f"val_{name}": value for name, value in validation.items()}
    close({name: values[0] for name, values in history.items()}, expected)
    same_everywhere(history)
    # For these data the mean over the ranks differs, so a mean would fail this test.
    own = plain.evaluate(*samples(hvd.rank()), verbose=0, return_dict=True)
    means = {name: np.mean([o[name] for o in of_every_rank(own)]) for name in own}
    wrong = {name for name in own if means[name] != pytest.approx(train[name], rel=1e-4)}
    assert len(wrong & {"loss", "accuracy", "auc", "precision", "rmse", "r2"}) >= 4


@pytest.mark.long_with("keras-tensorflow")
def test_all_callbacks_read_reduced_logs(hvd):
    class Reader(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.read = {}

        def on_test_end(self, logs=None):
            self.read["test_end"] = dict(logs)

        def on_epoch_end(self, epoch, logs=None):
            self.read["epoch_end"] = dict(logs)

        def on_train_end(self, logs=None):
            self.read["train_end"] = {name: float(value) for name, value in logs.items()}

    readers = Reader(), Reader()
    callbacks = [readers[0], hvd.callbacks.MetricAverageCallback(), readers[1]]
    model = classifier(distributed(hvd))
    history = fit(hvd, model, validation_data=samples(hvd.rank(), 1), callbacks=callbacks).history
    read = same_everywhere(readers[0].read)
    assert readers[1].read == read
    assert {name: values[0] for name, values in history.items()} == read["epoch_end"]
    assert read["train_end"] == read["epoch_end"]
    assert read["test_end"] == {
        name: read["epoch_end"][f"val_{name}"] for name in ("accuracy", "loss")
    }


def test_losses_of_outputs_weight_ranks_by_rows(hvd):
    """On TensorFlow, Keras counts the rows of rank 0, and 1 for each batch of other ranks."""

    def of_rank(rank):
        x = np.random.default_rng(rank).normal(size=(8 + (rank > 0), 3)) * (1 + 3 * rank)
        return x, {"a": x[:, :1], "b": x[:, 1:2]}

    inputs = keras.Input((3,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
    model = keras.Model(inputs, outputs)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, loss={"a": "mse", "b": "mse"})
    hvd.broadcast_model(model, root_rank=0)
    x, y = of_rank(0)
    validation = {"validation_data": of_rank(hvd.rank()), "validation_batch_size": 4}
    history = model.fit(x, y, batch_size=4, verbose=0, **validation).history

    own = [
        model.evaluate(*of_rank(rank), batch_size=4, verbose=0, return_dict=True)
        for rank in range(hvd.size())
    ]
    rows = [len(of_rank(rank)[0]) for rank in range(hvd.size())]
    expected = {name: np.average([o[name] for o in own], weights=rows) for name in own[0]}
    close({name: history[f"val_{name}"][0] for name in expected}, expected)


def test_training_metrics_without_validation_are_reduced(hvd):
    history = fit(hvd, classifier(distributed(hvd)), epochs=2).history
    expected = classifier("sgd").evaluate(*all_samples(hvd.size()), verbose=0, return_dict=True)
    for epoch in range(2):
        close({name: values[epoch] for name, values in history.items()}, expected)


@pytest.mark.long_with("keras-tensorflow")
def test_logs_of_validation_on_one_rank_reach_all_ranks(hvd):
    validation = samples(0, 1) if hvd.rank() == 0 else None
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=0)
    model = classifier(distributed(hvd), kinds_of_metrics())
    history = fit(hvd, model, epochs=3, validation_data=validation, callbacks=[stopping]).history
    same_everywhere(history)
    # At a rate of 0 the loss does not improve, so training stops after two epochs.
    assert len(history["loss"]) == 2
    expected = classifier("sgd", kinds_of_metrics()).evaluate(
        *samples(0, 1), verbose=0, return_dict=True
    )
    close({name: history[f"val_{name}"][0] for name in expected}, expected)


def test_custom_metrics(hvd):
    from hvdkit.keras.fit.metrics import is_additive

    class Worst(keras.metrics.Metric):
        """The largest error, which is not additive."""

        def __init__(self):
            super().__init__(name="worst")
            self.value = self.add_variable((), "zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            worst = keras.ops.max(keras.ops.abs(y_true - y_pred))
            self.value.assign(keras.ops.maximum(self.value, worst))

        def result(self):
            return keras.ops.convert_to_tensor(self.value)

    @hvd.callbacks.additive
    class Squares(keras.metrics.Metric):
        """A sum, marked with `additive`."""

        def __init__(self):
            super().__init__(name="of_squares")
            self.value = self.add_variable((), "zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign_add(keras.ops.sum(keras.ops.square(y_true - y_pred)))

        def result(self):
            value = keras.ops.convert_to_tensor(self.value)
            return {"squares": value, "root of squares": keras.ops.sqrt(value)}

    class RootOfMean(keras.metrics.MeanSquaredError):
        """A metric that inherits `update_state` from Keras's."""

        def result(self):
            return keras.ops.sqrt(super().result())

    def metrics():
        return [Worst(), Squares(), RootOfMean(name="root")]

    assert [is_additive(metric) for metric in metrics()] == [False, True, True]
    model = classifier(distributed(hvd), metrics())
    history = fit(hvd, model, validation_data=samples(hvd.rank(), 1)).history
    plain = classifier("sgd", metrics())
    everything = plain.evaluate(*all_samples(hvd.size()), verbose=0, return_dict=True)
    assert history["squares"][0] == pytest.approx(everything["squares"], rel=1e-5)
    assert history["root of squares"][0] == pytest.approx(everything["squares"] ** 0.5, rel=1e-5)
    assert history["root"][0] == pytest.approx(everything["root"], rel=1e-5)
    own = plain.evaluate(*samples(hvd.rank()), verbose=0, return_dict=True)
    worst = [o["worst"] for o in of_every_rank(own)]
    assert history["worst"][0] == pytest.approx(np.mean(worst), rel=1e-5)
    assert np.mean(worst) != pytest.approx(everything["worst"], rel=1e-3)
    # `result` is replaced only during the reduction.
    assert all("result" not in vars(metric) for metric in model.metrics)


def test_other_logs_are_averaged(hvd):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, _ = data
            size = keras.ops.cast(keras.ops.shape(x)[0], "float32")
            self.seen.update_state(size, sample_weight=size)
            return {"seen": self.seen.result(), "last": size, "name": size}

    model = Own()
    model.build((None, 3))
    model.compile(distributed(hvd))
    history = fit(hvd, model).history
    counts = [STEPS * BATCH - rank % BATCH for rank in range(hvd.size())]
    batches = [size for n in counts for size in [BATCH] * (STEPS - 1) + [n - (STEPS - 1) * BATCH]]
    assert history["seen"][0] == pytest.approx(np.square(batches).sum() / np.sum(batches))
    last = np.mean([n - (STEPS - 1) * BATCH for n in counts])
    assert history["last"] == history["name"] == [pytest.approx(last)]


@pytest.mark.long_with("keras-tensorflow")
def test_results_that_are_arrays(hvd):
    """An array that is not the result of a metric stays that of each rank, with one warning."""

    class Own(keras.Sequential):
        def train_step(self, *arguments):
            return {**super().train_step(*arguments), "other": keras.ops.arange(2) + hvd.rank()}

    class OneElement(keras.metrics.MeanAbsoluteError):
        def result(self):
            return keras.ops.reshape(super().result(), (1,))

    def compiled(kind, optimizer):
        keras.utils.set_random_seed(1)
        model = kind([keras.Input((3,)), keras.layers.Dense(2, "sigmoid")])
        metric = keras.metrics.F1Score(average=None, threshold=0.5, name="f1")
        model.compile(optimizer, loss="mse", metrics=["mae", metric, OneElement(name="one")])
        return model

    def data(x, y):
        return x, np.concatenate([y, x[:, :1] > 0], 1).astype("float32")

    def values(logs):
        return {name: keras.ops.convert_to_numpy(value).tolist() for name, value in logs.items()}

    plain = compiled(keras.Sequential, "sgd")
    x, y = data(*all_samples(hvd.size()))
    expected = values(plain.evaluate(x, y, verbose=0, return_dict=True))
    model = compiled(Own, distributed(hvd))
    own = data(*samples(hvd.rank()))
    # Only one rank validates.
    validation = own if hvd.rank() == 0 else None
    with recorded("hvdkit.keras") as log:
        history = fit(hvd, model, data=own, epochs=2, validation_data=validation).history
    last = values({name: each[-1] for name, each in history.items()})
    assert last.pop("other") == [hvd.rank(), hvd.rank() + 1]
    same_everywhere(last)
    close({name: last[name] for name in expected}, expected)
    x, y = data(*samples(0))
    of_rank_0 = values(plain.evaluate(x, y, verbose=0, return_dict=True))
    close({name: last[f"val_{name}"] for name in expected}, of_rank_0)
    assert last["val_f1"] != pytest.approx(last["f1"], rel=1e-3)
    callback = hvd.callbacks.MetricAverageCallback()
    found = model.evaluate(*own, verbose=0, callbacks=[callback], return_dict=True)
    close(values(found), expected)
    lines = [record.getMessage() for record in log]
    assert len(lines) == (hvd.rank() == 0)
    assert all("'other' is an array of shape [2] and not" in line for line in lines)


@pytest.mark.long_with("keras-tensorflow")
def test_a_result_under_another_name_warns(hvd):
    class Renaming(keras.Sequential):
        def train_step(self, *arguments):
            logs = super().train_step(*arguments)
            return {"loss": logs["loss"], "deviation": logs["mae"], "rank": hvd.rank() * 1.0}

    keras.utils.set_random_seed(1)
    model = Renaming([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(distributed(hvd), loss="mse", metrics=["mae"])
    with recorded("hvdkit.keras") as log:
        fit(hvd, model, epochs=2)
    lines = [record.getMessage() for record in log]
    assert len(lines) == (hvd.rank() == 0)
    assert all("'deviation' is averaged" in line and "'mae'" in line for line in lines)


@pytest.mark.long_with("keras-tensorflow")
def test_different_metrics_raise(hvd):
    metrics = ["accuracy"] if hvd.rank() else ["accuracy", "mae"]
    model = classifier(distributed(hvd), metrics)
    with pytest.raises(RankMismatchError, match=r"metrics and logs.*First difference: .*mae"):
        fit(hvd, model)


def opposed_targets(hvd, rate=0.1, **options):
    """Return a model of one weight, initially 0, and data with target 6 on rank 0, otherwise -1."""
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(optimizer, loss="mse")
    x = np.ones((STEPS * BATCH, 1), "float32")
    return model, (x, x * (6.0 if hvd.rank() == 0 else -1.0))


@pytest.mark.long_with("keras-tensorflow")
def test_learning_rates_of_plateaus_are_the_same_on_all_ranks(hvd):
    model, data = opposed_targets(hvd)
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.05)
    history = fit(
        hvd, model, data=data, validation_data=data, epochs=12, callbacks=[plateau]
    ).history
    rates = same_everywhere(history["learning_rate"])
    assert rates[2] == pytest.approx(0.1)
    assert rates[-1] < 0.05


@pytest.mark.long_with("keras-tensorflow")
def test_only_rank_0_writes_files(hvd):
    with shared_folder(hvd) as folder:
        own = os.path.join(folder, str(hvd.rank()))
        os.mkdir(own)
        callbacks = [
            keras.callbacks.ModelCheckpoint(os.path.join(own, "model.keras")),
            keras.callbacks.CSVLogger(os.path.join(own, "log.csv")),
            keras.callbacks.BackupAndRestore(
                os.path.join(own, "backup"), save_freq=2, delete_checkpoint=False
            ),
        ]
        history = fit(hvd, classifier(distributed(hvd, 0.1)), epochs=2, callbacks=callbacks).history
        found = of_every_rank(sorted(os.listdir(own)))
        assert found == [["backup", "log.csv", "model.keras"]] + [[]] * (hvd.size() - 1)
        if hvd.rank() == 0:
            with open(os.path.join(own, "log.csv")) as file:
                lines = file.read().splitlines()
            assert [float(line.split(",")[2]) for line in lines[1:]] == history["loss"]


@pytest.mark.long_with("keras-tensorflow")
def test_a_class_of_the_script_runs_on_every_rank_and_writes_on_rank_0(hvd):
    class Best(keras.callbacks.ModelCheckpoint):
        scores = ()

        def on_epoch_end(self, epoch, logs=None):
            self.scores += (float(hvd.allreduce(float(hvd.rank()), name="score")),)
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)
            super().on_epoch_end(epoch, logs)

    class Log(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            self.csv_file.write("end of epoch\n")

    class Backup(keras.callbacks.BackupAndRestore):
        def on_train_begin(self, logs=None):
            super().on_train_begin(logs)
            self.begins = float(hvd.allreduce(1.0, name="begins"))

    class Bar(keras.callbacks.ProgbarLogger):
        def on_epoch_begin(self, epoch, logs=None):
            super().on_epoch_begin(epoch, logs)
            hvd.allreduce(1.0, name="bar")

    with shared_folder(hvd) as folder, recorded("hvdkit.keras") as records:
        own = os.path.join(folder, str(hvd.rank()))
        os.mkdir(own)
        best = Best(os.path.join(own, "sub", "best.keras"), monitor="loss", save_best_only=True)
        log = Log(os.path.join(own, "log.csv"))
        backup = Backup(os.path.join(own, "backup"), delete_checkpoint=False)
        model = classifier(distributed(hvd, 0.1))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            fit(hvd, model, epochs=2, callbacks=[best, log, backup, Bar()], verbose=1)
        found = of_every_rank(sorted(os.listdir(own)))
        assert found == [["backup", "log.csv", "sub"]] + [[]] * (hvd.size() - 1)
        assert bool(printed.getvalue()) == (hvd.rank() == 0)
        assert same_everywhere(list(best.scores)) == [pytest.approx((hvd.size() - 1) / 2)] * 2
        assert same_everywhere(float(model.optimizer.learning_rate)) == pytest.approx(0.025)
        assert same_everywhere(best.best) is not None
        assert (type(best).__name__, backup.begins) == ("Best", 1.0)
        texts = [each.getMessage() for each in records if "class of the script" in each.msg]
        assert len(texts) == 4 * (hvd.rank() == 1)
        # Each rank may write in a `fit` of its own.
        with hvd.local_fit():
            fit(hvd, classifier("sgd"), callbacks=[best, log])
        assert type(best) is Best
        assert {"log.csv", "sub"} <= set(os.listdir(own))


@pytest.mark.long_with("keras-tensorflow")
def test_only_rank_0_prints_the_progress_bar(hvd):
    for verbose in (1, 2):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            model = classifier(distributed(hvd))
            fit(hvd, model, verbose=verbose)
            model.evaluate(*samples(hvd.rank()), verbose=verbose)
            model.predict(samples(hvd.rank())[0], verbose=verbose)
        lengths = of_every_rank(len(printed.getvalue()))
        assert lengths[0] > 50
        assert set(lengths[1:]) == {0}


@pytest.mark.parametrize(
    "raising", [False, pytest.param(True, marks=pytest.mark.long_with("keras-tensorflow"))]
)
def test_terminate_on_nan_stops_all_ranks_after_the_same_batch(hvd, raising):
    model, (x, y) = opposed_targets(hvd)
    if hvd.rank() == hvd.size() - 1:
        y[BATCH] = np.nan
    callback = keras.callbacks.TerminateOnNaN(raise_error=raising)
    if raising:
        with pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 1"):
            fit(hvd, model, data=(x, y), epochs=3, callbacks=[callback])
    else:
        history = fit(hvd, model, data=(x, y), epochs=3, callbacks=[callback]).history
        assert len(history["loss"]) == 1
        assert np.isnan(history["loss"][0])
    assert same_everywhere(int(model.optimizer.iterations)) == 2


@pytest.mark.long_with("keras-tensorflow")
def test_terminate_on_nan_on_one_rank_stops_all_ranks(hvd):
    model, (x, y) = opposed_targets(hvd)
    if hvd.rank() == 1:
        # The callback also reacts to infinity.
        y[:] = np.inf
    callbacks = [keras.callbacks.TerminateOnNaN()] if hvd.rank() == 0 else None
    fit(hvd, model, data=(x, y), epochs=3, callbacks=callbacks)
    assert same_everywhere(int(model.optimizer.iterations)) == 1


#: Hook in which one rank stops at its second call -> epochs and batches that all ranks train. Only
#: a callback with a hook of batches stops them within an epoch.
STOPS = {
    "on_epoch_end": (2, 2 * STEPS),
    "on_epoch_begin": (2, 2 * STEPS),
    "on_train_batch_end": (1, 2),
}


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("is_lambda", [False, True])
@pytest.mark.parametrize("hook", STOPS)
def test_a_stop_on_one_rank_stops_all(hvd, hook, is_lambda):
    def stop(number, logs=None):
        model.stop_training = number == 1

    model = classifier(distributed(hvd, 0.1))
    callback = keras.callbacks.LambdaCallback(**{hook: stop})
    if not is_lambda:
        callback = type("Stop", (keras.callbacks.Callback,), {hook: staticmethod(stop)})()
    callbacks = [callback] if hvd.rank() == 1 else []
    history = fit(hvd, model, epochs=5, callbacks=callbacks).history
    done = len(history["loss"]), int(model.optimizer.iterations)
    assert tuple(same_everywhere(done)) == STOPS[hook]


@pytest.mark.long_with("keras-tensorflow")
def test_an_accumulation_window_closes_before_validation(hvd):
    class Updates(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_test_begin(self, logs=None):
            self.seen.append(int(self.model.optimizer.iterations))

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(int(self.model.optimizer.iterations))

    updates = Updates()
    model = classifier(distributed(hvd, 0.1, accumulation_steps=2))
    fit(hvd, model, epochs=2, validation_data=samples(hvd.rank(), 1), callbacks=[updates])
    fit(hvd, model, epochs=1, callbacks=[updates])
    assert updates.seen == [2, 2, 4, 4, 6]
    same_everywhere([weight.tolist() for weight in model.get_weights()])


@pytest.mark.long_with("keras-tensorflow")
def test_backup_and_restore_resumes_all_ranks(hvd):
    class Interrupted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    with shared_folder(hvd) as folder:

        def backup():
            # Each rank has its own folder. Only that of rank 0 has a backup.
            return keras.callbacks.BackupAndRestore(os.path.join(folder, str(hvd.rank())))

        model = classifier(distributed(hvd, 0.1))
        with pytest.raises(KeyboardInterrupt):
            fit(hvd, model, epochs=4, callbacks=[backup(), Interrupted()])
        again = classifier(distributed(hvd, 0.1), seed=5 + hvd.rank())
        history = fit(hvd, again, epochs=4, callbacks=[backup()])
        assert same_everywhere(history.epoch) == [2, 3]
        straight = classifier(distributed(hvd, 0.1))
        fit(hvd, straight, epochs=4)
        for found, expected in zip(again.get_weights(), straight.get_weights(), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert int(again.optimizer.iterations) == 4 * STEPS


@pytest.mark.parametrize("left", [1, 0])
def test_ranks_begin_at_different_epochs(hvd, left):
    """Rank 0 has read the epoch from a file, and has not broadcast it."""
    first = (3 - left) * (hvd.rank() == 0)
    model = classifier(distributed(hvd))
    for callbacks in ([], [hvd.callbacks.MonitorCallback([])]):
        with pytest.raises(UsageError, match="rank 0: initial_epoch=[23]; rank.*: initial_epoch=0"):
            fit(hvd, model, initial_epoch=first, epochs=3, callbacks=callbacks)
    assert fit(hvd, model, initial_epoch=2, epochs=3).epoch == [2]


@pytest.mark.long_with("keras-tensorflow")
def test_a_checkpoint_replaces_different_initial_epochs(hvd):
    first = 2 * (hvd.rank() == 0)
    with shared_folder(hvd) as folder:
        fit(hvd, classifier(distributed(hvd)), callbacks=[hvd.callbacks.Checkpoint(folder)])
        model = classifier(distributed(hvd))
        callbacks = [hvd.callbacks.Checkpoint(folder)]
        history = fit(hvd, model, initial_epoch=first, epochs=3, callbacks=callbacks)
        # The history contains the restored epoch.
        assert same_everywhere(history.epoch) == [0, 1, 2]


@pytest.mark.long_with("keras-tensorflow")
def test_evaluate_in_a_callback_of_one_rank(hvd):
    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if hvd.rank() == 1:
                self.model.evaluate(*samples(1, 2), verbose=0)

    model = classifier(distributed(hvd))
    history = fit(
        hvd, model, epochs=2, validation_data=samples(hvd.rank(), 1), callbacks=[Evaluates()]
    ).history
    same_everywhere(history)
    assert history["loss"][0] == pytest.approx(history["loss"][1], rel=1e-6)


@pytest.mark.long_with("keras-tensorflow")
def test_a_metric_average_callback_reduces_with_a_plain_optimizer(hvd):
    expected = classifier("sgd").evaluate(*all_samples(hvd.size()), verbose=0, return_dict=True)

    def trained(callbacks):
        model = classifier(keras.optimizers.SGD(0.0))
        history = fit(hvd, model, callbacks=callbacks).history
        return {name: values[0] for name, values in history.items()}

    close(trained([hvd.callbacks.MetricAverageCallback()]), expected)
    own = of_every_rank(trained([]))
    assert len({values["loss"] for values in own}) == hvd.size()


@pytest.mark.long_with("keras-tensorflow")
def test_metrics_of_a_set_of_one_rank_are_its_own(hvd):
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    try:
        model = classifier(distributed(hvd, process_set=sets[hvd.rank()]))
        history = fit(hvd, model, callbacks=[hvd.callbacks.MetricAverageCallback()]).history
        expected = classifier("sgd").evaluate(*samples(hvd.rank()), verbose=0)[0]
        assert history["loss"][0] == pytest.approx(expected, rel=1e-5)
    finally:
        for each in sets:
            hvd.remove_process_set(each)


def test_process_sets_train_separately(hvd):
    if hvd.size() < 4:
        pytest.skip("two sets of two ranks need four ranks")
    pairs = [hvd.add_process_set([rank, rank + 1]) for rank in range(0, hvd.size(), 2)]
    try:
        own = pairs[hvd.rank() // 2]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            model = classifier(distributed(hvd, process_set=own))
            history = fit(hvd, model, verbose=2).history
        first = hvd.rank() // 2 * 2
        parts = [samples(rank) for rank in (first, first + 1)]
        both = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        expected = classifier("sgd").evaluate(*both, verbose=0)[0]
        assert history["loss"][0] == pytest.approx(expected, rel=1e-5)
        assert bool(printed.getvalue()) == (hvd.rank() == first)
    finally:
        for pair in pairs:
            hvd.remove_process_set(pair)
