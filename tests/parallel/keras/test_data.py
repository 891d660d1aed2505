"""`hvd.shard` under `fit` on real ranks: what is padded does not show in weighted metrics."""

import numpy as np
import pytest

COUNT = 13


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_fit_on_shares_shows_the_metrics_of_every_element_once(hvd, tail):
    import keras

    if keras.backend.backend() == "torch":
        pytest.skip("tf.data belongs to the TensorFlow backend")
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(COUNT, 3)).astype(np.float32)
    y = random.normal(size=(COUNT, 1)).astype(np.float32)
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    # Of no length, so that metrics are those of one model and not of one that learns meanwhile.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, loss="mse", weighted_metrics=["mae", "mse"])
    examples = tf.data.Dataset.from_tensor_slices((x, y))
    share = hvd.shard(examples, batch_size=2, shuffle=True, tail=tail)
    shown = {name: values[0] for name, values in model.fit(share, verbose=0).history.items()}

    used = COUNT if tail == "pad" else COUNT - COUNT % hvd.size()
    errors = model.predict(x, verbose=0)[:used] - y[:used]
    assert shown["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert shown["mse"] == pytest.approx((errors**2).mean(), rel=1e-5)
    # Keras divides a loss by the number of rows, whatever their weights.
    rows = -(-used // hvd.size()) * hvd.size()
    assert shown["loss"] == pytest.approx((errors**2).sum() / rows, rel=1e-5)
