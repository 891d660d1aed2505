"""A `fit` that lacks a line of the guide's script raises an error, or logs a warning."""

import copy
import importlib
import re

import numpy as np
import pytest

from tests.logs import recorded
from tests.ranks.frameworks import LazyModule, keras
from tests.ranks.keras.job import same_everywhere

comparisons = LazyModule("hvdkit.keras.fit.comparisons")

#: Missing line -> the text of the error or the warning; None if the script is right.
FORGOTTEN = {
    "": None,
    "wrap": r"Compile the model with hvd\.DistributedOptimizer\(optimizer\)",
    "broadcast": r"hvd\.callbacks\.BroadcastGlobalVariablesCallback\(0\)",
    "shard": r"hvd\.shard\(data\)",
}


@pytest.mark.parametrize("kind", ["of all rows", "of each column"])
def test_losses_that_are_not_compared(hvd, kind):
    """Ranks with different data have the same loss of all rows, and a vector is no loss to show."""

    class Columns(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            found = super().compute_metrics(x, y, y_pred, sample_weight)
            if kind == "of each column":
                found["loss"] = keras.ops.mean((y - y_pred) ** 2, axis=0)
            return found

    def of_all_rows(y, z):
        z, y = hvd.gather_for_loss(z, name="z"), hvd.allgather(y, name="y")
        return keras.ops.mean((z - y) ** 2)

    keras.utils.set_random_seed(1)
    model = Columns([keras.Input((3,)), keras.layers.Dense(2)])
    loss = of_all_rows if kind == "of all rows" else "mse"
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss=loss)
    x = np.random.default_rng(hvd.rank()).normal(size=(48, 3)).astype("float32")
    with recorded("hvdkit") as log:
        model.fit(x, x[:, :2], batch_size=4, shuffle=False, verbose=0)
    assert not [r.getMessage() for r in log if "same losses" in r.getMessage()]


@pytest.mark.parametrize("missing", FORGOTTEN)
def test_a_missing_line_is_named(hvd, missing):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    if missing != "wrap":
        optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer, loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    if missing == "broadcast":
        callbacks = []
    numbers = np.random.default_rng(1)
    x = numbers.normal(size=(hvd.size() * 64, 3)).astype("float32")
    y = x[:, :2] ** 2
    if missing != "shard":
        x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]
    comparisons.logged.clear()
    error = ""
    with recorded("hvdkit") as log:
        try:
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        except Exception as raised:
            error = str(raised)
    logged = [r.getMessage() for r in log if "is slow:" not in r.getMessage()]
    texts = [error] if error else logged
    same_everywhere(bool(error))
    if FORGOTTEN[missing] is None:
        assert not texts
    elif error or hvd.rank() == 0:
        assert any(re.search(FORGOTTEN[missing], text) for text in texts), (missing, texts)


@pytest.mark.parametrize(
    "loop", ["a clone", "a copy of the optimizer", "wrapped", "in another optimizer", "local"]
)
def test_an_optimizer_that_is_not_wrapped_in_a_loop(hvd, loop):
    """Copies of a wrapped optimizer are plain; only `fit` asks the other ranks."""
    unwrapped = importlib.import_module(f"hvdkit.{keras.backend.backend()}.unwrapped")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if loop == "in another optimizer":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(copy.deepcopy(optimizer) if "copy" in loop else optimizer, loss="mse")
    if loop in ("a clone", "local"):
        model = keras.models.clone_model(model)
    if loop == "local":
        hvd.register_local(model)
    hvd.broadcast_model(model, root_rank=0)
    x = np.random.default_rng(hvd.rank()).normal(size=(4, 3)).astype("float32")
    with pytest.MonkeyPatch.context() as patch, recorded("hvdkit") as log:
        # Earlier tests of this process may have changed these.
        patch.setattr(unwrapped, "_warned", type(unwrapped._warned)())
        patch.setattr(unwrapped, "_reduces_itself", False, raising=False)
        for _ in range(11):
            model.train_on_batch(x, x[:, :2])
    texts = [
        r.getMessage()
        for r in log
        if "is not wrapped" in r.getMessage() or "nothing has reduced" in r.getMessage()
    ]
    warns = loop in ("a clone", "a copy of the optimizer") and hvd.rank() == 0
    assert len(texts) == warns, texts
