"""Horovod's callbacks, broadcasts, collectives and elastic states on several ranks."""

import os

import numpy as np
import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from tests.ranks.folders import shared_folder
from tests.ranks.frameworks import keras
from tests.ranks.keras.job import (
    STEPS,
    all_samples,
    classifier,
    distributed,
    fit,
    of_every_rank,
    same_everywhere,
    samples,
    skip_without_executions,
)

DTYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int32",
    "int64",
    "uint32",
    "bool",
]


def contents(variables):
    return [keras.ops.convert_to_numpy(v).astype("float64").tolist() for v in variables]


def test_variables_of_every_dtype_are_broadcast(hvd):
    from hvdkit.keras import backend

    random = np.random.default_rng(hvd.rank())
    shapes = [(), (3,), (7, 5), (0, 2)]
    variables = [
        keras.Variable(random.integers(0, 2, shape), dtype=dtype, trainable=False)
        for dtype in DTYPES
        for shape in shapes
    ]
    # Values that a cast would change.
    special = [np.nan, -0.0, np.inf, 1e-45] if hvd.rank() == 1 else np.zeros(4)
    variables.append(keras.Variable(np.array(special, "float32"), trainable=False))
    before = of_every_rank(contents(variables))
    with pytest.MonkeyPatch.context() as patch:
        # So small that variables are sent in several chunks.
        patch.setattr(backend._functions, "_CHUNK_BYTES", 100)
        backend.broadcast_variables(variables, root_rank=1)
    after = contents(variables)
    assert str(after) == str(before[1])
    assert before[0] != before[1]
    last = keras.ops.convert_to_numpy(variables[-1])
    assert np.signbit(last[1])
    assert last[3] == np.float32(1e-45)


def test_broadcast_of_different_variables_raises(hvd):
    from hvdkit.keras import backend

    shape = (2 + hvd.rank() % 2,)
    with pytest.raises(RankMismatchError, match=r"variable 0, float32 \[2\]"):
        backend.broadcast_variables([keras.Variable(np.zeros(shape, "float32"))], 0)
    with pytest.raises(UsageError, match="root_rank is 9"):
        backend.broadcast_variables([keras.Variable(np.zeros(2))], 9)


def test_sum_arrays_is_exact(hvd):
    from hvdkit.keras import backend

    large = 2**40 + 1
    arrays = [np.array(large), np.arange(6.0).reshape(2, 3), np.zeros((0, 4)), np.array([True])]
    sums = backend.sum_arrays(arrays, "tests.sum")
    assert [total.shape for total in sums] == [array.shape for array in arrays]
    assert int(sums[0]) == large * hvd.size()
    assert sums[1].tolist() == (arrays[1] * hvd.size()).tolist()
    assert sums[3].tolist() == [hvd.size()]


def test_broadcast_callback_copies_weights_and_optimizer_state(hvd):
    class Begin(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                self.weights = contents(self.model.weights)
                self.state = contents(self.model.optimizer.variables)

    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (1 + hvd.rank())))
    model = classifier(optimizer, seed=hvd.rank())
    if hvd.rank() == 1:
        # As if this rank had read a checkpoint.
        optimizer.build(model.trainable_variables)
        for variable in optimizer.variables:
            variable.assign(keras.ops.ones_like(variable) * (7 if "iter" in variable.path else 0.5))
    wanted = of_every_rank(contents(model.weights))
    begin = Begin()
    fit(hvd, model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1), begin])
    assert begin.weights == wanted[1] != wanted[0]
    same_everywhere(begin.state)
    assert {value for values in begin.state for value in np.ravel(values)} == {7.0, 0.5}
    assert int(optimizer.iterations) == 7 + STEPS
    same_everywhere(contents([*model.weights, *optimizer.variables]))


def test_a_model_that_fit_builds_is_broadcast_after_the_first_batch(hvd):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(distributed(hvd, 0.1), loss="mse")
    fit(hvd, model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    same_everywhere(contents(model.weights))


@pytest.mark.long_with("keras-tensorflow")
def test_a_callback_broadcasts_each_model_that_it_is_passed_for(hvd):
    models = [classifier(distributed(hvd, 0.1), seed=3 * i + hvd.rank()) for i in range(2)]
    wanted = of_every_rank(contents(models[1].weights))[0]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(hvd, models[0], callbacks=[callback])
    begin = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: begin.append(contents(models[1].weights))
    )
    fit(hvd, models[1], callbacks=[callback, record])
    assert begin[0] == wanted
    for model in models:
        same_everywhere(contents(model.weights))


@pytest.mark.long_with("keras-tensorflow")
def test_seeds_are_not_broadcast(hvd):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(distributed(hvd, 0.1), loss="mse")
    fit(hvd, model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    (seed,) = [v for v in model.variables if "seed" in v.path]
    assert len({str(s) for s in of_every_rank(contents([seed]))}) == hvd.size()
    same_everywhere(contents(model.weights))


@pytest.mark.long_with("keras-tensorflow")
def test_local_variables_are_not_broadcast(hvd):
    model = classifier(distributed(hvd), seed=hvd.rank())
    kernel, framework_bias = model.layers[0].kernel, model.layers[0].bias.value
    model.layers[0].bias.assign(np.full(4, hvd.rank()))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=kernel)
    callback.register_local_var(framework_bias)
    fit(hvd, model, callbacks=[callback])
    for variable in (kernel, model.layers[0].bias):
        assert len({str(v) for v in of_every_rank(contents([variable]))}) == hvd.size()
    same_everywhere(contents(model.layers[1].weights))


@pytest.mark.long_with("keras-tensorflow")
def test_the_loss_scale_is_broadcast(hvd):
    inner = keras.optimizers.SGD(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(
        hvd.DistributedOptimizer(inner), initial_scale=2.0 ** (4 + hvd.rank())
    )
    model = classifier(optimizer, seed=hvd.rank())
    fit(hvd, model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
    assert same_everywhere(float(optimizer.dynamic_scale)) == 32.0
    same_everywhere(contents([*model.weights, *optimizer.variables]))


@pytest.mark.long_with("keras-tensorflow")
def test_warmup_rates(hvd):
    """tests/unit/keras/test_callbacks.py has the correction of the momentum."""
    model, rates = classifier(distributed(hvd, 0.2)), []

    def note_rate(batch, logs):
        rates.append(float(model.optimizer.learning_rate))

    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2),
        keras.callbacks.LambdaCallback(on_train_batch_end=note_rate),
    ]
    history = fit(hvd, model, epochs=3, callbacks=callbacks).history
    assert history["lr"] == rates[STEPS - 1 :: STEPS]
    size = hvd.size()
    warm = [0.2 / size * ((k + 1) / STEPS * (size - 1) / 2 + 1) for k in range(2 * STEPS)]
    assert rates == pytest.approx([*warm, 0.2, 0.2, 0.2])
    assert rates[0] < rates[1] < rates[-1]


@pytest.mark.parametrize("together", [2, 3, 5])
@pytest.mark.long_with("keras-tensorflow")
def test_warmup_with_steps_per_execution(hvd, together):
    skip_without_executions()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)),
        loss="mse",
        steps_per_execution=together,
    )
    x = np.ones((4 * 6, 1), "float32")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2)
    history = fit(hvd, model, data=(x, x), epochs=3, callbacks=[warmup]).history
    half = 0.2 / hvd.size() * ((hvd.size() - 1) / 2 + 1)
    assert history["lr"] == pytest.approx([half, 0.2, 0.2])


def test_the_number_of_batches_is_known_on_some_ranks_only(hvd):
    """A callback that needs the number raises on all ranks, because all count the same."""
    x, y = np.ones((4 * STEPS, 3), "float32"), np.ones((4 * STEPS, 1), "float32")
    model = classifier(distributed(hvd))
    own = (x, y) if hvd.rank() == 0 else (((x[:4], y[:4]) for _ in range(STEPS)),)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.2)
    with pytest.raises(UsageError, match="number of batches in an epoch is unknown"):
        model.fit(*own, verbose=0, callbacks=[warmup])


@pytest.mark.long_with("keras-tensorflow")
def test_best_model_checkpoint_is_written_once(hvd):
    with shared_folder(hvd) as folder:
        path = os.path.join(folder, f"{hvd.rank()}.keras")
        callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        callback.filepath = path
        model = classifier(distributed(hvd, 0.1))
        fit(hvd, model, callbacks=[callback])
        of_every_rank("written")
        assert os.listdir(folder) == ["0.keras"]
    if hvd.rank() == 0:
        with pytest.raises(UsageError, match="no filepath"):
            hvd.callbacks.BestModelCheckpoint().on_train_begin()


def test_metric_average_callback_in_a_custom_loop(hvd):
    logs = {"loss": float(hvd.rank()), "accuracy": np.float32(2 * hvd.rank())}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    mean = sum(range(hvd.size())) / hvd.size()
    assert logs == {"loss": mean, "accuracy": 2 * mean}


def test_logs_of_some_ranks_in_a_custom_loop(hvd):
    """All ranks get the mean over the ranks that have the number."""
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + hvd.rank(), "text": "x"}
    if hvd.rank() == 1:
        logs["val_loss"] = np.float32(0.5)
    callback.on_epoch_end(0, logs)
    mean = 1 + sum(range(hvd.size())) / hvd.size()
    assert logs == {"loss": mean, "text": "x", "val_loss": 0.5}
    for empty in ({}, None):
        logs = {"loss": np.inf, "nested": {"a": 3}} if hvd.rank() == 1 else empty
        callback.on_epoch_end(1, logs)
        assert logs is None or logs == {"loss": np.inf, "a": 3.0}


# The callback, and whether it does nothing in `local_fit`.
IN_LOCAL_FIT = {
    "Broadcast": (lambda hvd, _: hvd.callbacks.BroadcastGlobalVariablesCallback(0), True),
    "MetricAverage": (lambda hvd, _: hvd.callbacks.MetricAverageCallback(), True),
    "Checkpoint": (lambda hvd, folder: hvd.callbacks.Checkpoint(folder), False),
    "Monitor": (lambda hvd, _: hvd.callbacks.MonitorCallback([]), False),
    "Profile": (lambda hvd, folder: hvd.callbacks.ProfileCallback(folder / "trace.gz"), False),
    "CommitState": (
        lambda hvd, _: hvd.elastic.CommitStateCallback(hvd.elastic.ObjectState(epoch=0)),
        False,
    ),
}


@pytest.mark.parametrize("name", IN_LOCAL_FIT)
def test_callbacks_with_collectives_in_a_local_fit(hvd, name, tmp_path):
    make, omitted = IN_LOCAL_FIT[name]
    if hvd.rank() == 1:
        with hvd.local_fit():
            if omitted:
                fit(hvd, classifier("sgd"), callbacks=[make(hvd, tmp_path)])
            else:
                with pytest.raises(UsageError, match=f"{name}.* needs all ranks, but fit trains"):
                    fit(hvd, classifier("sgd"), callbacks=[make(hvd, tmp_path)])
    same_everywhere("the other ranks did not wait")


@pytest.mark.long_with("keras-tensorflow")
def test_a_local_fit_does_not_count_in_a_trial(hvd):
    """`hvdkit tune` must not end this rank's own `fit`."""
    from hvdkit.training.trial import VARIABLE, TrialPlan

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, TrialPlan(steps=1).to_json())
        if hvd.rank() == 1:
            with hvd.local_fit():
                fit(hvd, classifier("sgd"))
    same_everywhere("the other ranks did not wait")


@pytest.mark.parametrize("name", ["Broadcast", "Checkpoint", "Monitor"])
def test_a_callback_with_collectives_on_one_rank_only(hvd, name, tmp_path):
    make, _ = IN_LOCAL_FIT[name]
    callbacks = [make(hvd, tmp_path)] if hvd.rank() == 1 else []
    with pytest.raises(UsageError, match=rf"different callbacks .*ranks? 0.*none; rank 1: {name}"):
        fit(hvd, classifier(distributed(hvd)), callbacks=callbacks)
    same_everywhere("no rank waits")


@pytest.mark.parametrize("name", ["Checkpoint", "BackupAndRestore"])
def test_a_model_that_is_built_on_one_rank_only(hvd, name, tmp_path):
    if keras.backend.backend() == "torch":
        pytest.skip("on PyTorch, fit builds the model before the callbacks begin")
    make = {
        "Checkpoint": hvd.callbacks.Checkpoint,
        "BackupAndRestore": keras.callbacks.BackupAndRestore,
    }[name]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(1, activation="sigmoid")])
    model.compile(distributed(hvd), loss="binary_crossentropy")
    if hvd.rank() == 1:
        model(samples(0)[0])
    with pytest.raises(HvdkitError, match="the model is not built"):
        fit(hvd, model, callbacks=[make(tmp_path)])
    same_everywhere("no rank waits")


@pytest.mark.long_with("keras-tensorflow")
def test_a_distributed_optimizer_in_a_local_fit(hvd):
    model = classifier(distributed(hvd))
    if hvd.rank() == 1:
        with pytest.raises(UsageError, match="compiled with a hvd.Distributed"), hvd.local_fit():
            fit(hvd, model)
    same_everywhere("the other ranks did not wait")
    fit(hvd, model)  # the error has ended the context


def fit_with(hvd, callback):
    fit(hvd, classifier(distributed(hvd)), callbacks=[callback])


# The call, with an argument that depends on the rank; the argument of most ranks and of one rank;
# and the error on all ranks. None stands for a model.
BAD_ARGUMENTS = {
    "broadcast_model": (
        lambda hvd, model: hvd.broadcast_model(model or classifier("sgd"), 0),
        None,
        "model",
        "model is a str: expected a Keras model",
    ),
    "broadcast_model from": (
        lambda hvd, root: hvd.broadcast_model(classifier("sgd"), root),
        0,
        99,
        "root_rank is 99: expected one of",
    ),
    "broadcast callback": (
        lambda hvd, root: fit_with(hvd, hvd.callbacks.BroadcastGlobalVariablesCallback(root)),
        0,
        -1,
        "root_rank is -1: expected one of",
    ),
    "Monitor": (
        lambda hvd, every: fit_with(hvd, hvd.callbacks.MonitorCallback([], every=every)),
        1,
        0,
        "every is 0: expected a whole number",
    ),
    "shard": (
        lambda hvd, tail: hvd.shard((np.ones((4, 3)), np.ones(4)), tail=tail),
        "drop",
        "keep",
        "tail is 'keep': expected 'drop' or 'pad'",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_of_one_rank_raises_on_every_rank(hvd, name):
    call, good, bad, error = BAD_ARGUMENTS[name]
    with pytest.raises(HvdkitError, match=error):
        call(hvd, bad if hvd.rank() == 1 else good)
    same_everywhere("no rank waits")


def test_collectives_on_values(hvd):
    def array(tensor):
        return keras.ops.convert_to_numpy(tensor).tolist()

    rank, size = hvd.rank(), hvd.size()
    total = sum(range(size))
    assert array(hvd.allreduce([1.0 * rank, 2.0 * rank])) == [total / size, 2 * total / size]
    assert array(hvd.allreduce(1.0 * rank, average=False)) == total
    assert array(hvd.allreduce(np.float64(rank), op=hvd.Sum, compression=hvd.Compression.fp16)) == (
        total
    )
    with pytest.raises(UsageError, match="both op and average"):
        hvd.allreduce(1.0, average=True, op=hvd.Sum)
    assert array(hvd.allgather([rank] * (rank + 1))) == [
        r for r in range(size) for _ in range(r + 1)
    ]
    assert array(hvd.broadcast(np.array([rank, 5]), 1)) == [1, 5]
    assert array(hvd.reducescatter(np.arange(float(size)) * rank)) == [rank * total / size]
    with pytest.raises(UsageError, match="broadcast_model"):
        hvd.broadcast_global_variables(0)


@pytest.mark.long_with("keras-tensorflow")
def test_elastic_state_sync_save_and_restore(hvd):
    model = classifier(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), seed=hvd.rank())
    state = hvd.elastic.KerasState(model, epoch=10 + hvd.rank(), batch=0)
    state.sync()
    assert state.epoch == 10
    begin = same_everywhere(contents([*model.weights, *model.optimizer.variables]))
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
    ]
    fit(hvd, model, epochs=2, callbacks=callbacks)
    assert (state.epoch, state.batch) == (12, 0)
    assert contents(model.weights) != begin[: len(model.weights)]
    state.restore()
    assert state.epoch == 10
    assert contents([*model.weights, *model.optimizer.variables]) == begin
    state.epoch = 11
    state.save()
    fit(hvd, model)
    state.restore()
    assert state.epoch == 11


@pytest.mark.long_with("keras-tensorflow")
def test_commits_after_batches_and_epochs(hvd):
    class State:
        commits = 0

        def commit(self):
            self.commits += 1

    state = State()
    callback = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
    fit(hvd, classifier(distributed(hvd)), epochs=2, callbacks=[callback])
    # The last batch of an epoch is committed with the epoch.
    assert state.commits == 2 * ((STEPS - 1) // 2) + 2


def test_elastic_callbacks_count_batches_that_are_executed_together(hvd):
    """Of the ten batches, the last execution has only two."""
    skip_without_executions()
    seen = []

    class State:
        batch = 0

        def commit(self):
            seen.append(("commit", self.batch))

    state = State()
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(("batch", state.batch))
        ),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
    ]
    data = np.ones((40, 3), "float32"), np.ones((40, 1), "float32")
    fit(hvd, classifier(distributed(hvd), steps_per_execution=4), data=data, callbacks=callbacks)
    counted = [("batch", 4), ("commit", 4), ("batch", 8), ("commit", 8), ("batch", 10)]
    assert seen == [*counted, ("commit", 0)]


def test_a_trial_counts_batches_that_are_executed_together(hvd):
    """Of the ten batches of an epoch, the last execution has only two."""
    from hvdkit.keras.fit.trial import TrialCallback
    from hvdkit.training import trial

    skip_without_executions()
    callback = TrialCallback(trial.TrialPlan(steps=18))
    data = np.ones((40, 3), "float32"), np.ones((40, 1), "float32")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_counting", "_reported"):
            patch.setattr(trial, name, False)
        patch.setattr(trial, "report_at_exit", lambda *_: None)
        model = classifier(distributed(hvd), steps_per_execution=4)
        with pytest.raises(SystemExit):
            fit(hvd, model, data=data, epochs=3, callbacks=[callback])
    assert callback._count.made == 18


@pytest.mark.long_with("keras-tensorflow")
def test_metrics_of_a_bfloat16_model(hvd):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = classifier(distributed(hvd))
        history = fit(hvd, model, validation_data=samples(hvd.rank(), 1)).history
        plain = classifier("sgd")
    finally:
        keras.config.set_dtype_policy("float32")
    expected = plain.evaluate(*all_samples(hvd.size()), verbose=0, return_dict=True)
    assert history["accuracy"][0] == pytest.approx(expected["accuracy"])
    assert history["loss"][0] == pytest.approx(expected["loss"], rel=2e-2)
