"""Train a small convolutional network on handwritten digits, with PyTorch.

The data are 1797 scans of 8x8 pixels from scikit-learn; nothing is downloaded. The accuracy on the
held-out fifth does not depend on the number of ranks:

    python examples/torch_digits.py
    hvdkit run -np 2 python examples/torch_digits.py
    horovodrun -np 2 python examples/torch_digits.py
    mpirun -np 2 --oversubscribe python examples/torch_digits.py

With a folder for checkpoints the job can be stopped or killed at any moment, and resumes there:

    hvdkit run -np 2 python examples/torch_digits.py --checkpoint-dir digits --resume
"""

import argparse
import os
from contextlib import nullcontext
from math import nan
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional

import hvdkit.torch as hvd

BASE_LR = 0.02  # suits one rank with the default batch size
WARMUP_EPOCHS = 2


class DigitNet(nn.Module):
    """Two convolutions, one pooling and one hidden layer, from 8x8 pixels to ten scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.dropout = nn.Dropout(0.25)
        self.scores = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.hidden(x.flatten(1)))
        return self.scores(self.dropout(x))


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images and labels, test images and labels, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(p) for p in parts)
    return train_images, train_labels, test_images, test_labels


def shift_randomly(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move each image by up to one pixel in each direction, and fill with background."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    down = torch.randint(0, 3, (count, 1), generator=generator) + torch.arange(height)
    right = torch.randint(0, 3, (count, 1), generator=generator) + torch.arange(width)
    rows = torch.arange(count)[:, None, None]
    return padded[rows, 0, down[:, :, None], right[:, None, :]].unsqueeze(1)


@torch.no_grad()
def mean_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy over all test images; each rank tests its share."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    correct = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    totals = torch.stack([correct, torch.tensor(len(labels[mine]))])
    # Reduce sums, not means: the shares may differ by one image.
    all_correct, all_seen = hvd.allreduce(totals, op=hvd.Sum, name="accuracy").tolist()
    return all_correct / all_seen


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

    hvd.init()
    # Ranks share the cores of a host, and a network this small needs one thread. A large one needs
    # len(os.sched_getaffinity(0)) // hvd.local_size().
    torch.set_num_threads(1)
    # Each rank has a seed of its own, for dropout and shifts. Weights are broadcast below.
    torch.manual_seed(args.seed * 1000 + hvd.rank())
    shifts = torch.Generator().manual_seed(args.seed * 1000 + hvd.rank())

    train_images, train_labels, test_images, test_labels = load_data()
    steps_per_epoch = len(train_labels) // (hvd.size() * args.batch_size)
    if args.epochs < 1 or steps_per_epoch < 1:
        parser.error(
            f"{args.epochs} epochs of {steps_per_epoch} steps: expected at least 1 of each; "
            f"{hvd.size()} ranks share {len(train_labels)} images"
        )

    # Together the ranks see each image once per epoch, in an order that all of them share. Images
    # that do not fill a batch on every rank are left out.
    sampler = hvd.ResumableSampler(
        len(train_labels), args.batch_size, seed=args.seed, drop_last=True
    )
    model = DigitNet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=BASE_LR, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = hvd.WarmupCosine(
        base_lr=BASE_LR,
        total_steps=args.epochs * steps_per_epoch,
        warmup_steps=min(WARMUP_EPOCHS, args.epochs) * steps_per_epoch,
        scale=hvd.size(),
    )

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
            generators={"shifts": shifts},
            every_steps=args.checkpoint_every,
        )
    else:
        checkpointer = nullcontext()
    with progress, checkpointer:
        restored = checkpointer.restore() if args.resume else None
        step = restored.step if restored else 0
        if restored and is_root:
            print(f"resumed after step {step}, in epoch {sampler.epoch + 1}", flush=True)
        loss = torch.tensor(nan)
        task = progress.add_task("training", total=args.epochs, completed=sampler.epoch, loss=nan)
        for epoch in range(sampler.epoch, args.epochs):
            model.train()
            for batch in sampler.batches():
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step)
                scores = model(shift_randomly(train_images[batch], shifts))
                loss = functional.cross_entropy(scores, train_labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if args.checkpoint_dir:
                    checkpointer.maybe_save(step, epoch)
            progress.update(task, advance=1, loss=loss.item())
            if is_root and not show_bar and (epoch + 1) % 10 == 0:
                print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f}", flush=True)
        if args.checkpoint_dir and (restored is None or step > restored.step):
            checkpointer.save(step, args.epochs)

    accuracy = mean_accuracy(model, test_images, test_labels)
    if is_root:
        print(f"{hvd.size()} ranks, {args.epochs} epochs, {len(test_labels)} test images")
        print(f"accuracy={accuracy:.4f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
