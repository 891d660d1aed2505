"""Train a small convolutional network on handwritten digits, in a TensorFlow loop.

The data are 1797 scans of 8x8 pixels from scikit-learn; nothing is downloaded. The accuracy on the
held-out fifth does not depend on the number of ranks:

    python examples/tensorflow_digits.py
    hvdkit run -np 2 python examples/tensorflow_digits.py
    horovodrun -np 2 python examples/tensorflow_digits.py
    mpirun -np 2 --oversubscribe python examples/tensorflow_digits.py

With a folder for checkpoints the job can be stopped or killed at any moment, and resumes there:

    hvdkit run -np 2 python examples/tensorflow_digits.py --checkpoint-dir digits --resume
"""

import argparse
import os
from contextlib import nullcontext
from math import nan
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.tensorflow as hvd

BASE_LR = 0.02  # suits one rank with the default batch size
WARMUP_EPOCHS = 2


def digit_net() -> keras.Model:
    """Return a network with two convolutions and one hidden layer: 8x8 pixels, ten scores."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


def load_data() -> tuple[tf.Tensor, tf.Tensor, tf.data.Dataset]:
    """Return training images and labels, and test examples, in the same order on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    test = tf.data.Dataset.from_tensor_slices((test_images, test_labels))
    return tf.constant(train_images), tf.constant(train_labels), test


def shift_randomly(image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Move the image by up to one pixel in each direction, and fill with background.

    Use a seed for each image and epoch. A checkpoint cannot save the state of other random
    operations of TensorFlow.
    """
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    return tf.image.stateless_random_crop(padded, (8, 8, 1), seed)


def mean_accuracy(model: keras.Model, test: tf.data.Dataset) -> float:
    """Return the accuracy over all test images; each rank tests its share."""
    correct, seen = 0.0, 0.0
    for images, labels, weights in hvd.shard(test, batch_size=64, tail="pad"):
        right = tf.argmax(model(images, training=False), axis=1) == labels
        # An image that fills up the share of a rank has weight 0.
        correct += tf.reduce_sum(tf.cast(right, tf.float32) * weights)
        seen += tf.reduce_sum(weights)
    # Reduce sums, not means: the shares may differ by one image.
    totals = hvd.allreduce(tf.stack([correct, seen]), op=hvd.Sum, name="accuracy")
    return float(totals[0] / totals[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default 30)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", help="save checkpoints here, and one at the end")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps (default 50)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    args = parser.parse_args()
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir DIR")
    if args.checkpoint_every < 1:
        parser.error(f"--checkpoint-every {args.checkpoint_every}: expected at least 1")

    # Ranks share the cores of a host, and a network this small needs one thread. A large one needs
    # len(os.sched_getaffinity(0)) // hvd.local_size().
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    # Each rank has a seed of its own, for dropout. Weights are broadcast below.
    keras.utils.set_random_seed(args.seed * 1000 + hvd.rank())

    train_images, train_labels, test = load_data()
    count = len(train_labels)
    steps_per_epoch = count // (hvd.size() * args.batch_size)
    if args.epochs < 1 or steps_per_epoch < 1:
        parser.error(
            f"{args.epochs} epochs of {steps_per_epoch} steps: expected at least 1 of each; "
            f"{hvd.size()} ranks share {count} images"
        )
    # Together the ranks see each image once per epoch, in an order that all of them share. Images
    # that do not fill a batch on every rank are left out.
    sampler = hvd.ResumableSampler(count, args.batch_size, seed=args.seed, drop_last=True)

    def load(number: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return shift_randomly(train_images[number], seed), train_labels[number]

    batches = sampler.dataset(load, seeds=True)

    model = digit_net()
    optimizer = keras.optimizers.SGD(BASE_LR, momentum=0.9, nesterov=True, weight_decay=1e-4)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    schedule = hvd.WarmupCosine(
        base_lr=BASE_LR,
        total_steps=args.epochs * steps_per_epoch,
        warmup_steps=min(WARMUP_EPOCHS, args.epochs) * steps_per_epoch,
        scale=hvd.size(),
    )

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    console = Console()
    is_root = hvd.rank() == 0
    columns = (
        TextColumn("epoch"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeElapsedColumn(),
    )
    # Open MPI gives rank 0 a terminal even when its output goes to a file.
    show_bar = is_root and console.is_terminal and "OMPI_COMM_WORLD_SIZE" not in os.environ
    progress = Progress(*columns, console=console, disable=not show_bar)
    if args.checkpoint_dir:
        checkpointer: Any = hvd.Checkpointer(
            args.checkpoint_dir,
            model=model,
            optimizer=optimizer,
            data=sampler,
            every_steps=args.checkpoint_every,
        )
    else:
        checkpointer = nullcontext()
    with progress, checkpointer:
        restored = checkpointer.restore() if args.resume else None
        step = restored.step if restored else 0
        if restored and is_root:
            print(f"resumed after step {step}, in epoch {sampler.epoch + 1}", flush=True)
        loss = nan
        task = progress.add_task("training", total=args.epochs, completed=sampler.epoch, loss=nan)
        for epoch in range(sampler.epoch, args.epochs):
            for images, labels in sampler.batches(batches):
                optimizer.learning_rate = schedule(step)
                loss = train_step(images, labels)
                step += 1
                if args.checkpoint_dir:
                    checkpointer.maybe_save(step, epoch)
            progress.update(task, advance=1, loss=float(loss))
            if is_root and not show_bar and (epoch + 1) % 10 == 0:
                print(f"epoch {epoch + 1}/{args.epochs} loss {float(loss):.4f}", flush=True)
        if args.checkpoint_dir and (restored is None or step > restored.step):
            checkpointer.save(step, args.epochs)

    accuracy = mean_accuracy(model, test)
    if is_root:
        print(f"{hvd.size()} ranks, {args.epochs} epochs, {int(test.cardinality())} test images")
        print(f"accuracy={accuracy:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
