"""`hvd.callbacks.Checkpoint` on one rank: content, export, resume and errors."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from tests.large_table import with_large_table
from tests.logs import recorded


def values(count=12):
    random = np.random.default_rng(2)
    return random.normal(size=(count, 3)).astype("float32"), random.normal(size=(count, 1))


def compiled(optimizer=None, policy=None):
    """Return a compiled model with nested layers, and a layer that is not an attribute."""
    import keras

    keras.utils.set_random_seed(4)
    inputs = keras.Input((3,))
    inner = keras.Sequential(
        [keras.layers.Dense(4, dtype=policy), keras.layers.BatchNormalization()], name="inner"
    )
    outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.2)(inner(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    return model


def fit(hvd, model, folder, *, epochs=1, count=12, callbacks=(), **options):
    callback = hvd.callbacks.Checkpoint(folder, **options)
    x, y = values(count)
    history = model.fit(
        *(x, y),
        batch_size=4,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[callback, *callbacks],
    )
    return callback, history


def arrays(model):
    import keras

    variables = [*model.weights, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable).tolist() for variable in variables]


def contents(file):
    """Return the attributes and bytes of an HDF5 file by path."""
    import h5py

    found = {}

    def visit(name, node):
        data = node[()].tobytes() if isinstance(node, h5py.Dataset) else None
        found[name] = ({key: str(value) for key, value in node.attrs.items()}, data)

    with h5py.File(file) as h5:
        h5.visititems(visit)
    return found


@pytest.mark.parametrize("policy", [None, "bfloat16"])
def test_an_export_equals_the_file_of_keras(hvd, tmp_path, policy):
    import keras

    from hvdkit.checkpoint.h5 import export
    from hvdkit.checkpoint.store import Store

    inner = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    model = compiled(keras.optimizers.LossScaleOptimizer(inner), policy)
    fit(hvd, model, tmp_path / "steps")
    with Store(tmp_path / "steps").newest_good() as opened:
        export(opened, tmp_path / "ours.weights.h5")
    # At its end, after the save, fit has replaced the weights by their moving averages.
    other = compiled(keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True), policy)
    other.load_weights(tmp_path / "ours.weights.h5")
    other.optimizer.build(other.trainable_variables)
    model.save_weights(tmp_path / "kerass.weights.h5")
    ours, kerass = (contents(tmp_path / f"{who}.weights.h5") for who in ("ours", "kerass"))
    assert ours.keys() == kerass.keys()
    assert {name: attributes for name, (attributes, _) in ours.items()} == {
        name: attributes for name, (attributes, _) in kerass.items()
    }
    optimizers = [name for name in ours if name.startswith("optimizer")]
    assert optimizers
    assert [ours[name] for name in optimizers] == [kerass[name] for name in optimizers]
    assert not list(tmp_path.glob(".*"))


def test_export_needs_no_framework_and_loads_with_the_optimizer(hvd, tmp_path):
    import keras

    model = compiled()
    fit(hvd, model, tmp_path / "steps", epochs=2)
    code = f"""
import sys
from hvdkit.checkpoint import h5
from hvdkit.checkpoint.store import Store
with Store({str(tmp_path / "steps")!r}).newest_good() as opened:
    h5.export(opened, {str(tmp_path / "new.weights.h5")!r})
print(sorted({{"keras", "tensorflow", "torch"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    other = compiled()
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "new.weights.h5")
    assert arrays(other) == arrays(model)
    x, _ = values()
    assert np.array_equal(
        keras.ops.convert_to_numpy(other(x)), keras.ops.convert_to_numpy(model(x))
    )


def test_an_export_that_is_impossible_raises(hvd, tmp_path):
    import keras

    from hvdkit.checkpoint import h5
    from hvdkit.checkpoint.store import Store
    from hvdkit.errors import UsageError

    class Doubled(keras.layers.Dense):
        def save_own_variables(self, store):
            store["0"] = 2 * keras.ops.convert_to_numpy(self.kernel)

    model = keras.Sequential([keras.Input((3,)), Doubled(1)])
    model.compile("sgd", loss="mse")
    fit(hvd, model, tmp_path)
    with Store(tmp_path).newest_good() as opened:
        with pytest.raises(UsageError, match="computes the value that it saves as"):
            h5.export(opened, tmp_path / "x.weights.h5")
        with pytest.raises(UsageError, match=r"expected a name that ends in .weights.h5"):
            h5.export(opened, tmp_path / "x.h5")


def test_tensor_names_are_keras_paths(hvd, tmp_path):
    from safetensors.numpy import load_file

    model = compiled()
    fit(hvd, model, tmp_path)
    (path,) = tmp_path.glob("step-*/model.safetensors")
    assert set(load_file(path)) == {variable.path for variable in model.weights}


@pytest.mark.long_with("keras-tensorflow")
def test_manifests_have_steps_epochs_and_logs(hvd, tmp_path):
    from hvdkit.checkpoint.store import Store

    callback, history = fit(
        *(hvd, compiled(), tmp_path), epochs=3, every_steps=2, keep_last=None, metadata={"run": 7}
    )
    manifests = [info.manifest for info in Store(tmp_path).steps()]
    # An epoch has three batches. A save at the end of an epoch includes the logs.
    assert [m.step for m in manifests] == [2, 3, 4, 6, 8, 9]
    assert [m.epoch for m in manifests] == [0, 1, 1, 2, 2, 3]
    losses = [m.metrics["loss"] for m in manifests if m.metrics]
    assert losses == [float(loss) for loss in history.history["loss"]]
    assert callback.step == 9
    assert manifests[0].versions.keys() >= {"keras", "hvdkit", "python"}


def test_best_weights_and_logs_of_every_shape_resume(hvd, tmp_path):
    """A `Normalization` has a weight of shape (), and the result of a metric may be an array."""
    import keras

    def trained(epochs):
        keras.utils.set_random_seed(1)
        scaled = keras.layers.Normalization()
        scaled.adapt(values()[0])
        model = keras.Sequential([keras.Input((3,)), scaled, keras.layers.Dense(1)])
        metric = keras.metrics.MeanMetricWrapper(lambda y, of_y: y, name="number")
        own = Parts(name="parts")
        model.compile(keras.optimizers.SGD(0.01), loss="mse", metrics=[metric, own])
        # The first epoch is the best.
        stopping = keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=9, restore_best_weights=True
        )
        _, history = fit(hvd, model, tmp_path, epochs=epochs, callbacks=[stopping])
        return model.get_weights(), history.history

    @hvd.callbacks.additive
    class Parts(keras.metrics.Mean):
        def update_state(self, y, of_y, sample_weight=None):
            super().update_state(y)

        def result(self):
            return keras.ops.stack([super().result(), super().result()])

    best, logs = trained(1)
    resumed, longer = trained(2)
    for found, expected in zip(resumed, best, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert len(longer["parts"]) == 2
    np.testing.assert_allclose(longer["parts"][0], [logs["number"][0]] * 2, rtol=1e-5)


@pytest.mark.long_with("keras-tensorflow")
def test_keep_best_keeps_the_best_epoch(hvd, tmp_path):
    from hvdkit.checkpoint.store import Store

    best = hvd.KeepBest("mae", "max")
    _, history = fit(hvd, compiled(), tmp_path, epochs=6, keep_last=1, keep_best=best)
    kept = [info.manifest.epoch for info in Store(tmp_path).steps()]
    assert kept == sorted({int(np.argmax(history.history["mae"])) + 1, 6})


def test_a_second_fit_with_the_same_callback_continues_from_memory(hvd, tmp_path):
    import keras

    model = compiled()
    if keras.backend.backend() == "tensorflow":
        # Of the three batches of an epoch, the second execution has only one.
        model.compile("sgd", loss="mse", steps_per_execution=2)
    callback, _ = fit(hvd, model, tmp_path)
    x, y = values()
    options = {"batch_size": 4, "verbose": 0, "callbacks": [callback]}
    history = model.fit(x, y, epochs=3, initial_epoch=1, **options)
    assert history.epoch == [1, 2]
    assert callback.step == 9


@pytest.mark.long_with("keras-tensorflow")
def test_without_resume_a_new_run_begins(hvd, tmp_path):
    fit(hvd, compiled(), tmp_path, epochs=2)
    callback, history = fit(hvd, compiled(), tmp_path, resume=False)
    assert (callback.step, history.epoch) == (3, [0])
    # The next `fit` resumes the new run.
    callback, history = fit(hvd, compiled(), tmp_path, epochs=2)
    assert (callback.step, history.epoch) == (6, [0, 1])


@pytest.mark.long_with("keras-tensorflow")
def test_batches_of_a_resumed_epoch_keep_their_numbers(hvd, tmp_path):
    import keras

    class Numbers(keras.callbacks.Callback):
        def __init__(self, stop=None):
            super().__init__()
            self.seen, self.stop = [], stop

        def on_train_batch_begin(self, batch, logs=None):
            if len(self.seen) == self.stop:
                raise KeyError("interrupted")
            self.seen.append(batch)

    for together in (1, 2) if keras.backend.backend() == "tensorflow" else (1,):
        folder = tmp_path / str(together)
        model = compiled()
        model.compile("sgd", loss="mse", steps_per_execution=together)
        with pytest.raises(KeyError):
            fit(hvd, model, folder, count=40, callbacks=[Numbers(3)], every_steps=1)
        other = compiled()
        other.compile("sgd", loss="mse", steps_per_execution=together)
        numbers = Numbers()
        callback, _ = fit(hvd, other, folder, count=40, callbacks=[numbers], epochs=2)
        assert numbers.seen == [*range(3 * together, 10, together), *range(0, 10, together)]
        assert callback.step == 20


def test_the_rest_of_an_epoch_may_be_less_than_one_execution(hvd, tmp_path):
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("the PyTorch backend has no steps_per_execution")
    import tensorflow as tf

    x, y = values(16)

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                raise KeyError("interrupted")

    def train(folder, callbacks=()):
        model = compiled()
        model.compile("sgd", loss="mse", steps_per_execution=3)
        sampler = hvd.ResumableSampler(16, batch_size=4)
        data = sampler.dataset().map(lambda i: (tf.gather(x, i), tf.gather(y, i)))
        checkpoint = hvd.callbacks.Checkpoint(folder, every_steps=1, data=sampler)
        model.fit(data, epochs=2, verbose=0, callbacks=[checkpoint, *callbacks])
        return arrays(model)

    with pytest.raises(KeyError):
        train(tmp_path / "interrupted", [Breaks()])
    assert train(tmp_path / "interrupted") == train(tmp_path / "undisturbed")


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("drawn", ["in on_epoch_begin", "by a thread of Keras"])
def test_a_resumed_epoch_has_the_same_order_of_a_py_dataset(hvd, tmp_path, drawn):
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 10

        def __getitem__(self, index):
            rows = slice(4 * self.order[index], 4 * self.order[index] + 4)
            return x[rows], y[rows]

        def on_epoch_begin(self):
            if drawn == "in on_epoch_begin":
                self.order = np.random.permutation(10)

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                raise KeyError("interrupted")

    x, y = values(40)

    def train(folder, callbacks=()):
        threads = drawn == "by a thread of Keras"
        data = Batches(workers=2 if threads else 1)
        data.order = np.arange(10)
        model = compiled()
        checkpoint = hvd.callbacks.Checkpoint(folder, every_steps=1)
        model.fit(data, epochs=2, shuffle=threads, verbose=0, callbacks=[checkpoint, *callbacks])
        return arrays(model)

    with pytest.raises(KeyError):
        train(tmp_path / "interrupted", [Breaks()])
    assert train(tmp_path / "interrupted") == train(tmp_path / "undisturbed")


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("factor", [0.5, pytest.param(0.25, marks=pytest.mark.long)])
def test_a_resumed_epoch_changes_the_learning_rate_once(hvd, tmp_path, factor):
    """`fit` calls `on_epoch_begin` again. Another schedule is effective in the resumed epoch."""
    import keras

    class Rates(keras.callbacks.Callback):
        def __init__(self, stop=None):
            super().__init__()
            self.seen, self.stop = [], stop

        def on_train_batch_begin(self, batch, logs=None):
            if len(self.seen) == self.stop:
                raise KeyError("interrupted")
            self.seen.append(float(self.model.optimizer.learning_rate))

        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = self.seen[-1] / 2

    def train(factor, stop=None):
        rates = Rates(stop)
        schedule = keras.callbacks.LearningRateScheduler(lambda _, rate: factor * rate)
        model = compiled(keras.optimizers.SGD(1.0))
        callbacks = [schedule, rates]
        with contextlib.suppress(KeyError):
            fit(hvd, model, tmp_path, epochs=2, callbacks=callbacks, every_steps=1)
        return rates.seen

    first = train(0.5, stop=5)
    assert first == [1 / 2, 1 / 4, 1 / 8, 1 / 32, 1 / 64]
    assert train(factor) == [1 / 128 if factor == 0.5 else 1 / 64]


@pytest.mark.long_with("keras-tensorflow")
def test_a_resumed_epoch_repeats_no_changes_of_its_begin(hvd, tmp_path):
    """A callback counts epochs, sums batches since the epoch began, and changes a weight."""
    import keras

    class Counting(keras.callbacks.Callback):
        def __init__(self, stop=None):
            super().__init__()
            self.stop, self.epochs, self.batches = stop, 0, []

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs, self.batches = self.epochs + 1, []
            self.model.optimizer.learning_rate = 0.1 / self.epochs
            bias = self.model.layers[-1].bias
            bias.assign(bias / 2 + 1)

        def on_train_batch_begin(self, batch, logs=None):
            self.batches.append(batch)
            if (self.epochs, batch) == self.stop:
                raise KeyError("interrupted")

        def on_epoch_end(self, epoch, logs=None):
            logs.update(epochs=self.epochs, batches=len(self.batches))

        def state_dict(self):
            return {"epochs": self.epochs, "batches": self.batches}

        def load_state_dict(self, state):
            self.epochs, self.batches = state["epochs"], state["batches"]

    def train(folder, stop=None):
        model = compiled()
        callbacks = [Counting(stop)]
        _, history = fit(hvd, model, folder, epochs=3, callbacks=callbacks, every_steps=1)
        return arrays(model), history.history

    expected = train(tmp_path / "undisturbed")
    for stop in ((2, 2), (2, 2), (3, 1)):
        with contextlib.suppress(KeyError):
            train(tmp_path / "resumed", stop)
    assert train(tmp_path / "resumed") == expected


@pytest.mark.long_with("keras-tensorflow")
def test_evaluate_in_a_callback_does_not_consume_the_resumed_epoch(hvd, tmp_path):
    import keras

    x, y = values(40)

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.evaluate(x, y, batch_size=4, verbose=0)

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 6:
                raise KeyError("interrupted")

    with pytest.raises(KeyError):
        fit(hvd, compiled(), tmp_path, count=40, callbacks=[Breaks()], every_steps=1)
    callback, _ = fit(hvd, compiled(), tmp_path, count=40, callbacks=[Evaluates()])
    assert callback.step == 10


def test_invalid_arguments_and_models_raise(hvd, tmp_path):
    import keras

    from hvdkit.errors import UsageError

    for options in ({"every_epochs": 0}, {"keep_last": 0}):
        with pytest.raises(UsageError):
            hvd.callbacks.Checkpoint(tmp_path, **options)
    with pytest.raises(AttributeError):
        # Another dict would not be saved.
        hvd.callbacks.Checkpoint(tmp_path).metadata = {}
    model = keras.Sequential([keras.layers.Lambda(lambda x: x), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(UsageError, match="the model is not built"):
            fit(hvd, model, tmp_path)
    with pytest.raises(UsageError, match="every_steps is 0"):
        fit(hvd, compiled(), tmp_path, every_steps=0)


@pytest.mark.long_with("keras-tensorflow")
def test_an_exception_in_fit_releases_the_folder(hvd, tmp_path):
    import gc

    import keras

    from hvdkit.checkpoint.store import Store

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyError("interrupted")

    for _ in range(2):
        # The second `fit` of this process can write.
        with pytest.raises(KeyError):
            fit(hvd, compiled(), tmp_path, callbacks=[Breaks()], every_steps=1, resume=False)
    # After the callback is deleted, any process can write.
    gc.collect()
    with Store(tmp_path).open_for_writing():
        pass
    callback, _ = fit(hvd, compiled(), tmp_path)
    assert callback.step == 3


def test_data_without_a_position_raise(hvd, tmp_path):
    from hvdkit.errors import UsageError

    class Stateful:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class Loader:
        sampler = hvd.ResumableSampler(4, 2)

    for data, words in (
        ([1, 2], "data is a list: expected a hvd.ResumableSampler$"),
        (Stateful(), "data is a Stateful: expected .*only the hvd.Checkpointer of hvdkit.torch"),
        (Loader(), "expected its ResumableSampler, data=loader.sampler"),
    ):
        with pytest.raises(UsageError, match=words):
            hvd.callbacks.Checkpoint(tmp_path, data=data)


def test_a_sharded_loader_whose_position_is_not_saved_raises(hvd, tmp_path):
    """A user of `hvd.shard` has not made the sampler: the error says where it is."""
    import keras

    from hvdkit.errors import UsageError

    if keras.backend.backend() != "torch":
        pytest.skip("a DataLoader belongs to the PyTorch backend")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x, y = values()
    dataset = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = hvd.shard(DataLoader(dataset, batch_size=4))
    callback = hvd.callbacks.Checkpoint(tmp_path)
    with pytest.raises(UsageError, match=r"loader = hvd\.shard\(.*data=loader\.sampler"):
        compiled().fit(loader, verbose=0, callbacks=[callback])


@pytest.mark.long_with("keras-tensorflow")
def test_a_checkpoint_of_another_call_of_fit_raises(hvd, tmp_path):
    """Resuming it in the first call would train the first fit with the second one's state."""
    from hvdkit.errors import UsageError

    model = compiled()
    callback = hvd.callbacks.Checkpoint(tmp_path)
    x, y = values()
    for _ in range(2):
        model.fit(x, y, epochs=2, verbose=0, callbacks=[callback])
    with pytest.raises(UsageError, match="saved in call 2 of fit with this callback, .* call 1"):
        fit(hvd, compiled(), tmp_path, epochs=2)


@contextlib.contextmanager
def warnings_of_hvdkit():
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hvdkit.keras").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("hvdkit.keras").removeHandler(handler)


@pytest.mark.long_with("keras-tensorflow")
def test_callbacks_keep_their_states_when_others_are_inserted(hvd, tmp_path):
    """A state of another callback would let ModelCheckpoint overwrite the best model."""
    from keras.callbacks import EarlyStopping, ModelCheckpoint

    names = ("loss", "mae", "other", "moved/loss")
    files = {name: tmp_path / f"{name}.weights.h5" for name in names}

    def best(monitor, file, **options):
        options |= {"save_best_only": True, "save_weights_only": True}
        return ModelCheckpoint(files[file], monitor, mode="min", **options)

    # No epoch is better than a loss of 0.
    saved = [
        best("loss", "loss", initial_value_threshold=0.0),
        EarlyStopping("loss", patience=9, baseline=0.0),
        EarlyStopping("mae", patience=9, mode="max"),
    ]
    fit(hvd, compiled(), tmp_path / "run", epochs=2, callbacks=saved)
    inserted = EarlyStopping("mae", mode="min")
    kept = EarlyStopping("loss", patience=9, baseline=0.0)
    callbacks = [best("mae", "mae"), best("loss", "other"), inserted, best("loss", "loss"), kept]
    with warnings_of_hvdkit() as records:
        fit(hvd, compiled(), tmp_path / "run", epochs=3, callbacks=callbacks)
    assert {name for name, file in files.items() if file.exists()} == {"mae", "other"}
    assert kept.wait == 3
    assert inserted.wait == 0
    new, dropped = records
    assert "no state of ModelCheckpoint(monitor='mae', mode='min', filepath=" in new
    assert "EarlyStopping(monitor='mae', mode='min'), which begins without" in new
    assert "has the state of EarlyStopping(monitor='mae', mode='max'), and fit has no" in dropped
    # Another path of the folder.
    moved = [best("loss", "moved/loss"), EarlyStopping("loss", patience=9, baseline=0.0)]
    fit(hvd, compiled(), tmp_path / "run", epochs=4, callbacks=moved)
    assert not files["moved/loss"].exists()
    assert moved[1].wait == 4


def test_callback_states_of_earlier_versions(hvd):
    from keras.callbacks import EarlyStopping

    from hvdkit.keras.callback_states import CallbackStates

    saved = [EarlyStopping("loss"), EarlyStopping("mae", mode="min")]
    for number, callback in enumerate(saved):
        callback.wait = number + 1
    tree = CallbackStates(lambda: saved).save()
    del tree["settings"]
    here = [EarlyStopping("mae", mode="min"), EarlyStopping("loss")]
    with warnings_of_hvdkit() as records:
        CallbackStates(lambda: here).restore(tree)
        assert records == []
        CallbackStates(lambda: here[:1]).restore(tree)
    assert [callback.wait for callback in here] == [1, 2]
    assert "the state of EarlyStopping(), and fit has no such callback" in records[0]


@pytest.mark.long_with("keras-tensorflow")
def test_a_fit_without_remaining_epochs_logs_a_warning(hvd, tmp_path):
    fit(hvd, compiled(), tmp_path, epochs=2)
    with warnings_of_hvdkit() as records:
        fit(hvd, compiled(), tmp_path, epochs=3)
        assert records == []
        fit(hvd, compiled(), tmp_path, epochs=3)
    assert "fit has no epochs left" in records[0]
    assert "has 3 epochs, and epochs=3" in records[0]


@pytest.mark.long_with("keras-tensorflow")
def test_a_fit_that_a_callback_has_stopped_logs_a_warning(hvd, tmp_path):
    import keras

    stop = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, _: setattr(stop.model, "stop_training", epoch == 1)
    )
    fit(hvd, compiled(), tmp_path, epochs=5, callbacks=[stop])
    with warnings_of_hvdkit() as records:
        callback, _ = fit(hvd, compiled(), tmp_path, epochs=5, callbacks=[stop])
    assert callback.step == 2 * 3
    (text,) = records
    assert "ended after epoch 2, because a callback set stop_training" in text


def test_steps_per_epoch_must_match_the_sampler(hvd, tmp_path):
    from hvdkit.errors import UsageError

    sampler = hvd.ResumableSampler(12, batch_size=4)
    callback = hvd.callbacks.Checkpoint(tmp_path, data=sampler)
    callback.set_model(compiled())
    callback.set_params({"steps": 2, "epochs": 1})
    with pytest.raises(UsageError, match="fit has 2 steps, and the ResumableSampler has 3"):
        callback.fit_begins([])


def test_data_of_unknown_length_with_a_sampler_raise(hvd, tmp_path):
    from hvdkit.errors import UsageError

    callback = hvd.callbacks.Checkpoint(tmp_path, data=hvd.ResumableSampler(12, batch_size=4))
    callback.set_model(compiled())
    callback.set_params({"steps": None, "epochs": 1})
    with pytest.raises(UsageError, match="number of batches of fit's data is unknown"):
        callback.fit_begins([])


def test_a_loader_that_gives_batches_out_of_order_raises(hvd, tmp_path):
    import inspect

    import keras

    from hvdkit.errors import UsageError

    if keras.backend.backend() != "torch":
        pytest.skip("a DataLoader belongs to the PyTorch backend")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    if "in_order" not in inspect.signature(DataLoader).parameters:
        pytest.skip("this PyTorch has no in_order")
    x, y = values()
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    given = DataLoader(data, 4, num_workers=2, in_order=False)
    model = compiled()
    # Without a checkpoint, the order within an epoch has no effect.
    loader = hvd.shard(given)
    model.fit(loader, verbose=0)
    callback = hvd.callbacks.Checkpoint(tmp_path, data=loader.sampler)
    with pytest.raises(UsageError, match="in_order=False and 2 workers: expected in_order=True"):
        model.fit(loader, verbose=0, callbacks=[callback])


def test_each_rank_saves_its_statistics_beside_a_large_table(hvd):
    import keras

    from hvdkit.keras.items import _local

    model = with_large_table()
    model.compile(keras.optimizers.SGD(), loss="mse")
    assert {each.name for each in _local(model)} == {"moving_mean", "moving_variance"}


@pytest.mark.long_with("keras-tensorflow")
def test_a_checkpoint_without_optimizers_of_nested_models_is_read(hvd, tmp_path):
    """Earlier versions did not save them."""
    saved = compiled()
    fit(hvd, saved, tmp_path)
    model = compiled()
    model.get_layer("inner").compile("adam")
    with recorded("hvdkit.checkpoint") as records:
        fit(hvd, model, tmp_path)
    assert arrays(model) == arrays(saved)
    assert any("has no optimizers; not restored" in each.getMessage() for each in records)


def recurrent_model():
    import keras

    if keras.backend.backend() == "torch":
        # The backward pass raises, because Keras writes into a tensor that the pass needs.
        pytest.skip("Keras cannot train stateful layers on PyTorch")
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(4, 3)),
            keras.layers.Reshape((3, 1)),
            keras.layers.LSTM(2, stateful=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", loss="mse")
    return model


def wrapped_model():
    import keras

    if keras.backend.backend() != "torch":
        pytest.skip("TorchModuleWrapper needs PyTorch")
    import torch

    keras.utils.set_random_seed(3)
    normalized = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    layer = keras.layers.TorchModuleWrapper(normalized, output_shape=(None, 3))
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    return model


@pytest.mark.parametrize("make", [recurrent_model, wrapped_model])
def test_state_outside_of_the_variables_resumes(hvd, tmp_path, make):
    import keras

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("deliberate")

    def state(model):
        if make is recurrent_model:
            return [s.numpy().tolist() for s in model.layers[1].states]
        return [b.tolist() for b in model.layers[0].module.buffers()]

    whole, first, second = make(), make(), make()
    fit(hvd, whole, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="deliberate"):
        fit(hvd, first, tmp_path / "cut", every_steps=1, callbacks=[Stops()])
    callback, _ = fit(hvd, second, tmp_path / "cut", every_steps=1)
    assert callback.step == 3
    assert arrays(second) == arrays(whole)
    assert state(second) == state(whole)


@pytest.mark.parametrize("make", [recurrent_model, wrapped_model])
def test_a_checkpoint_without_this_state_is_read(hvd, tmp_path, make):
    """Earlier versions did not save it."""
    from hvdkit.keras import items

    saved, model = make(), make()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(items, "buffers_of", lambda model: [])
        patched.setattr(items, "recurrent_states", lambda model: [])
        fit(hvd, saved, tmp_path)
    fit(hvd, model, tmp_path)
    assert arrays(model) == arrays(saved)


def nadam():
    import keras

    return keras.optimizers.Nadam(0.01)


def halving():
    """Return an optimizer whose state Keras tracks only as attributes."""
    import keras

    class Halving(keras.optimizers.Optimizer):
        def build(self, variables):
            if not self.built:
                super().build(variables)
                self.factors = {"rate": keras.Variable(1.0, trainable=False)}

        def _backend_update_step(self, grads, trainable_variables, learning_rate):
            self.factors["rate"].assign(self.factors["rate"] / 2)
            super()._backend_update_step(grads, trainable_variables, learning_rate)

        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, gradient * self.factors["rate"] * learning_rate)

    return Halving(0.1)


@pytest.mark.parametrize("make", [nadam, halving])
def test_state_that_a_loss_scale_optimizer_does_not_count_resumes(hvd, tmp_path, make):
    """A `LossScaleOptimizer`, as of `mixed_float16`, builds the inner optimizer untracked."""
    import keras

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise RuntimeError("deliberate")

    def model():
        # The random states at the beginning are the same in each call.
        return compiled(keras.optimizers.LossScaleOptimizer(make()))

    fit(hvd, whole := model(), tmp_path / "whole")
    with pytest.raises(RuntimeError, match="deliberate"):
        fit(hvd, model(), tmp_path / "cut", every_steps=1, callbacks=[Stops()])
    callback, _ = fit(hvd, second := model(), tmp_path / "cut", every_steps=1)
    assert callback.step == 3
    assert arrays(second) == arrays(whole)


@pytest.mark.parametrize("changed", ["in the loss", "after a batch", "before an epoch"])
def test_variables_of_losses_and_schedules_resume(hvd, tmp_path, changed):
    """Keras counts them neither for the model nor for the optimizer."""
    import keras

    class Centered(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.center = keras.Variable(0.0, trainable=False)

        def call(self, y_true, y_pred):
            mean = keras.ops.stop_gradient(keras.ops.mean(y_pred))
            self.center.assign(0.5 * self.center + 0.5 * mean)
            return keras.ops.square(y_pred - self.center - keras.ops.cast(y_true, "float32"))

    class Shrinking(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self):
            self.rates = [keras.Variable(0.1, trainable=False)]

        def __call__(self, step):
            return self.rates[0] * 1.0

        def get_config(self):
            return {}

    class Hooks(keras.callbacks.Callback):
        def __init__(self, stops):
            super().__init__()
            self.stops = stops

        def halve(self):
            rate = self.model.optimizer._learning_rate.rates[0]
            rate.assign(rate * 0.5)

        def on_epoch_begin(self, epoch, logs=None):
            if changed == "before an epoch":
                self.halve()

        def on_train_batch_end(self, batch, logs=None):
            if changed == "after a batch":
                self.halve()
            if batch == 1 and self.stops:
                raise RuntimeError("deliberate")

    def trained(folder, stops=False):
        rate = 0.1 if changed == "in the loss" else Shrinking()
        model = compiled(keras.optimizers.SGD(rate))
        if changed == "in the loss":
            model.compile(model.optimizer, loss=Centered())
        fit(hvd, model, folder, every_steps=1, callbacks=[Hooks(stops)])
        return model

    whole = trained(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="deliberate"):
        trained(tmp_path / "cut", stops=True)
    assert arrays(trained(tmp_path / "cut")) == arrays(whole)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_that_its_first_step_has_built_resumes(hvd, tmp_path, scaled):
    """The paths of its variables have other name scopes than if hvdkit builds it."""
    import keras

    from hvdkit.errors import UsageError
    from hvdkit.keras.further_optimizers import OptimizerStates

    def made():
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Nadam(0.1)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
        return model, optimizer, OptimizerStates(model, lambda: {"own": optimizer})

    model, optimizer, states = made()
    optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_variables], model.weights)
    other, restored, own = made()
    saved = states.save()
    tensors = saved["own"]["variables"]
    saved["own"]["variables"] = {name: tensor.spec for name, tensor in tensors.items()}
    own.plan_restore(saved)
    assert restored.built
    assert list(own.save()["own"]["variables"]) != list(tensors)

    # Another class of optimizer has other variables.
    another = OptimizerStates(other, lambda: {"own": keras.optimizers.AdamW()})
    with pytest.raises(UsageError, match="does not fit the optimizer own"):
        another.plan_restore(saved)


@pytest.mark.parametrize("kind", ["arrays", "batches"])
# An epoch of 4 batches ends with the data, of which 2 batches are left in every other epoch.
@pytest.mark.parametrize("steps", [2, 4])
# At the end of an epoch, and within an epoch.
@pytest.mark.parametrize("after", [4, 5])
def test_an_epoch_of_a_part_of_the_data_continues_where_the_last_ended(
    hvd, tmp_path, kind, steps, after
):
    """With `steps_per_epoch`, Keras begins the data again only at their end."""
    import keras

    rows = np.arange(6, dtype="float32")[:, None]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return (rows[index : index + 1],) * 2

    class Recorder(keras.Sequential):
        def train_step(self, data):
            seen.append(int(data[0][0, 0]))
            return super().train_step(data)

    class Stops(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if len(seen) == after:
                raise RuntimeError("deliberate")

    def trained(folder, *callbacks):
        seen.clear()
        model = Recorder([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-6), loss="mse", run_eagerly=True)
        checkpoint = hvd.callbacks.Checkpoint(folder, every_steps=1)
        model.fit(
            *((rows, rows) if kind == "arrays" else (Batches(),)),
            batch_size=1 if kind == "arrays" else None,
            epochs=5,
            steps_per_epoch=steps,
            shuffle=False,
            verbose=0,
            callbacks=[checkpoint, *callbacks],
        )
        return list(seen)

    seen = []
    whole = trained(tmp_path / "whole")
    assert whole[:6] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="deliberate"):
        trained(tmp_path / "cut", Stops())
    assert trained(tmp_path / "cut") == whole[after:]
