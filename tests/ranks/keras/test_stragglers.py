"""A rank that makes all others wait in `fit` is named."""

import time

import numpy as np
import pytest

from hvdkit.training import stragglers
from tests.logs import recorded
from tests.ranks.frameworks import keras, tf

INTERVAL, SECONDS = 8, 0.1


def slow_gradient():
    """Return a function that returns its argument, and whose gradient takes long."""
    if keras.backend.backend() == "torch":
        from tests.ranks.torch.test_stragglers import SlowBackward

        return SlowBackward.apply

    @tf.custom_gradient
    def same(x):
        def gradient(upstream):
            # Not time.sleep in a py_function: TensorFlow runs it before the clock of the graph.
            matrix = tf.fill((512, 512), 1e-3 * tf.reduce_sum(upstream))
            for _ in range(240):
                matrix = tf.tanh(matrix @ matrix)
            return upstream + 1e-30 * tf.reduce_sum(matrix)

        return tf.identity(x), gradient

    return same


@pytest.mark.parametrize(
    "where", ["data and forward", "callback", pytest.param("backward", marks=pytest.mark.long)]
)
def test_a_slow_rank_is_named(hvd, where):
    from hvdkit.keras.optimizer import distribution_of

    class Slow(keras.callbacks.Callback):
        since = None

        def counted(self):
            return sum(distribution_of(self.model.optimizer).times.totals().values())

        def on_train_batch_begin(self, batch, logs=None):
            if hvd.rank() == 1 and where == "data and forward":
                time.sleep(SECONDS)

        def on_epoch_end(self, epoch, logs=None):
            # Not in a batch, so this does not count.
            before = self.counted()
            if hvd.rank() == 0:
                time.sleep(10 * SECONDS)
            self.since = before, time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            # The other ranks wait for the decision of this rank to stop or not.
            if hvd.rank() == 1 and where == "callback":
                time.sleep(SECONDS)
            if self.since is not None:
                before, began = self.since
                elapsed = time.perf_counter() - began
                assert self.counted() - before < elapsed + 5 * SECONDS

    slow = hvd.rank() == 1 and where == "backward"
    keras.utils.set_random_seed(1)
    between = keras.layers.Lambda(slow_gradient() if slow else lambda x: x)
    layers = [keras.layers.Dense(4), between, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), check_interval=INTERVAL), loss="mse"
    )
    x = np.ones((INTERVAL * 2, 3), "float32")
    with pytest.MonkeyPatch.context() as patch, recorded("hvdkit") as log:
        patch.setattr(stragglers, "_PERSISTENT_SECONDS", 0.0)
        model.fit(x, x[:, :1], batch_size=1, epochs=2, verbose=0, callbacks=[Slow()])
    lines = [record.getMessage() for record in log if "is slow" in record.getMessage()]
    if hvd.rank() != 1:
        # On a busy machine, another rank may be slow, too.
        return
    (line,) = lines
    assert line.startswith("rank 1 on host ")
    section = where
    if where == "callback":
        # A graph does not measure updates.
        section = "update" if keras.backend.backend() == "torch" else "data and forward"
    assert f"The largest difference is in {section}." in line
