"""Ordinary uses of Keras that reviews have broken."""

import numpy as np
import pytest

from tests.parallel.keras.job import classifier, same_everywhere, samples


def weights_of(model):
    """The bytes of a model's trainable variables."""
    import keras

    return [keras.ops.convert_to_numpy(v).tobytes().hex() for v in model.trainable_variables]


def fit(model, rank, seed=0, **options):
    x, y = samples(rank, seed)
    return model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **options)


def test_one_rank_has_called_the_model_before(hvd):
    """It traces the training function once less than the others, whose variables are missing."""
    import keras

    if keras.backend.backend() != "tensorflow":
        pytest.skip("hvd.SyncBatchNormalization is TensorFlow's")
    from hvdkit.tensorflow import SyncBatchNormalization

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [
                keras.layers.Dense(4),
                SyncBatchNormalization(),
                keras.layers.Dense(1, activation="sigmoid"),
                SyncBatchNormalization(),
            ]

        def call(self, x, training=False):
            for part in self.parts:
                x = part(x, training=training) if "batch" in part.name else part(x)
            return x

    keras.utils.set_random_seed(1)
    model = Subclassed()
    x, _ = samples(hvd.rank())
    if hvd.rank() == 0:
        model(x[:2])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    fit(model, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    same_everywhere(weights_of(model))


@pytest.mark.parametrize("order", ["16 bits twice", "16 and 32 bits", "32 and 16 bits"])
def test_compiling_again_with_the_same_optimizer(hvd, order):
    import keras

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    policies = {"16": "mixed_float16", "32": "float32"}
    names = [part for part in order.split() if part in policies]
    names *= 2 if order.endswith("twice") else 1
    keras.utils.set_random_seed(1)
    try:
        keras.config.set_dtype_policy("mixed_float16" if "16" in names else "float32")
        model = classifier("sgd")
        for seed, name in enumerate(names):
            model.compile(optimizer, loss="binary_crossentropy", auto_scale_loss=name == "16")
            fit(model, hvd.rank(), seed)
            same_everywhere(weights_of(model))
    finally:
        keras.config.set_dtype_policy("float32")


def test_an_embedding_in_a_local_layer(hvd):
    import keras

    keras.utils.set_random_seed(1)
    embedding = keras.layers.Embedding(5, 2)
    head = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((1,), dtype="int32"), embedding, head])
    before = np.array(keras.ops.convert_to_numpy(embedding.embeddings))
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.5), local_layers=embedding)
    model.compile(optimizer, loss="mse")
    x = np.full((8, 1), hvd.rank())
    model.fit(x, np.ones((8, 1, 1)), batch_size=4, verbose=0)
    changed = np.any(before != keras.ops.convert_to_numpy(embedding.embeddings), axis=1)
    assert changed.tolist() == [row == hvd.rank() for row in range(5)]
    kernel = keras.ops.convert_to_numpy(head.kernel)
    same_everywhere(kernel.tolist())
