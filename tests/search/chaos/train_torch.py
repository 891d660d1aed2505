"""The training of a job under faults, with PyTorch.

Each rank writes to `out` a line for each pass (process id, pass, number of steps, loss, time), and
at the end the bytes of its weights and optimizer state. The training has all state that a resume
could lose: dropout, random numbers of each kind, a schedule, and several buckets. The magnitude of
gradients changes so much that the scales of a 16-bit wire format change, too.
"""

import os
import random
import time
from contextlib import nullcontext
from typing import Any

from announce import append, args

# isort: split
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd

SAMPLES = 301
BATCH = 4


def main() -> None:
    hvd.init()
    rank = hvd.rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    noise = torch.Generator().manual_seed(100 + rank)

    fixed = torch.Generator().manual_seed(1)
    x, teacher = torch.randn(SAMPLES, 32, generator=fixed), torch.randn(32, 10, generator=fixed)
    y = (x @ teacher).argmax(1)
    data = TensorDataset(x, y)
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
        compression=args.wire,
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
    with checkpointer:
        restored = checkpointer.restore() if args.checkpoints else None
        step = restored.step if restored else 0
        append(args.out / f"resumed.{rank}", os.getpid(), step)
        while step < args.steps:
            for inputs, labels in sampler.batches(loader):
                time.sleep(args.pace)
                counts["passes"] += 1
                inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=noise)
                inputs = inputs * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
                loss = functional.cross_entropy(model(inputs), labels)
                loss = loss * 2.0 ** (3 * (step % 7) - 9)
                loss.backward()
                optimizer.step()
                losses = args.out / f"losses.{rank}"
                append(
                    losses, os.getpid(), counts["passes"], step, loss.item().hex(), time.monotonic()
                )
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
    model.eval()
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    (args.out / f"accuracy.{rank}").write_text(str(accuracy))
    (args.out / f"final.{rank}").write_bytes(content)
    hvd.shutdown()


if __name__ == "__main__":
    main()
