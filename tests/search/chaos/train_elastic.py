"""The training of an elastic job under faults, with PyTorch.

The output is that of `train_torch.py`, and a line in `committed` for each commit. Random numbers
depend on the step and the rank only, because a commit does not store their generators.
"""

import os
import time
from contextlib import nullcontext
from typing import Any

from announce import append, args

# isort: split
import torch
from torch import nn
from torch.nn import functional

import hvdkit.torch as hvd

SAMPLES = 301
BATCH = 4
#: Steps between two commits, and between two checkpoints.
COMMIT, SAVE = 4, 7
#: In steps that are a multiple of this number, the commit comes before the checkpoint.
COMMIT_FIRST = 8


def main() -> None:
    hvd.init()
    rank = hvd.rank()
    torch.set_num_threads(1)
    fixed = torch.Generator().manual_seed(1)
    x, teacher = torch.randn(SAMPLES, 32, generator=fixed), torch.randn(32, 10, generator=fixed)
    y = (x @ teacher).argmax(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(32, 128), nn.LayerNorm(128), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        model.named_parameters(),
        compression=args.wire,
        bucket_bytes=10_000,
    )
    checkpointer: Any = nullcontext()
    if args.checkpoints:
        checkpointer = hvd.Checkpointer(
            args.checkpoints, model=model, optimizer=optimizer, every_steps=SAVE
        )

    @hvd.elastic.run
    def train(state: Any) -> None:
        append(args.out / f"resumed.{rank}", os.getpid(), state.step)
        while state.step < args.steps:
            time.sleep(args.pace)
            draw = torch.manual_seed(1000 * state.step + rank)
            samples = torch.randint(SAMPLES, (BATCH,), generator=draw)
            loss = functional.cross_entropy(model(x[samples]), y[samples])
            loss = loss * 2.0 ** (3 * (state.step % 7) - 9)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.step += 1
            line = (os.getpid(), state.step, state.step, loss.item().hex(), time.monotonic())
            append(args.out / f"losses.{rank}", *line)
            # In both orders, and between two commits: a checkpoint may be newer than the commit.
            commits_first = state.step % COMMIT_FIRST == 0
            if args.checkpoints and not commits_first:
                checkpointer.maybe_save(state.step, 0)
            if state.step % COMMIT == 0:
                state.commit()
                if rank == 0:
                    append(args.out / "committed", state.step)
            if args.checkpoints and commits_first:
                checkpointer.maybe_save(state.step, 0)

    with checkpointer:
        restored = checkpointer.restore() if args.checkpoints else None
        state = hvd.elastic.TorchState(model, optimizer, step=restored.step if restored else 0)
        train(state)
        if args.checkpoints:
            checkpointer.save(state.step, 0)
    tensors = [*model.state_dict().values()]
    for each in optimizer.state_dict()["state"].values():
        tensors += [each[name] for name in sorted(each)]
    model.eval()
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    (args.out / f"accuracy.{rank}").write_text(str(accuracy))
    (args.out / f"final.{rank}").write_bytes(b"".join(t.numpy().tobytes() for t in tensors))
    hvd.shutdown()


if __name__ == "__main__":
    main()
