"""Train a GAN with two optimizers on a ring of eight Gaussians, with PyTorch.

The discriminator has a gradient penalty, so each step has three backward passes. All ranks draw the
points and the noise of the whole batch from the same generator, and use their own share of it. With
a batch size of all ranks together, any number of ranks trains the same models:

    hvdkit run -np 2 python examples/torch_gan.py

Checkpoints are in runs/torch_gan. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/torch_gan.py --resume
"""

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn.functional import softplus

import hvdkit.torch as hvd

MODES, DEVIATION, NOISE = 8, 0.05, 16
AVERAGE_DECAY = 0.99


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, 128),
        nn.LeakyReLU(0.2),
        nn.Linear(128, outputs),
    )


def centres() -> torch.Tensor:
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of `count` real points and of as many vectors of noise."""
    modes = torch.randint(MODES, (count,), generator=generator)
    points = centres()[modes] + DEVIATION * torch.randn(count, 2, generator=generator)
    noise = torch.randn(count, NOISE, generator=generator)
    mine = slice(hvd.rank(), None, hvd.size())
    return points[mine], noise[mine]


def penalty(discriminator: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """Return the mean squared gradient of the scores of real points (R1, arXiv:1801.04406).

    `torch.autograd.grad` computes the inner derivative, because reduced gradients cannot be
    differentiated.
    """
    points = points.clone().requires_grad_()
    scores = discriminator(points)
    (gradient,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
    return gradient.square().sum(dim=1).mean()


@torch.no_grad()
def quality(generator: nn.Module, count: int = 4000) -> tuple[float, int]:
    """Return the share of points within 4 deviations of a centre, and the number of modes found."""
    _, noise = draw(count, torch.Generator().manual_seed(1))
    distance, mode = torch.cdist(generator(noise), centres()).min(dim=1)
    found = torch.bincount(mode[distance < 4 * DEVIATION], minlength=MODES)
    found = hvd.allreduce(found, op=hvd.Sum)
    return found.sum().item() / count, int((found > count / MODES / 4).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000, help="of both models (default 3000)")
    parser.add_argument(
        "--batch-size", type=int, default=256, help="points per step, of all ranks (default 256)"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="first learning rate (default 1e-3)")
    parser.add_argument("--penalty", type=float, default=0.1, help="its weight (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/torch_gan")
    parser.add_argument("--checkpoint-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    torch.manual_seed(args.seed)
    draws = torch.Generator().manual_seed(args.seed)  # the same on every rank
    generator, discriminator = network(NOISE, 2), network(2, 1)
    models = {"generator": generator, "discriminator": discriminator}
    optimizers = {
        name: hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.0, 0.99)),
            [(f"{name}.{parameter}", p) for parameter, p in model.named_parameters()],
        )
        for name, model in models.items()
    }
    for model in models.values():
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = hvd.WarmupCosine(args.lr, args.steps)
    average = copy.deepcopy(generator).requires_grad_(False)  # of the generator over the steps

    with hvd.Checkpointer(
        args.checkpoint_dir,
        model=models | {"average": average},
        optimizer=optimizers,
        generators={"draws": draws},
        every_steps=args.checkpoint_every,
        overwrite=not args.resume,
    ) as checkpointer:
        restored = checkpointer.restore() if args.resume else None
        first = restored.step if restored else 0
        if restored and hvd.rank() == 0:
            print(f"resumed after step {first}", flush=True)
        for step in range(first + 1, args.steps + 1):
            points, noise = draw(args.batch_size, draws)
            for optimizer in optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step - 1)

            optimizers["discriminator"].zero_grad()
            fake = generator(noise)
            of_real, of_fake = discriminator(points), discriminator(fake.detach())
            loss = softplus(-of_real).mean() + softplus(of_fake).mean()
            with hvd.no_sync(optimizers["discriminator"]):
                loss.backward()
            (args.penalty * penalty(discriminator, points)).backward()  # reduces the sum of both
            optimizers["discriminator"].step()

            discriminator.requires_grad_(False)
            optimizers["generator"].zero_grad()
            softplus(-discriminator(fake)).mean().backward()
            optimizers["generator"].step()
            discriminator.requires_grad_(True)

            for mean, parameter in zip(average.parameters(), generator.parameters(), strict=True):
                mean.lerp_(parameter.detach(), 1 - AVERAGE_DECAY)
            if step % 100 == 0:
                mean_loss = hvd.allreduce(loss.detach()).item()  # of all ranks
                if hvd.rank() == 0:
                    print(f"step {step} loss {mean_loss:.4f}", flush=True)
            checkpointer.maybe_save(step)
        if args.steps > first:
            checkpointer.save(args.steps)

    share, modes = quality(average)
    if hvd.rank() == 0:
        print(f"{modes} of {MODES} modes")
        print(f"on_a_mode={share:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
