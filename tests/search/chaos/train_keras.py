"""The training of a job under faults, with Keras's `fit`.

Each rank writes a line to `out` for each batch: the process id, the batch, the number of steps,
the sum of loss, accuracy and two random numbers, and the time. At the end it writes its weights and
its optimizer state.

The training has all state that a resume could lose: dropout, statistics of each rank, random
numbers, metrics, a schedule, several buckets, and a learning rate that a callback lowers. The
magnitude of gradients changes so much that the scales of a 16-bit wire format change, too.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

from announce import append, args

# isort: split
import keras
import numpy as np

import hvdkit.keras as hvd

SAMPLES = 301
BATCH = 4


class Record(keras.callbacks.Callback):
    """Record losses, and stop after `steps` steps."""

    def __init__(self, out: Path, steps: int, pace: float) -> None:
        super().__init__()
        self._resumed = out / f"resumed.{hvd.rank()}"
        self._losses = out / f"losses.{hvd.rank()}"
        self._steps = steps
        self._pace = pace
        self._batches = 0
        self._began = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {"batches": self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the checkpoint."""
        self._batches = state["batches"]

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Only now has everything been restored.
        if not self._began:
            append(self._resumed, os.getpid(), self._batches)
            self._began = True
        time.sleep(self._pace)
        random.random(), np.random.rand()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        step = int(self.model.optimizer.iterations)
        noise = random.random() + float(np.random.rand())
        number = float(logs["loss"]) + noise + float(logs["accuracy"])
        append(self._losses, os.getpid(), self._batches, step, number.hex(), time.monotonic())
        if step >= self._steps:
            self.model.stop_training = True


def batches_of(x: Any, y: Any, weight: Any, sampler: Any) -> Any:
    """Return the data for `fit` on Keras's backend."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        return sampler.dataset().map(lambda i: tuple(tf.gather(each, i) for each in (x, y, weight)))
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    data = TensorDataset(*(torch.from_numpy(each) for each in (x, y, weight)))
    return DataLoader(data, BATCH, sampler=sampler)


def main() -> None:
    hvd.init()
    rank = hvd.rank()
    keras.utils.set_random_seed(rank)

    fixed = np.random.default_rng(1)
    x = fixed.normal(size=(SAMPLES, 32)).astype(np.float32)
    y = (x @ fixed.normal(size=(32, 10))).argmax(1)
    weight = (2.0 ** (3 * (np.arange(SAMPLES) % 7) - 9)).astype(np.float32)
    sampler = hvd.ResumableSampler(SAMPLES, BATCH, seed=7)
    data = batches_of(x, y, weight, sampler)
    model = keras.Sequential(
        [
            *(keras.Input((32,)), keras.layers.GaussianNoise(0.1), keras.layers.Dense(128, "relu")),
            *(keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)),
            *(keras.layers.Dense(64, "relu"), keras.layers.Dense(10)),
        ]
    )
    optimizer = keras.optimizers.AdamW(3e-3, use_ema=True, clipnorm=1.0)
    model.compile(
        hvd.DistributedOptimizer(
            optimizer,
            compression=args.wire,
            accumulation_steps=args.accumulation,
            bucket_bytes=10_000,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.7, patience=1, min_delta=1.0),
        Record(args.out, args.steps, args.pace),
    ]
    if args.checkpoints:
        callbacks.append(
            hvd.callbacks.Checkpoint(
                args.checkpoints, every_steps=2 * args.accumulation, data=sampler
            )
        )
    model.fit(data, epochs=10_000, shuffle=False, verbose=0, callbacks=callbacks)
    variables = [*model.weights, *optimizer.variables]
    content = b"".join(keras.ops.convert_to_numpy(each).tobytes() for each in variables)
    accuracy = float((model.predict(x, verbose=0).argmax(1) == y).mean())
    (args.out / f"accuracy.{rank}").write_text(str(accuracy))
    (args.out / f"final.{rank}").write_bytes(content)
    hvd.shutdown()


if __name__ == "__main__":
    main()
