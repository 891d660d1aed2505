"""Train a small residual network to classify drawn shapes, with Keras.

The images are drawn on the spot: one of eight shapes, in a random place, size and colour. The batch
size is that of all ranks together. The backend of Keras may be TensorFlow or PyTorch. On
TensorFlow, batch normalization uses the batches of all ranks:

    hvdkit run -np 2 python examples/keras_images.py
    KERAS_BACKEND=torch hvdkit run -np 2 python examples/keras_images.py

Checkpoints are in runs/keras_images. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/keras_images.py --resume
"""

import argparse

import keras
import numpy as np
from keras import layers

import hvdkit.keras as hvd

if keras.backend.backend() == "tensorflow":
    from hvdkit.tensorflow import SyncBatchNormalization as BatchNormalization
else:
    from keras.layers import BatchNormalization

SIDE = 24  # pixels
#: Shape -> whether the point (x, y) is inside; the shape is about as large as the unit circle.
SHAPES = {
    "disc": lambda x, y: x**2 + y**2 < 1,
    "ring": lambda x, y: abs(x**2 + y**2 - 0.7) < 0.3,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.85,
    "frame": lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.7) < 0.2,
    "diamond": lambda x, y: abs(x) + abs(y) < 1,
    "triangle": lambda x, y: (y < 0.8) & (y > 2 * abs(x) - 0.9),
    "plus": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),
    "cross": lambda x, y: (abs(abs(x) - abs(y)) < 0.35) & (np.maximum(abs(x), abs(y)) < 0.9),
}


def draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images, float32 [count, SIDE, SIDE, 3], and the numbers of their shapes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(SHAPES), size=count)
    images = np.empty((count, SIDE, SIDE, 3), np.float32)
    rows, columns = np.mgrid[:SIDE, :SIDE, :1][:2]
    for image, label in zip(images, labels, strict=True):
        size = rng.uniform(4, 8)
        x0, y0 = rng.uniform(size, SIDE - size, 2)
        inside = list(SHAPES.values())[label]((columns - x0) / size, (rows - y0) / size)
        light, dark = rng.uniform(0.2, 1, (2, 1, 1, 3))
        colours = (light, -dark) if rng.random() < 0.5 else (-dark, light)
        image[:] = np.where(inside, *colours) + rng.normal(0, 0.2, image.shape)
    return images, labels


def residual(x: object, channels: int, stride: int) -> object:
    """Apply two convolutions with batch normalization, and a shortcut around them."""
    y = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
    y = layers.ReLU()(BatchNormalization(momentum=0.9)(y))
    y = layers.Conv2D(channels, 3, padding="same", use_bias=False)(y)
    shortcut = layers.Conv2D(channels, 1, stride)(x) if stride > 1 else x
    return layers.ReLU()(layers.Add()([BatchNormalization(momentum=0.9)(y), shortcut]))


def shape_net() -> keras.Model:
    """Return a residual network that mirrors and shifts its images at random in training."""
    images = keras.Input((SIDE, SIDE, 3))
    x = layers.RandomFlip("horizontal")(images)
    x = layers.RandomTranslation(0.1, 0.1, fill_mode="wrap", interpolation="nearest")(x)
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(BatchNormalization(momentum=0.9)(x))
    x = residual(residual(residual(x, 16, 1), 32, 2), 64, 2)
    return keras.Model(images, layers.Dense(len(SHAPES))(layers.GlobalAveragePooling2D()(x)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data (default 2)")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, of all ranks (default 64)"
    )
    parser.add_argument("--images", type=int, default=6400, help="to train on (default 6400)")
    parser.add_argument("--lr", type=float, default=0.05, help="peak learning rate (default 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/keras_images")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    # Each rank has a seed of its own, for the augmentation. A callback broadcasts the weights.
    keras.utils.set_random_seed(args.seed * 1000 + hvd.rank())
    images, labels = draw(args.images, seed=1)
    sampler = hvd.ResumableSampler(
        len(images), args.batch_size // hvd.size(), seed=args.seed, drop_last=True
    )
    steps = args.epochs * sampler.batches_per_epoch
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=args.lr,
        warmup_steps=steps // 10,
        decay_steps=steps - steps // 10,
    )
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=5e-4)
    model = shape_net()
    model.compile(
        hvd.DistributedOptimizer(optimizer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    def print_loss(epoch: int, logs: dict[str, float]) -> None:
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1} loss {logs['loss']:.4f}", flush=True)

    model.fit(
        sampler.arrays((images, labels)),
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

    # Each rank tests its share of the images; the callback makes the metrics those of all ranks.
    figures = model.evaluate(
        *hvd.shard(draw(1000, seed=2)),
        verbose=0,
        return_dict=True,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    if hvd.rank() == 0:
        print(f"accuracy={figures['accuracy']:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
