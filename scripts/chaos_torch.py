"""The training of chaos_checkpoint's ranks, with PyTorch.

Each rank writes to OUT its pid, a line for each pass (pass, number of steps, loss), and at the end
its weights and optimizer state. The training has all state that a resume could lose: dropout,
random numbers of every kind, a schedule and several buckets. The magnitude of gradients changes so
much that the scales of a 16-bit wire format change, too.
"""

import argparse
import os
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd

SAMPLES = 301
BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoints")
    parser.add_argument("--wire", default="fp32")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    hvd.init()
    rank = hvd.rank()
    (args.out / f"pid.{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    noise = torch.Generator().manual_seed(100 + rank)

    fixed = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(SAMPLES, 32, generator=fixed), torch.randint(10, (SAMPLES,), generator=fixed)
    )
    sampler = hvd.ResumableSampler(data, BATCH, seed=7)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    model = nn.Sequential(
        *(nn.Linear(32, 128), nn.LayerNorm(128), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        model.named_parameters(),
        compression={"fp32": "none"}.get(args.wire, args.wire),
        accumulation_steps=args.accumulation,
        bucket_bytes=10_000,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=args.steps + 1)
    counts = {"passes": 0}

    checkpointer: Any = nullcontext()
    if args.checkpoints:
        checkpointer = hvd.Checkpointer(
            args.checkpoints,
            model=model,
            optimizer=optimizer,
            lr_scheduler=schedule,
            data=sampler,
            metadata=counts,
            generators={"noise": noise},
            every_steps=2,
        )
    with checkpointer, (args.out / f"losses.{rank}").open("a", buffering=1) as losses:
        restored = checkpointer.restore() if args.checkpoints else None
        step = restored.step if restored else 0
        with (args.out / f"resumed.{rank}").open("a") as resumed:
            resumed.write(f"{step}\n")
        while step < args.steps:
            for x, y in sampler.batches(loader):
                counts["passes"] += 1
                x = x + 0.1 * torch.randn(x.shape, generator=noise)
                x = x * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
                loss = functional.cross_entropy(model(x), y) * 2.0 ** (3 * (step % 7) - 9)
                loss.backward()
                optimizer.step()
                losses.write(f"{counts['passes']} {step} {loss.item().hex()}\n")
                if optimizer.stepped:
                    step += 1
                    schedule.step()
                    optimizer.zero_grad()
                if args.checkpoints:
                    checkpointer.maybe_save(step, sampler.epoch)
                if step == args.steps:
                    break
        if args.checkpoints:
            checkpointer.save(step, sampler.epoch)
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [state[name] for name in sorted(state)]
    content = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    (args.out / f"final.{rank}").write_bytes(content)
    hvd.shutdown()


if __name__ == "__main__":
    main()
