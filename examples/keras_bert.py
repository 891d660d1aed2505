"""Train a small BERT to fill in masked words of Python's language reference, with Keras.

As in the first BERT, words are masked before the training, several times in different ways. The
batch size is that of all ranks together, so that any number of ranks trains the same model. The
backend of Keras may be TensorFlow or PyTorch:

    hvdkit run -np 2 python examples/keras_bert.py
    KERAS_BACKEND=torch hvdkit run -np 2 python examples/keras_bert.py

Checkpoints are in runs/keras_bert. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/keras_bert.py --resume
"""

import argparse
import re
from collections import Counter
from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers, ops

import hvdkit.keras as hvd

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 32
WORDS, MASKED = 2000, 5  # the size of the vocabulary; masked words per sample, about 15 %
UNKNOWN, MASK = 0, 1


class AddPlaces(layers.Layer):
    """Add a trained vector for each place in the context."""

    def build(self, shape: tuple) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="random_normal", name="table")

    def call(self, x: object) -> object:
        return x + self.table


class Choose(layers.Layer):
    """Return the vectors at the masked places."""

    def call(self, x: object, places: object) -> object:
        return ops.take_along_axis(x, ops.expand_dims(places, -1), axis=1)


def bert() -> keras.Model:
    """Return a transformer that predicts the words at some places of a sample."""
    text = keras.Input((CONTEXT,), dtype="int32", name="text")
    places = keras.Input((MASKED,), dtype="int32", name="places")
    words = layers.ReversibleEmbedding(WORDS, WIDTH, name="words")
    x = AddPlaces()(words(text))
    # Without dropout, which would depend on the number of ranks; the model is too small for it
    for _ in range(LAYERS):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, activation="gelu")(y)
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    x = layers.Dense(WIDTH, activation="gelu")(Choose()(x, places))
    scores = words(layers.LayerNormalization()(x), reverse=True)
    return keras.Model({"text": text, "places": places}, scores)


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """Return samples of CONTEXT words for training and for validation, the same on every rank."""
    words = re.findall(r"[A-Za-z]+|[0-9]|[^\w\s]", " ".join(topics[t] for t in sorted(topics)))
    common = [word for word, _ in Counter(words).most_common(WORDS - 2)]
    numbers = {word: number for number, word in enumerate(common, start=2)}
    text = np.array([numbers.get(word, UNKNOWN) for word in words], np.int32)
    samples = text[: len(text) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    samples = samples[np.random.default_rng(0).permutation(len(samples))]
    return samples[320:], samples[:320]


def masked(samples: np.ndarray, times: int, seed: int) -> tuple[dict, np.ndarray]:
    """Return each sample several times, with masked words: their places, and the words.

    80 % are replaced by MASK, 10 % by a random word, and 10 % not at all.
    """
    rng = np.random.default_rng(seed)
    text = np.repeat(samples, times, axis=0)
    places = np.argsort(rng.random(text.shape), axis=1)[:, :MASKED].astype(np.int32)
    words = np.take_along_axis(text, places, axis=1)
    how = rng.random(words.shape)
    random_words = rng.integers(2, WORDS, words.shape)
    replaced = np.where(how < 0.8, MASK, np.where(how < 0.9, random_words, words))
    np.put_along_axis(text, places, replaced.astype(np.int32), axis=1)
    return {"text": text, "places": places}, words


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data (default 2)")
    parser.add_argument(
        "--maskings", type=int, default=3, help="copies of a sample per epoch (default 3)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="samples per step, of all ranks (default 32)"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/keras_bert")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    keras.utils.set_random_seed(args.seed)
    train, validation = load_text()
    data = masked(train, args.maskings, seed=1)
    sampler = hvd.ResumableSampler(
        len(data[1]), args.batch_size // hvd.size(), seed=args.seed, drop_last=True
    )
    steps = args.epochs * sampler.batches_per_epoch
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=args.lr,
        warmup_steps=steps // 10,
        decay_steps=steps - steps // 10,
    )
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    model = bert()
    model.compile(
        hvd.DistributedOptimizer(optimizer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    def print_loss(epoch: int, logs: dict[str, float]) -> None:
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1} loss {logs['loss']:.4f}", flush=True)

    model.fit(
        sampler.arrays(data),
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

    # Each rank tests its share of the samples; the callback makes the metrics those of all ranks.
    figures = model.evaluate(
        *hvd.shard(masked(validation, 1, seed=2)),
        verbose=0,
        return_dict=True,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    if hvd.rank() == 0:
        print(f"accuracy={figures['accuracy']:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
