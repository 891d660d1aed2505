"""Elastic states of Keras on one rank."""

import contextlib
import itertools
import threading
from collections import Counter
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from hvdkit.elastic.state import part_name
from hvdkit.errors import UsageError
from tests.commit_files import read_commit, write_commit
from tests.logs import recorded


def state_with_file(hvd, path):
    """Return a `KerasState` whose commits are written to `path`."""

    class State(hvd.elastic.KerasState):
        def commit(self):
            self.save()
            write_commit(self, path)

    return State


def test_a_commit_has_no_states_of_random_seeds(hvd, tmp_path):
    """After a restart, all ranks read the same commit, and must not drop the same units."""
    import keras

    layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.Adam(0.1), loss="mse")
    x = np.ones((2, 3), "float32")
    state = hvd.elastic.KerasState(model, epoch=1)
    write_commit(state, tmp_path / "commit")
    weights = model.get_weights()
    model.train_on_batch(x, x[:, :2])
    seeds = [v for v in model.variables if not any(v is weight for weight in model.weights)]
    drawn = [keras.ops.convert_to_numpy(seed).tolist() for seed in seeds]
    assert len(drawn) == 1
    state.epoch = 2
    read_commit(state, tmp_path / "commit")
    state.restore()
    assert state.epoch == 1
    for own, saved in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(own, saved)
    assert [keras.ops.convert_to_numpy(seed).tolist() for seed in seeds] == drawn


def test_old_and_new_ranks_commit_after_the_same_batches(hvd):
    """An old rank has counted batches before the hosts changed, and a new rank has not."""

    class State:
        commits = 0

        def commit(self):
            self.commits += 1

    state = State()
    callback = hvd.elastic.CommitStateCallback(state, batches_per_commit=3)
    for batches in (2, 2, 4):
        callback.on_train_begin()
        for batch in range(batches):
            callback.batches_trained(range(batch, batch + 1))
            callback.on_train_batch_end(batch)
    assert state.commits == 1


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize("counts_all", [False, True])
def test_fit_counts_from_0_or_from_the_first_epoch_left(hvd, tmp_path, counts_all):
    """After a restart, `fit` may get `initial_epoch=state.epoch`. No epoch counts twice."""
    import keras

    model = small_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    state = hvd.elastic.KerasState(model, epoch=0)
    update = hvd.elastic.UpdateEpochStateCallback(state)
    checkpoint = hvd.callbacks.Checkpoint(tmp_path)
    seen = []
    for ends in (1, 3, 4, 6):
        first = state.epoch if counts_all else 0
        history = model.fit(
            *(np.ones((4, 3)), np.ones((4, 2))),
            initial_epoch=first,
            epochs=first + ends - state.epoch,
            callbacks=[update, checkpoint],
            verbose=0,
        )
        seen.append((state.epoch, checkpoint._progress.position.epoch, len(history.epoch)))
    assert seen == [(1, 1, 1), (3, 3, 2), (4, 4, 1), (6, 6, 2)]


@pytest.mark.long_with("keras-tensorflow")
def test_a_checkpoint_that_is_resumed_counts_all_epochs(hvd, tmp_path):
    """Without a commit, `fit` resumes at the newest checkpoint, and `state.epoch` is 0."""
    seen = []
    for epochs in (2, 5):
        model = small_model()
        model.compile("sgd", loss="mse")
        state = hvd.elastic.KerasState(model, epoch=0)
        model.fit(
            *(np.ones((4, 3)), np.ones((4, 2))),
            epochs=epochs,
            callbacks=[
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.callbacks.Checkpoint(tmp_path),
            ],
            verbose=0,
        )
        seen.append(state.epoch)
    assert seen == [2, 5]


def test_a_state_contains_the_loss_scale_of_mixed_precision(hvd, tmp_path):
    """`compile` puts the given optimizer into a `LossScaleOptimizer`."""
    import keras

    model = small_model()
    inner = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse")
    state = hvd.elastic.KerasState(model, inner)
    model.optimizer.dynamic_scale.assign(8.0)
    state.save()
    write_commit(state, tmp_path / "commit")
    model.optimizer.dynamic_scale.assign(2.0)
    read_commit(state, tmp_path / "commit")
    state.restore()
    assert float(model.optimizer.dynamic_scale) == 8.0


def test_a_state_contains_what_a_loss_scale_optimizer_does_not_count(hvd, tmp_path):
    import keras

    model = small_model()
    inner = keras.optimizers.Nadam(0.1)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), loss="mse")
    state = hvd.elastic.KerasState(model)
    inner._u_product.assign(0.25)
    state.save()
    write_commit(state, tmp_path / "commit")
    inner._u_product.assign(0.5)
    read_commit(state, tmp_path / "commit")
    state.restore()
    assert float(inner._u_product) == 0.25


@pytest.mark.parametrize("holder", ["loss", "schedule"])
def test_a_state_contains_the_variables_of_losses_and_schedules(hvd, tmp_path, holder):
    """Keras counts them neither for the model nor for the optimizer."""
    import keras

    class Centered(keras.losses.MeanSquaredError):
        def __init__(self):
            super().__init__()
            self.kept = keras.Variable(1.0, trainable=False)

    class Shrinking(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self):
            self.kept = keras.Variable(1.0, trainable=False)

        def __call__(self, step):
            return self.kept * 0.1

        def get_config(self):
            return {}

    model, loss, schedule = small_model(), Centered(), Shrinking()
    model.compile(keras.optimizers.SGD(schedule), loss=loss)
    kept = loss.kept if holder == "loss" else schedule.kept
    state = hvd.elastic.KerasState(model)
    kept.assign(0.25)
    state.save()
    write_commit(state, tmp_path / "commit")
    kept.assign(0.5)
    read_commit(state, tmp_path / "commit")
    state.restore()
    assert float(kept) == 0.25


@pytest.mark.parametrize("before", [True, False])
def test_a_model_that_is_compiled_after_the_state_was_made(hvd, before):
    """The state of the new optimizer would be in no commit."""
    model = small_model()
    if before:
        model.compile("adam", "mse")
    state = hvd.elastic.KerasState(model)
    model.compile("sgd", "mse")
    state.save()
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(UsageError, match="compiled with a SGD that is not in the elastic state"):
        state.save()


def test_a_state_of_a_model_without_compile(hvd):
    import keras

    model = small_model()
    state = hvd.elastic.KerasState(model)
    weights = model.get_weights()
    model.set_weights([weight + 1 for weight in weights])
    state.restore()
    for own, saved in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(own, saved)
    assert hvd.elastic.KerasState(model, keras.optimizers.SGD()).optimizer.built


def test_optimizers_in_nested_lists_and_dicts_are_found(hvd):
    import keras

    from hvdkit.keras.further_optimizers import further_optimizers

    model = small_model()
    first, second, inner = (keras.optimizers.SGD() for _ in range(3))
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    model.of_parts = {"a": [first, scaled], "b": {"c": (second, first)}}
    model.again, model.another = inner, keras.optimizers.SGD()
    found = further_optimizers(model)
    assert found.pop("another") is model.another
    assert found == {
        "of_parts.a.0": first,
        "of_parts.a.1": scaled,
        "of_parts.b.c.0": second,
    }


def test_optimizers_of_nested_models_are_found(hvd):
    import keras

    from hvdkit.keras.further_optimizers import further_optimizers
    from hvdkit.keras.models import distributions_of

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = small_model(), {"a": [small_model()]}
            self.shared = keras.optimizers.SGD()
            self.first.compile(self.shared)
            self.second["a"][0].compile(hvd.DistributedOptimizer(keras.optimizers.Adam()))

        def train_step(self, data):
            raise NotImplementedError

    pair = Pair()
    found = further_optimizers(pair)
    assert found == {"shared": pair.shared, "second.a.0.optimizer": pair.second["a"][0].optimizer}
    assert further_optimizers(pair, nested=False) == {"shared": pair.shared}
    inner = small_model()
    inner.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()))
    x = keras.Input((3,))
    for outer in (keras.Sequential([x, inner]), keras.Model(x, inner(x))):
        found = further_optimizers(outer)
        assert list(found.values()) == [inner.optimizer]
        assert set(found) <= {"layers.0.optimizer", "layers.1.optimizer"}
        assert len(distributions_of(outer)) == 1
        # Keras's own `train_step` uses only the optimizer of `compile`.
        outer.compile("sgd")
        assert not distributions_of(outer)
    pair.compile()
    assert len(distributions_of(pair)) == 1


def test_an_optimizer_for_other_variables_is_an_error(hvd, tmp_path):
    """All variables have the same shapes, so the state would fit."""
    import keras

    def made(layer):
        layers = [keras.layers.Dense(3), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile("sgd", loss="mse")
        model.further = keras.optimizers.SGD(momentum=0.5)
        model.further.build(model.layers[layer].trainable_variables)
        return hvd.elastic.KerasState(model)

    write_commit(made(0), tmp_path / "commit")
    read_commit(made(0), tmp_path / "commit")
    state = made(1)
    read_commit(state, tmp_path / "commit")
    with pytest.raises(UsageError, match="further is built for other variables"):
        state.restore()


def test_changes_in_place_are_undone(hvd):
    """Also in a second `restore`."""
    objects = {"seen": [1], "values": np.zeros(2), "nested": {"a": [1]}}
    for state in (
        hvd.elastic.KerasState(small_model(), **objects),
        hvd.elastic.ObjectState(seen=[1]),
    ):
        for end in (state.restore, state.restore, state.save, state.restore, state.sync):
            before = len(state.seen)
            state.seen.append(2)
            if hasattr(state, "values"):
                state.values[0] += 1
                state.nested["a"].append(2)
            end()
            kept = before + int(end.__name__ != "restore")
            assert len(state.seen) == kept
            if hasattr(state, "values"):
                assert (state.values[0], len(state.nested["a"])) == (kept - 1, kept)
        assert objects["seen"] is not state.seen


def test_objects_that_cannot_be_pickled_are_an_error(hvd):
    with pytest.raises(UsageError, match="lock of type lock cannot be pickled .* Omit it"):
        hvd.elastic.KerasState(small_model(), lock=threading.Lock(), seen=[])


def test_sync_keeps_objects_that_the_script_has_set(hvd):
    """The script may restore weights and epoch from a checkpoint, before the training function."""
    model = small_model()
    state = hvd.elastic.KerasState(model, epoch=0)
    model.set_weights([weight + 1 for weight in model.get_weights()])
    weights = model.get_weights()
    state.epoch = 3
    began = []

    @hvd.elastic.run
    def train(state):
        began.append((state.epoch, [weight.tolist() for weight in model.get_weights()]))

    train(state)
    assert began == [(3, [weight.tolist() for weight in weights])]


class _KilledError(Exception):
    pass


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize(
    ("kills", "counts_all"), [((2,), True), ((1, 2), False), ((4,), True), ((4,), False)], ids=str
)
def test_a_commit_after_an_epoch_contains_the_states_of_callbacks(hvd, tmp_path, kills, counts_all):
    """`History` is the last callback of Keras. `EarlyStopping` ends the training after 4 epochs.

    The numbers in `kills` are the completed epochs. The kill after 4 epochs is after `fit`.
    """
    import keras

    from hvdkit.runtime.elastic_start import ElasticStart

    left = list(kills)

    class Losses(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = [4.0, 3.0, 2.0, 3.0, 1.0, 0.5][state.epoch]

        def on_epoch_begin(self, epoch, logs=None):
            kill()

    State = state_with_file(hvd, tmp_path / "commit")

    def kill():
        if state.epoch in left:
            left.remove(state.epoch)
            raise _KilledError

    def start():
        if (tmp_path / "commit").exists():
            read_commit(state, tmp_path / "commit")
            state.restore()
        history = state.model.fit(
            *(np.ones((4, 3)), np.ones((4, 2))),
            initial_epoch=state.epoch if counts_all else 0,
            epochs=6 if counts_all else 6 - state.epoch,
            callbacks=[
                Losses(),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
                keras.callbacks.EarlyStopping("loss", patience=1),
                hvd.callbacks.Checkpoint(tmp_path / "checkpoints"),
            ],
            verbose=0,
        )
        kill()
        return history.history["loss"]

    for _ in (*kills, None):
        model = small_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        state = State(model, epoch=0)
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.suppress(_KilledError),
        ):
            patch.setattr(ElasticStart, "read", lambda: object())
            losses = start()
    assert not left
    assert losses == [4.0, 3.0, 2.0, 3.0]
    assert (state.epoch, int(model.optimizer.iterations)) == (4, 4)


def test_a_resumed_epoch_repeats_no_changes_of_its_begin(hvd, tmp_path):
    """The commit contains what the callbacks did when the epoch first began."""
    import keras

    State = state_with_file(hvd, tmp_path / "commit")

    class Seen(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.scale.assign(self.model.scale / 2)

        def on_train_batch_begin(self, batch, logs=None):
            if len(seen) == 4:
                raise _KilledError
            seen.append(float(self.model.optimizer.learning_rate))
            assert float(self.model.scale) == seen[-1]

    def start():
        model = small_model()
        model.scale = model.add_weight(shape=(), initializer="ones", trainable=False)
        model.compile(keras.optimizers.SGD(1.0), loss="mse")
        state = State(model, epoch=0, batch=0)
        if seen:
            read_commit(state, tmp_path / "commit")
            state.restore()
        model.fit(
            *(np.ones((12, 3)), np.ones((12, 2))),
            batch_size=4,
            initial_epoch=state.epoch,
            epochs=2,
            callbacks=[
                keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2),
                Seen(),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ],
            verbose=0,
        )

    seen = []
    with pytest.raises(_KilledError):
        start()
    seen.append(None)
    start()
    assert seen == [0.5, 0.5, 0.5, 0.25, None, 0.25, 0.25]


@pytest.mark.long_with("keras-tensorflow")
@pytest.mark.parametrize(("steps", "trained"), [(8, 5), (4, 2), (2, 1), (16, 8)])
def test_another_number_of_batches_keeps_the_fraction_of_the_epoch(hvd, tmp_path, steps, trained):
    """Without this, half of an epoch is lost if a second rank joins after half of it."""
    import keras

    models = [small_model() for _ in range(2)]
    for model in models:
        model.compile("sgd", loss="mse")
    first, second = (hvd.elastic.KerasState(model, epoch=0, batch=0) for model in models)

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if first.batch == 5:
                first.save()
                raise _KilledError

    def fit(state, steps, *callbacks):
        data = np.ones((steps, 3)), np.ones((steps, 2))
        callbacks = [hvd.elastic.UpdateBatchStateCallback(state), *callbacks]
        state.model.fit(*data, batch_size=1, verbose=0, callbacks=callbacks)

    with pytest.raises(_KilledError):
        fit(first, 8, Interrupt())
    write_commit(first, tmp_path / "commit")
    read_commit(second, tmp_path / "commit")
    second.restore()
    fit(second, steps)
    assert int(second.model.optimizer.iterations) == 5 + steps - trained


def test_another_number_of_ranks_loses_no_samples(hvd):
    """The last batches of an epoch may be smaller than the others, or dropped."""
    from hvdkit.keras.fit.resuming import EpochSize

    drawn = itertools.product(range(12, 40), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4), (False, True))
    for count, batch, old, new, drops in drawn:
        before, now = (
            EpochSize((count if drops else count + ranks * batch - 1) // (ranks * batch), ranks)
            for ranks in (old, new)
        )
        for trained in range(before.steps):
            skipped = now.resumed_after(trained, before)
            assert skipped * new <= trained * old
            assert old != new or skipped == trained
            # The number of batches is unknown.
            skipped = EpochSize(None, new).resumed_after(trained, before)
            assert skipped * new <= trained * old


@pytest.mark.parametrize(
    ("has_checkpoint", "in_state"),
    [
        (False, True),
        pytest.param(True, False, marks=pytest.mark.long_with("keras-tensorflow")),
    ],
)
def test_a_sampler_continues_its_epoch(hvd, tmp_path, has_checkpoint, in_state):
    """The killed epoch is not the first, so its samples have another order."""
    import keras

    from hvdkit.keras import data
    from hvdkit.runtime.elastic_start import ElasticStart

    State = state_with_file(hvd, tmp_path / "commit")

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if kills and (state.epoch, batch) == kills[0]:
                kills.pop(0)
                raise _KilledError

    def fit():
        callbacks = [
            *(hvd.elastic.UpdateBatchStateCallback(state), Kill()),
            *(hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)),
        ]
        if has_checkpoint:
            callbacks.append(hvd.callbacks.Checkpoint(tmp_path / "checkpoints", data=sampler))
        samples = sampler.arrays((np.eye(8, dtype="float32"), np.zeros((8, 1))))
        options = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
        state.model.fit(samples, initial_epoch=state.epoch, epochs=4, **options)

    kills = [(1, 3), (2, 0)]
    for killed in (True, True, False):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((8,)), layer])
        # Each weight becomes the number of times that its sample is trained.
        model.compile(keras.optimizers.SGD(2.0), loss=lambda _, output: -output, metrics=["mae"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ElasticStart, "read", lambda: object())
            patch.setattr(data, "_made", Counter())  # as in a new process
            patch.setattr(data, "_samplers", WeakKeyDictionary())
            sampler = hvd.ResumableSampler(8, batch_size=2, seed=1)
            more = {"sampler": sampler} if in_state else {}
            state = State(model, epoch=0, batch=0, **more)
            if (tmp_path / "commit").exists():
                read_commit(state, tmp_path / "commit")
                state.restore()
            with pytest.raises(_KilledError) if killed else contextlib.nullcontext():
                fit()
    np.testing.assert_allclose(model.get_weights()[0], 4)


def test_a_state_of_objects_keeps_the_epochs_of_samplers(hvd, tmp_path):
    """`fit` counts them."""
    sampler = hvd.ResumableSampler(8, batch_size=2, seed=97)
    model = small_model()
    model.compile("sgd", loss="mse")

    def fit(epochs):
        samples = sampler.arrays((np.ones((8, 3)), np.ones((8, 2))))
        model.fit(samples, shuffle=False, epochs=epochs, verbose=0)

    fit(2)
    state = hvd.elastic.ObjectState(epoch=2)
    write_commit(state, tmp_path / "commit")
    sampler.set_epoch(0)
    read_commit(state, tmp_path / "commit")
    fit(1)
    assert sampler.epoch == 3


@pytest.mark.long_with("keras-tensorflow")
def test_a_loop_over_a_sampler_that_calls_fit_of_another_model(hvd):
    sampler = hvd.ResumableSampler(8, batch_size=2, seed=3)
    teacher = small_model()
    teacher.compile("sgd", loss="mse")
    state = hvd.elastic.ObjectState(sampler=sampler)
    found = []
    for _ in sampler.batches():
        state.save()
        found.append(state._saved[part_name("sampler", "sampler")].tree["consumed"])
        teacher.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0)
    assert found == [2, 4, 6, 8]


class Holder:
    """An object of a script."""

    def __init__(self, held):
        self.held = held


def built_optimizer(keras, model):
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    return optimizer


#: Values that a state cannot copy: the copy would not be used, or would use other copies.
NOT_COPIED = {
    r"second is a SGD": lambda keras, model: built_optimizer(keras, model),
    r"second\[0\] is a SGD": lambda keras, model: [built_optimizer(keras, model)],
    r"second\['step'\] is a Variable": lambda keras, _: {"step": keras.Variable(1.0)},
    r"second is a Sequential": lambda *_: small_model(),
    r"second\[0\] is a ResumableSampler": lambda keras, _: [made_sampler()],
    r"second .* refers to a Variable": lambda _, model: Holder(model.trainable_variables),
}


def made_sampler():
    import hvdkit.keras as hvd

    return hvd.ResumableSampler(8, 2)


@pytest.mark.parametrize("error", NOT_COPIED)
def test_values_that_cannot_be_copied(hvd, error):
    import keras

    model = small_model()
    with pytest.raises(UsageError, match=error):
        hvd.elastic.KerasState(model, second=NOT_COPIED[error](keras, model))
    if "refers" in error:
        return
    # Also later, and for a state that keeps objects only.
    state = hvd.elastic.KerasState(model, second=None)
    with pytest.raises(UsageError, match=error):
        state.second = NOT_COPIED[error](keras, model)
    with pytest.raises(UsageError, match=error):
        hvd.elastic.ObjectState(second=NOT_COPIED[error](keras, model))


def test_values_that_are_copied(hvd):
    import keras

    values = [keras.ops.ones(2), np.zeros(2), {"rate": 0.5}]
    # To copy a metric on PyTorch, Keras imports TensorFlow, which takes seconds.
    metric = keras.metrics.Mean() if keras.backend.backend() == "tensorflow" else None
    state = hvd.elastic.KerasState(small_model(), metrics={"loss": metric}, values=values)
    state.sync()
    state.values[1] += 1
    state.values[2]["rate"] = 0.25
    state.restore()
    assert (state.values[1].tolist(), state.values[2]["rate"]) == ([0, 0], 0.5)


@pytest.mark.long_with("keras-tensorflow")
def test_a_state_that_begins_after_the_end_of_the_epoch(hvd):
    """Horovod's example begins with `batch=100`. `fit` would have an epoch without batches."""
    model = small_model()
    model.compile("sgd", loss="mse")
    state = hvd.elastic.KerasState(model, batch=100)
    callbacks = [hvd.elastic.UpdateBatchStateCallback(state)]
    with recorded("hvdkit.keras") as records:
        history = model.fit(np.ones((8, 3)), np.ones((8, 2)), 4, verbose=0, callbacks=callbacks)
    assert "loss" in history.history
    assert "state.batch is 100, but an epoch of fit has only 2 batches" in records[0].getMessage()


def small_model():
    import keras

    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
