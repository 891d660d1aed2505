"""Train a small convolutional network on handwritten digits, with Keras.

The data are 1797 scans of 8x8 pixels from scikit-learn; nothing is downloaded. The accuracy on the
held-out fifth does not depend on the number of ranks, nor on TensorFlow or PyTorch as backend:

    python examples/keras_digits.py
    hvdkit run -np 2 python examples/keras_digits.py
    horovodrun -np 2 python examples/keras_digits.py
    KERAS_BACKEND=torch horovodrun -np 2 python examples/keras_digits.py
    mpirun -np 2 --oversubscribe python examples/keras_digits.py

With a folder for checkpoints the job can be stopped or killed at any moment, and resumes there:

    hvdkit run -np 2 python examples/keras_digits.py --checkpoint-dir digits --resume
"""

import argparse
import os
import sys

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd

BASE_LR = 0.02  # suits one rank with the default batch size
WARMUP_EPOCHS = 2


def digit_net() -> keras.Model:
    """Return a network with two convolutions and one hidden layer: 8x8 pixels, ten scores."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            # In training each image moves by up to one pixel in each direction.
            layers.RandomTranslation(1 / 8, 1 / 8, fill_mode="constant", interpolation="nearest"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.25),
            layers.Dense(10),
        ]
    )


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return training images and labels, test images and labels, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return train_images, train_labels, test_images, test_labels


def one_thread() -> None:
    """Use one thread: ranks share the cores of a host, and a network this small needs no more.

    A large network needs len(os.sched_getaffinity(0)) // hvd.local_size() threads.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    else:
        import torch

        torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data (default 30)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", help="save checkpoints here, and one at the end"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=50, metavar="N", help="steps between (default 50)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest good checkpoint in DIR"
    )
    args = parser.parse_args()
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir DIR")
    if args.checkpoint_every < 1:
        parser.error(f"--checkpoint-every {args.checkpoint_every}: expected at least 1")

    one_thread()
    hvd.init()
    # Each rank has a seed of its own, for dropout and shifts. A callback broadcasts the weights.
    keras.utils.set_random_seed(args.seed * 1000 + hvd.rank())

    train_images, train_labels, test_images, test_labels = load_data()
    share = len(train_labels) // hvd.size()
    if args.epochs < 1 or share < args.batch_size:
        parser.error(
            f"{args.epochs} epochs of {share // args.batch_size} steps: expected at least 1 of "
            f"each; {hvd.size()} ranks share {len(train_labels)} images"
        )

    # Together the ranks see each image once per epoch, in an order that all of them share.
    sampler = hvd.ResumableSampler(len(train_labels), args.batch_size, seed=args.seed)
    steps_per_epoch = sampler.batches_per_epoch
    warmup_steps = min(WARMUP_EPOCHS, args.epochs) * steps_per_epoch
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=BASE_LR / warmup_steps,
        warmup_target=BASE_LR * hvd.size(),
        warmup_steps=warmup_steps,
        decay_steps=max(1, args.epochs * steps_per_epoch - warmup_steps),
    )
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=1e-4)
    model = digit_net()
    model.compile(
        hvd.DistributedOptimizer(optimizer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    is_root = hvd.rank() == 0
    # Open MPI gives rank 0 a terminal even when its output goes to a file.
    show_bar = is_root and sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ

    def print_loss(epoch: int, logs: dict[str, float]) -> None:
        if is_root and not show_bar and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}/{args.epochs} loss {logs['loss']:.4f}", flush=True)

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        keras.callbacks.LambdaCallback(on_epoch_end=print_loss),
    ]
    if args.checkpoint_dir:
        checkpoint = hvd.callbacks.Checkpoint(
            args.checkpoint_dir,
            every_steps=args.checkpoint_every,
            every_epochs=None,
            data=sampler,
            resume=args.resume,
            verbose=1,
        )
        callbacks.append(checkpoint)
    model.fit(
        sampler.arrays((train_images, train_labels)),
        epochs=args.epochs,
        shuffle=False,  # the sampler shuffles
        verbose=1 if show_bar else 0,
        callbacks=callbacks,
    )

    # Each rank tests its share of the images; the callback makes the metrics those of all ranks.
    mine = slice(hvd.rank(), None, hvd.size())
    metrics = model.evaluate(
        test_images[mine],
        test_labels[mine],
        verbose=0,
        return_dict=True,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    if is_root:
        print(f"{hvd.size()} ranks, {args.epochs} epochs, {len(test_labels)} test images")
        print(f"accuracy={metrics['accuracy']:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
