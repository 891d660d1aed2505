"""Elastic states of Keras on one rank."""

import numpy as np


def test_a_commit_has_no_states_of_random_seeds(hvd, tmp_path):
    """After a restart, all ranks read the same commit, and must not drop the same units."""
    import keras

    layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.Adam(0.1), loss="mse")
    x = np.ones((2, 3), "float32")
    state = hvd.elastic.KerasState(model, epoch=1)
    with (tmp_path / "commit").open("wb") as file:
        state.write_saved(file)
    weights = model.get_weights()
    model.train_on_batch(x, x[:, :2])
    seeds = [v for v in model.variables if not any(v is weight for weight in model.weights)]
    drawn = [keras.ops.convert_to_numpy(seed).tolist() for seed in seeds]
    assert len(drawn) == 1
    state.epoch = 2
    state.read_saved(tmp_path / "commit")
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
            callback.on_train_batch_end(batch)
    assert state.commits == 1
