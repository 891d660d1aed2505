"""One rank of `scripts/bench_backends`: steps of DDP, FSDP2 and tensor parallelism.

The steps run over both backends in turns.

    torch_backends.py VARIANTS TURNS DEVICE

The ranks find each other by torchrun's environment variables. The first rank prints a JSON object:
the seconds of each step of each variant and backend (the slowest rank counts), and the bytes that
the network interface DEVICE of the first rank's host has sent in these steps.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import hvdkit.torch.distributed  # noqa: F401  registers the backend

BACKENDS = ("gloo", "hvd")
_WIDTH, _HEAD, _LAYERS, _TOKENS = 512, 64, 8, 32
_WARM_STEPS = 2


class Block(nn.Module):
    """A block of a transformer. Tensor parallelism gives each rank some of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.queries, self.keys, self.values, self.output = (
            nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of shape (batch, tokens, width) like its input."""
        batch, tokens, _ = x.shape
        normed = self.norms[0](x)
        heads = [
            layer(normed).view(batch, tokens, -1, _HEAD).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        ]
        mixed = functional.scaled_dot_product_attention(*heads)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(_LAYERS)))


def _ddp(group: dist.ProcessGroup) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        _model(), process_group=group, gradient_as_bucket_view=True
    )


def _fsdp(group: dist.ProcessGroup, kept: bool = False) -> nn.Module:
    mesh, model = DeviceMesh.from_group(group, "cpu"), _model()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh, reshard_after_forward=not kept)
    return model


def _tensor_parallel(group: dist.ProcessGroup) -> nn.Module:
    mesh, model = DeviceMesh.from_group(group, "cpu"), _model()
    plan: dict[str, ParallelStyle] = {
        **dict.fromkeys(("queries", "keys", "values", "up"), ColwiseParallel()),
        **dict.fromkeys(("output", "down"), RowwiseParallel()),
    }
    for layer in model:
        parallelize_module(layer, mesh, plan)
    return model


VARIANTS: dict[str, Callable[[dist.ProcessGroup], nn.Module]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "fsdp-kept": lambda group: _fsdp(group, kept=True),
    "tensor-parallel": _tensor_parallel,
}


def _sent(device: str) -> int:
    """Return the bytes that a network interface of this host has sent."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def main() -> None:
    """Make all steps in turns, and print the result."""
    names, turns, device = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    steps: dict[str, Callable[[], None]] = {}
    for name in names:
        for backend, group in groups.items():
            model = VARIANTS[name](group)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
            # Ranks of tensor parallelism share the data.
            seed = 0 if name == "tensor-parallel" else dist.get_rank()
            data = torch.randn(1, _TOKENS, _WIDTH, generator=torch.Generator().manual_seed(seed))

            def step(
                model: nn.Module = model,
                optimizer: torch.optim.Optimizer = optimizer,
                data: torch.Tensor = data,
            ) -> None:
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()

            steps[f"{name} {backend}"] = step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    sent = dict.fromkeys(steps, 0)
    draw = random.Random(0)
    for turn in range(-_WARM_STEPS, turns):
        for name in draw.sample(sorted(steps), len(steps)):
            dist.barrier()
            bytes_before, began = _sent(device), time.perf_counter()
            steps[name]()
            slowest = torch.tensor(time.perf_counter() - began)
            dist.barrier()
            bytes_after = _sent(device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= 0:
                seconds[name].append(slowest.item())
                sent[name] += bytes_after - bytes_before
    if dist.get_rank() == 0:
        size = 4 * sum(p.numel() for p in _model().parameters())
        print(json.dumps({"seconds": seconds, "sent": sent, "model_bytes": size}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
