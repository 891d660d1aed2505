"""`SyncBatchNormalization` on one rank: arguments, values, and a saved model."""

import numpy as np
import pytest

from hvdkit.errors import UsageError


@pytest.mark.parametrize("fused", [True, None])
def test_fused_kernels_raise(hvd, fused):
    with pytest.raises(UsageError, match=f"fused is {fused}"):
        hvd.SyncBatchNormalization(fused=fused)


def test_one_rank_equals_batch_normalization(hvd):
    import keras

    x = np.random.default_rng(1).normal(3, 2, (8, 5)).astype("float32")
    ours, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    np.testing.assert_array_equal(ours(x, training=True), plain(x, training=True))
    np.testing.assert_array_equal(ours.moving_variance.numpy(), plain.moving_variance.numpy())


def test_a_model_with_the_layer_can_be_saved_and_loaded(hvd, tmp_path):
    import keras

    model = keras.Sequential(
        [
            keras.Input((4, 3)),
            hvd.SyncBatchNormalization(axis=1, momentum=0.5, epsilon=1e-5, center=False),
            # Two layers in a model have different names.
            hvd.SyncBatchNormalization(),
        ]
    )
    x = np.random.default_rng(1).normal(size=(8, 4, 3)).astype("float32")
    model(x, training=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    layer = loaded.layers[0]
    assert type(layer) is hvd.SyncBatchNormalization
    assert (layer.axis, layer.momentum, layer.epsilon, layer.center) == (1, 0.5, 1e-5, False)
    np.testing.assert_array_equal(loaded(x), model(x))
    assert (model.layers[0].moving_mean.numpy() != 0).all()
