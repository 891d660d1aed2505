"""Train a small GPT on the source code of Python's standard library, byte by byte, with Keras.

Each step accumulates several batches in bfloat16, clips the gradient and follows a cosine schedule.
The batch size is that of all ranks together, so that any number of ranks trains the same model. The
backend of Keras may be TensorFlow or PyTorch:

    hvdkit run -np 2 python examples/keras_gpt.py
    KERAS_BACKEND=torch hvdkit run -np 2 python examples/keras_gpt.py

Checkpoints are in runs/keras_gpt. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/keras_gpt.py --resume
"""

import argparse
import math
import sysconfig
from pathlib import Path

import keras
import numpy as np
from keras import layers

import hvdkit.keras as hvd

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 64


class AddPlaces(layers.Layer):
    """Add a trained vector for each place in the context."""

    def build(self, shape: tuple) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, x: object) -> object:
        return x + self.table


def gpt() -> keras.Model:
    """Return a transformer that predicts each byte from the bytes before it."""
    text = keras.Input((CONTEXT,), dtype="int32")
    x = AddPlaces()(layers.Embedding(256, WIDTH)(text))
    for _ in range(LAYERS):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    scores = layers.Dense(256, dtype="float32")(layers.LayerNormalization()(x))
    return keras.Model(text, scores)


def load_text(megabytes: float) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of CONTEXT + 1 bytes for training and for validation."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = np.frombuffer(text[: int(megabytes * 1e6)], np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)[::CONTEXT]
    chosen = np.random.default_rng(0).permutation(len(windows))
    return windows[chosen[256:]], windows[chosen[:256]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1, help="passes over the text (default 1)")
    parser.add_argument("--megabytes", type=float, default=0.7, help="of text (default 0.7)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="windows per batch, of all ranks (default 16)"
    )
    parser.add_argument("--batches", type=int, default=2, help="per step (default 2)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 3e-3)")
    parser.add_argument("--float32", action="store_true", help="compute in float32, not bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/keras_gpt")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="BATCHES")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    keras.utils.set_random_seed(args.seed)
    if not args.float32:
        keras.config.set_dtype_policy("mixed_bfloat16")
    train, validation = load_text(args.megabytes)
    sampler = hvd.ResumableSampler(
        len(train), args.batch_size // hvd.size(), seed=args.seed, drop_last=True
    )
    steps = args.epochs * math.ceil(sampler.batches_per_epoch / args.batches)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=args.lr,
        warmup_steps=steps // 20,
        decay_steps=steps - steps // 20,
    )
    optimizer = keras.optimizers.AdamW(schedule, beta_2=0.95, weight_decay=0.01, global_clipnorm=1)
    model = gpt()
    model.compile(
        hvd.DistributedOptimizer(optimizer, accumulation_steps=args.batches),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    def print_loss(epoch: int, logs: dict[str, float]) -> None:
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1} loss {logs['loss']:.4f}", flush=True)

    model.fit(
        sampler.arrays((train[:, :-1], train[:, 1:])),
        epochs=args.epochs,
        shuffle=False,  # the sampler shuffles
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            keras.callbacks.LambdaCallback(on_epoch_end=print_loss),
            hvd.callbacks.Checkpoint(
                args.checkpoint_dir,
                every_steps=args.checkpoint_every,
                data=sampler,
                resume=args.resume,
                verbose=1,
            ),
        ],
    )

    # Each rank computes the loss of its share; the callback makes it that of all ranks.
    mine = validation[hvd.rank() :: hvd.size()]
    loss = model.evaluate(
        mine[:, :-1],
        mine[:, 1:],
        verbose=0,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    if hvd.rank() == 0:
        print(f"bits_per_byte={loss / math.log(2):.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
