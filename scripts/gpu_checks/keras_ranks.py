"""The program of the jobs of `keras`, for either of Keras's backends (KERAS_BACKEND)."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

import hvdkit.keras as hvd
from gpu_checks.jobs import answer, spec
from tests.ranks.keras import oracle

#: The batches of the mixed_float16 training, and those in which the last rank's data are infinite.
BATCHES, POISONED = 10, (3, 6)
ROWS = 2


def fit(told: Mapping[str, Any]) -> dict[str, Any]:
    """Train with `fit` on each rank's data, and on rank 0 one plain model with all ranks' data."""
    data = oracle.data(hvd.size(), told["steps"])
    model = oracle.dense_model()
    before = model.get_weights()
    optimizer = hvd.DistributedOptimizer(_adam(), compression=told["compression"])
    model.compile(optimizer, loss="mse")
    inputs, targets = data.of_rank(hvd.rank())
    _train(model, inputs, targets, data.batch)
    weights = model.get_weights()
    found = {
        "weights": digest(weights),
        "optimizer": digest(keras.ops.convert_to_numpy(v) for v in optimizer.variables),
        "jit_compile": bool(model.jit_compile),
        "device": _device(model),
        "learned": oracle.distance(weights, before),
    }
    if hvd.rank() == 0:
        alone = oracle.dense_model()
        alone.compile(_adam(), loss="mse", jit_compile=False)
        with hvd.local_fit():
            _train(alone, data.inputs, data.targets, data.batch * data.size)
        found["distance"] = oracle.distance(weights, alone.get_weights())
    return found


def _adam() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.05)


def _train(model: Any, inputs: np.ndarray, targets: np.ndarray, batch: int) -> None:
    model.fit(inputs, targets, batch_size=batch, shuffle=False, verbose=0)


def mixed_float16() -> dict[str, Any]:
    """Train in mixed precision; the last rank's gradients overflow in some steps."""
    random = np.random.default_rng(hvd.rank())
    inputs = random.normal(size=(BATCHES, ROWS, oracle.FEATURES)).astype("float32")
    targets = random.normal(size=(BATCHES, ROWS, oracle.TARGETS)).astype("float32")
    if hvd.rank() == hvd.size() - 1:
        inputs[list(POISONED)] = np.inf
    with oracle.dtype_policy("mixed_float16"):
        model = oracle.dense_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        _train(
            model,
            inputs.reshape(-1, oracle.FEATURES),
            targets.reshape(-1, oracle.TARGETS),
            ROWS,
        )
    optimizer, weights = model.optimizer, model.get_weights()
    return {
        "optimizer": type(optimizer).__name__,
        "iterations": int(optimizer.iterations),
        "halvings": float(np.log2(optimizer.initial_scale / float(optimizer.dynamic_scale))),
        "finite": all(bool(np.isfinite(weight).all()) for weight in weights),
        "weights": digest(weights),
    }


def digest(arrays: Iterable[Any]) -> str:
    """Return a digest of the arrays' bytes."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def _device(model: Any) -> str:
    return str(model.trainable_variables[0].value.device)


def main() -> None:
    """Run the task of the spec."""
    told = spec()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Sums over 4 and over 8 rows shall agree to float32's precision.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    else:
        import torch

        torch.set_num_threads(1)
    hvd.init()
    found = {"fit": fit(told), "mixed_float16": mixed_float16()}
    hvd.shutdown()
    answer(found)


if __name__ == "__main__":
    main()
