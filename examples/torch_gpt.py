"""Train a small GPT on the source code of Python's standard library, byte by byte, with PyTorch.

Each step accumulates several passes in bfloat16, clips the gradient and follows a cosine schedule.
The batch size is that of all ranks together, so that any number of ranks trains the same model:

    hvdkit run -np 2 python examples/torch_gpt.py

Checkpoints are in runs/torch_gpt. A run that was stopped or killed resumes with

    hvdkit run -np 2 python examples/torch_gpt.py --resume
"""

import argparse
import math
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hvdkit.torch as hvd

HEADS, CONTEXT = 4, 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(samples, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """A transformer that predicts each byte from the bytes before it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.bytes(text) + self.places.weight[: text.shape[1]])
        return self.norm(x) @ self.bytes.weight.T


def load_text(megabytes: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of CONTEXT + 1 bytes for training and for validation."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = text[: int(megabytes * 1e6)]
    windows = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    windows = windows.unfold(0, CONTEXT + 1, CONTEXT)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[chosen[256:]], windows[chosen[:256]]


def loss_of(model: nn.Module, windows: torch.Tensor, bf16: bool) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        scores = model(windows[:, :-1])
    return functional.cross_entropy(scores.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, windows: torch.Tensor, bf16: bool) -> float:
    """Return the loss over all validation windows; each rank computes its share."""
    mine = windows[hvd.rank() :: hvd.size()]
    total = torch.tensor([0.0, len(mine)], dtype=torch.float64)
    for part in mine.split(32):
        total[0] += loss_of(model, part, bf16) * len(part)
    loss, count = hvd.allreduce(total, op=hvd.Sum).tolist()
    return loss / count / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1, help="passes over the text (default 1)")
    parser.add_argument("--megabytes", type=float, default=0.7, help="of text (default 0.7)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="windows per pass, of all ranks (default 16)"
    )
    parser.add_argument("--passes", type=int, default=2, help="passes per step (default 2)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default 3e-3)")
    parser.add_argument("--float32", action="store_true", help="compute in float32, not bfloat16")
    parser.add_argument("--width", type=int, default=128, help="of the model (default 128)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default 2)")
    parser.add_argument("--shard", action="store_true", help="divide the optimizer among the ranks")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same result (default 0)")
    parser.add_argument("--checkpoint-dir", metavar="DIR", default="runs/torch_gpt")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="resume at the newest checkpoint")
    args = parser.parse_args()

    hvd.init()
    if args.batch_size % hvd.size():
        parser.error(f"--batch-size {args.batch_size}: expected a multiple of {hvd.size()} ranks")
    torch.manual_seed(args.seed)
    train, validation = load_text(args.megabytes)
    steps_per_epoch = len(train) // (args.batch_size * args.passes)
    train = train[: steps_per_epoch * args.batch_size * args.passes]  # whole steps only

    model = GPT(args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        accumulation_steps=args.passes,
        shard="optimizer" if args.shard else None,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = hvd.WarmupCosine(args.lr, args.epochs * steps_per_epoch, steps_per_epoch // 10)
    sampler = hvd.ResumableSampler(train, args.batch_size // hvd.size(), seed=args.seed)

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
            for numbers in sampler.batches():
                for group in optimizer.param_groups:
                    group["lr"] = schedule(step)
                loss = loss_of(model, train[numbers], not args.float32)
                loss.backward()
                hvd.clip_grad_norm_(optimizer, 1.0)  # does nothing inside an accumulation window
                optimizer.step()
                optimizer.zero_grad()
                if not optimizer.stepped:
                    continue
                step += 1
                if step % 20 == 0:
                    mean = hvd.allreduce(loss.detach()).item()  # of the last pass on all ranks
                    if hvd.rank() == 0:
                        print(f"step {step} loss {mean:.4f}", flush=True)
                checkpointer.maybe_save(step, epoch)
        if restored is None or step > restored.step:
            checkpointer.save(step, args.epochs)

    figure = bits_per_byte(model, validation, not args.float32)
    if hvd.rank() == 0:
        print(f"bits_per_byte={figure:.4f} on {hvd.size()} ranks")
    hvd.shutdown()


if __name__ == "__main__":
    main()
