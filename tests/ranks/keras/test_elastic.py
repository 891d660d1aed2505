"""Elastic states of Keras: commits contain the state of the reduction."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from hvdkit.elastic import parts
from hvdkit.elastic.state import POSITIONS
from hvdkit.errors import UsageError
from tests.commit_files import read_commit, write_commit
from tests.ranks.elastic_hosts import commit_in, host_of_its_own
from tests.ranks.keras.job import classifier, distributed, same_everywhere
from tests.ranks.keras.test_checkpoint import Interrupted, interrupt_after

STEPS, COMMITTED = 12, 6


def train(hvd, model, state, until, commit=None):
    """Train to a step, and return the weights after each step. Commit at step `COMMITTED`."""
    passes = model.optimizer._hvdkit_distribution.accumulation_steps
    seen = []
    while state.step < until:
        if state.step == COMMITTED and commit is not None:
            state.save()
            write_commit(state, commit)
        for number in range(passes):
            random = np.random.default_rng([state.step, number, hvd.rank()])
            x, y = random.normal(size=(4, 3)), random.integers(0, 2, (4, 1))
            # The magnitude of the gradients changes, and with it the scales.
            model.train_on_batch(x, y, sample_weight=np.full(4, 2.0 ** (9 * (state.step % 4) - 30)))
        state.step += 1
        seen.append([weight.tobytes() for weight in model.get_weights()])
    return seen


def made(hvd, **options):
    # Small buckets: each variable has its own scale.
    optimizer = distributed(hvd, 1.0, compression="fp16", bucket_bytes=16, **options)
    model = classifier(optimizer, metrics=())
    return model, hvd.elastic.KerasState(model, step=0)


@pytest.mark.parametrize(
    "passes", [pytest.param(1, marks=pytest.mark.long_with("keras-tensorflow")), 2]
)
def test_a_commit_contains_the_scales_of_fp16(hvd, passes):
    """The last rank has no commit, as on a host that was lost. It gets the state of rank 0."""
    model, state = made(hvd, accumulation_steps=passes)
    with tempfile.TemporaryDirectory() as folder:
        commit = Path(folder) / "commit"
        expected = same_everywhere(digests(train(hvd, model, state, STEPS, commit)[COMMITTED:]))
        restarted, restarted_state = made(hvd, accumulation_steps=passes)
        if hvd.rank() < hvd.size() - 1:
            read_commit(restarted_state, commit)
            restarted_state.restore()
    restarted_state.sync()
    assert restarted_state.step == COMMITTED
    assert digests(train(hvd, restarted, restarted_state, STEPS)) == expected
    # In the same process: `restore` also discards the gradients of an open window.
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    state.restore()
    assert state.step == COMMITTED
    assert digests(train(hvd, model, state, STEPS)) == expected


def digests(steps):
    return [[weight.hex() for weight in weights] for weights in steps]


@pytest.mark.long_with("keras-tensorflow")
def test_a_restore_to_the_beginning_forgets_the_scales(hvd):
    model, state = made(hvd)
    expected = digests(train(hvd, model, state, 3))
    state.restore()
    assert digests(train(hvd, model, state, 3)) == expected


@pytest.mark.long_with("keras-tensorflow")
def test_a_commit_without_a_reduction_is_read(hvd):
    """A commit of a model whose optimizer was not wrapped."""
    import keras

    plain = classifier(keras.optimizers.SGD(1.0), metrics=(), seed=5)
    with tempfile.TemporaryDirectory() as folder:
        commit = Path(folder) / "commit"
        old = hvd.elastic.KerasState(plain, step=4)
        write_commit(old, commit)
        model, state = made(hvd)
        train(hvd, model, state, 2)
        read_commit(state, commit)
    state.restore()
    state.sync()
    assert state.step == 4
    for own, saved in zip(model.get_weights(), plain.get_weights(), strict=True):
        assert np.array_equal(own, saved)
    train(hvd, model, state, 6)


@pytest.mark.long_with("keras-tensorflow")
def test_a_commit_waits_for_the_end_of_the_accumulation_window(hvd):
    commits = []

    class State(hvd.elastic.KerasState):
        def commit(self):
            commits.append(self.batch)
            super().commit()

    model = classifier(distributed(hvd, 0.1, accumulation_steps=3))
    state = State(model, batch=0)
    x, y = np.ones((32, 3), "float32"), np.ones((32, 1), "float32")
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
    # The end of the epoch closes the last window.
    assert commits == [3, 6, 0]
    # In a custom loop, `save` is omitted within a window.
    state.batch = 7
    model.train_on_batch(x, y)
    state.commit()
    state.restore()
    assert state.batch == 0


@pytest.mark.long_with("keras-tensorflow")
def test_a_commit_within_an_epoch_has_the_moving_statistics_of_all_ranks(hvd):
    """All ranks resume with the same statistics. They are not those of the batches of rank 0."""
    import keras

    keras.utils.set_random_seed(1)
    layer = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    model.compile(distributed(hvd, 0.1), loss="mse")
    state = hvd.elastic.KerasState(model)
    x, y = np.full((12, 2), 1.0 + hvd.rank()), np.ones((12, 1))
    callbacks = [hvd.elastic.CommitStateCallback(state, 2), interrupt_after(2)]
    with pytest.raises(Interrupted):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
    layer.moving_mean.assign(np.zeros(2))
    state.restore()
    # The mean over the ranks of 0.75 times the mean of a batch.
    expected = 0.75 * np.mean(1.0 + np.arange(hvd.size()))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.moving_mean), expected, rtol=1e-6)


@pytest.mark.long_with("keras-tensorflow")
def test_a_commit_has_the_callback_states_of_rank_0_on_each_host(hvd):
    """Only rank 0 has a `ModelCheckpoint`. After a loss of its host, another host has rank 0."""
    import keras

    def fit(state, folder, epochs, metadata):
        x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
        # The loss decreases, so the first epoch is the best.
        best = keras.callbacks.ModelCheckpoint(
            f"{folder}/best.keras", monitor="loss", mode="max", save_best_only=True
        )
        checkpoint = hvd.callbacks.Checkpoint(f"{folder}/checkpoints", metadata=metadata)
        commits = hvd.elastic.CommitStateCallback(state)
        options = {"epochs": epochs, "verbose": 0, "callbacks": [best, checkpoint, commits]}
        history = state.model.fit(x, y, batch_size=4, **options)
        return best.best, history.history["loss"]

    def made():
        return hvd.elastic.KerasState(classifier(distributed(hvd, 0.1), metrics=()))

    with host_of_its_own() as host, tempfile.TemporaryDirectory() as own:
        folder = hvd.broadcast_object(own)
        metadata = {"best": 3} if hvd.rank() == 0 else {}
        hvd.elastic.run(fit)(made(), folder, 1, metadata)
        state, metadata = made(), {}
        state._saved = hvd.broadcast_object(commit_in(host), root_rank=hvd.size() - 1)
        parts.restore(state._saved, POSITIONS)
        state.restore()
        best, losses = fit(state, folder, 2, metadata)
        hvd.allreduce(np.ones(1), name="all have read the folder")
    assert metadata == {"best": 3}
    assert len(losses) == 2
    if hvd.rank() == 0:
        assert best == losses[0] > losses[1]


def test_a_state_of_several_process_sets_is_refused(hvd):
    """Commits and `sync` would replace the models of all process sets by that of rank 0."""
    first = hvd.add_process_set([0])
    try:
        own = first if hvd.rank() == 0 else hvd.global_process_set
        model = classifier(distributed(hvd, 0.1, process_set=own), seed=hvd.rank())
        before = [weight.tolist() for weight in model.get_weights()]
        with pytest.raises(
            UsageError, match=r"rank 0: optimizer over ranks \[0\]; ranks? 1.*: all"
        ):
            hvd.elastic.KerasState(model).sync()
        assert [weight.tolist() for weight in model.get_weights()] == before
        # A checkpoint has one model: that of the process set of the optimizer of `compile`.
        model = classifier(distributed(hvd, 0.1))
        model.second = distributed(hvd, 0.1, process_set=first)
        checkpoint = hvd.callbacks.Checkpoint("unused")
        with pytest.raises(UsageError, match=r"second over ranks \[0\]"):
            model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[checkpoint])
    finally:
        hvd.remove_process_set(first)


@pytest.mark.parametrize("name", ["BackupAndRestore", "SwapEMAWeights"])
def test_callbacks_that_commits_would_make_wrong_are_refused(hvd, tmp_path, name):
    import keras

    model = classifier(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, use_ema=True)))
    state = hvd.elastic.KerasState(model)
    make = {
        "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore(tmp_path),
        "SwapEMAWeights": lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    }
    # `fit` drops a `BackupAndRestore` of other ranks than 0, and compares a `SwapEMAWeights`.
    callbacks = [make[name](), hvd.elastic.CommitStateCallback(state)]
    with pytest.raises(UsageError, match=rf"ranks? 0.*: UsageError: {name}"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=callbacks)
