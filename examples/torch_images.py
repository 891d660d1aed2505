"""Train a small residual network to classify drawn shapes, with PyTorch.

The images are drawn on the spot: one of eight shapes, in a random place, size and colour. Batch
normalization uses the batches of all ranks, and the augmentation depends on the number of the
sample only. With a batch size of all ranks together, any number of ranks trains the same model:

    hvdkit run -np 2 python examples/torch_images.py

Checkpoints are in runs/torch_images. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/torch_images.py --resume
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import hvdkit.torch as hvd

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


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images, [count, 3, SIDE, SIDE], and the numbers of their shapes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(SHAPES), size=count)
    images = np.empty((count, 3, SIDE, SIDE))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for image, label in zip(images, labels, strict=True):
        size = rng.uniform(4, 8)
        x0, y0 = rng.uniform(size, SIDE - size, 2)
        inside = list(SHAPES.values())[label]((columns - x0) / size, (rows - y0) / size)
        light, dark = rng.uniform(0.2, 1, (2, 3, 1, 1))
        colours = (light, -dark) if rng.random() < 0.5 else (-dark, light)
        image[:] = np.where(inside, *colours) + rng.normal(0, 0.2, image.shape)
    # In the dtype of the model, which is float32 or float64.
    return torch.tensor(images, dtype=torch.get_default_dtype()), torch.from_numpy(labels)


class Augmented(Dataset):
    """Images that are mirrored and shifted at random."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[number]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        down, right = torch.randint(-2, 3, (2,)).tolist()
        return image.roll((down, right), (1, 2)), self.labels[number]


class Residual(nn.Module):
    """Two convolutions with batch normalization, and a shortcut around them."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        before = channels // stride
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(before, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()


def shape_net() -> nn.Module:
    """Return a residual network whose batch normalization uses the batches of all ranks."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 1),
        Residual(32, 2),
        Residual(64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, len(SHAPES)),
    )
    return hvd.SyncBatchNorm.convert_sync_batchnorm(model)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy over all test images; each rank tests its share."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    correct = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return hvd.allreduce(correct, op=hvd.Sum).item() / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data (default 2)")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, of all ranks (default 64)"
    )
    parser.add_argument("--images", type=int, default=6400, help="to train on (default 6400)")
    parser.add_argument("--lr", type=float, default=0.1, help="peak learning rate (default 0.1)")
    parser.add_argument("--workers", type=int, default=0, help="loader processes (default 0)")
    parser.add_argument("--float64", action="store_true", help="compute in float64, not float32")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/torch_images")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    batch_size = args.batch_size // hvd.size()
    torch.manual_seed(args.seed)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    dataset = Augmented(*draw(args.images, seed=1))
    sampler = hvd.ResumableSampler(dataset, batch_size, seed=args.seed, drop_last=True)
    loader = DataLoader(
        sampler.seeded(dataset),
        batch_size,
        sampler=sampler,
        num_workers=args.workers,
        drop_last=True,
    )
    model = shape_net()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    total = args.epochs * sampler.batches_per_epoch
    schedule = hvd.WarmupCosine(args.lr, total, total // 10)

    with hvd.Checkpointer(
        args.checkpoint_dir,
        model=model,
        optimizer=optimizer,
        data=sampler,
        every_steps=args.checkpoint_every,
        overwrite=not args.resume,
    ) as checkpointer:
        restored = checkpointer.restore() if args.resume else None
        step = restored.step if restored else 0
        if restored and hvd.rank() == 0:
            print(f"resumed after step {step}", flush=True)
        for epoch in range(sampler.epoch, args.epochs):
            model.train()
            for images, labels in sampler.batches(loader):
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step)
                loss = functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % 20 == 0:
                    mean = hvd.allreduce(loss.detach()).item()  # of all ranks
                    if hvd.rank() == 0:
                        print(f"step {step} loss {mean:.4f}", flush=True)
                checkpointer.maybe_save(step, epoch)
        if restored is None or step > restored.step:
            checkpointer.save(step, args.epochs)

    figure = accuracy(model, *draw(1000, seed=2))
    if hvd.rank() == 0:
        print(f"accuracy={figure:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
