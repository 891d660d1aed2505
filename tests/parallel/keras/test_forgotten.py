"""A `fit` that lacks a line of the guide's script raises an error, or logs a warning."""

import re

import numpy as np
import pytest

from tests.logs import recorded
from tests.parallel.keras.job import same_everywhere

#: Missing line -> the text of the error or the warning; None if the script is right.
FORGOTTEN = {
    "": None,
    "wrap": r"Compile the model with hvd\.DistributedOptimizer\(optimizer\)",
    "broadcast": r"hvd\.callbacks\.BroadcastGlobalVariablesCallback\(0\)",
    "shard": r"hvd\.shard\(data\)",
}


@pytest.mark.parametrize("missing", FORGOTTEN)
def test_a_missing_line_is_named(hvd, missing):
    import keras

    from hvdkit.keras import coordination

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
    coordination._logged.clear()
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
