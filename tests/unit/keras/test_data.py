"""`hvd.shard` of hvdkit.keras for a `tf.data.Dataset`, and copies of samplers."""

import copy
import pickle

import numpy as np
import pytest


def test_shard_of_a_tf_dataset(hvd):
    import keras

    if keras.backend.backend() == "torch":
        pytest.skip("tf.data belongs to the TensorFlow backend")
    import tensorflow as tf

    x, y = np.arange(10, dtype=np.float32), np.arange(10)
    share = hvd.shard(tf.data.Dataset.from_tensor_slices((x, y)), batch_size=4)
    assert [ys.tolist() for _, ys in share.as_numpy_iterator()] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_fit_uses_the_steps_and_the_weights_of_a_share(hvd):
    import keras

    if keras.backend.backend() == "torch":
        pytest.skip("tf.data belongs to the TensorFlow backend")
    import tensorflow as tf

    x, y = np.ones((10, 3), np.float32), np.ones((10, 1), np.float32)
    examples = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", weighted_metrics=["mae"]
    )
    history = model.fit(hvd.shard(examples, batch_size=4, tail="pad"), epochs=2, verbose=0)
    assert history.params["steps"] == 3
    assert int(model.optimizer.iterations) == 6
    assert set(history.history) == {"loss", "mae"}


def test_a_sampler_can_be_copied_and_pickled(hvd):
    sampler = hvd.ResumableSampler(10, 2)
    other = pickle.loads(pickle.dumps(copy.deepcopy(sampler)))
    batches, again = [[np.asarray(b).tolist() for b in s.batches()] for s in (sampler, other)]
    assert batches == again
