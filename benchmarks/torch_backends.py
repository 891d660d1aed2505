"""One rank of `scripts/bench_backends`: training steps and single collectives.

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
from collections.abc import Callable, Mapping
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


def _training(model: nn.Module, seed: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.randn(1, _TOKENS, _WIDTH, generator=torch.Generator().manual_seed(seed))

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


def _ddp(group: dist.ProcessGroup) -> Callable[[], None]:
    model = nn.parallel.DistributedDataParallel(
        _model(), process_group=group, gradient_as_bucket_view=True
    )
    return _training(model, dist.get_rank())


def _fsdp(group: dist.ProcessGroup, kept: bool = False) -> Callable[[], None]:
    mesh, model = DeviceMesh.from_group(group, "cpu"), _model()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh, reshard_after_forward=not kept)
    return _training(model, dist.get_rank())


def _tensor_parallel(group: dist.ProcessGroup) -> Callable[[], None]:
    mesh, model = DeviceMesh.from_group(group, "cpu"), _model()
    plan: dict[str, ParallelStyle] = {
        **dict.fromkeys(("queries", "keys", "values", "up"), ColwiseParallel()),
        **dict.fromkeys(("output", "down"), RowwiseParallel()),
    }
    for layer in model:
        parallelize_module(layer, mesh, plan)
    return _training(model, 0)  # ranks share the data


def _allreduce(group: dist.ProcessGroup, size: int, calls: int = 1) -> Callable[[], None]:
    data = torch.zeros(size // 4)

    def step() -> None:
        for _ in range(calls):
            dist.all_reduce(data, group=group)

    return step


def _alltoall(group: dist.ProcessGroup) -> Callable[[], None]:
    sent, received = torch.zeros(2, 1_000_000)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _half(group: dist.ProcessGroup) -> Callable[[], None]:
    ranks = list(range(dist.get_world_size() // 2))
    half = dist.new_group(ranks, backend=dist.get_backend(group))
    return _allreduce(half, 100_000_000) if dist.get_rank() in ranks else lambda: None


#: The step of each variant. Those of single collectives have the sizes in bytes in their names.
VARIANTS: dict[str, Callable[[dist.ProcessGroup], Callable[[], None]]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "fsdp-kept": lambda group: _fsdp(group, kept=True),
    "tensor-parallel": _tensor_parallel,
    "50-allreduces-64k": lambda group: _allreduce(group, 64 << 10, calls=50),
    "allreduce-100m": lambda group: _allreduce(group, 100_000_000),
    "alltoall-4m": _alltoall,
    "allreduce-100m-half": _half,
}


def _sent(device: str) -> int:
    """Return the bytes that a network interface of this host has sent."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def in_turns(
    steps: Mapping[str, Callable[[], object]], turns: int, device: str
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Make steps in turns, in random order.

    Args:
        steps: name -> makes the step, on all ranks.
        turns: the number of measured steps of each.
        device: a network interface of this host.

    Returns:
        By name, the seconds of each step, in which the slowest rank counts; and the bytes that the
        interface has sent in these steps.
    """
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
    return seconds, sent


def main() -> None:
    """Make all steps in turns, and print the result."""
    names, turns, device = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    steps: dict[str, Callable[[], None]] = {}
    for name in names:
        for backend, group in groups.items():
            steps[f"{name} {backend}"] = VARIANTS[name](group)
    seconds, sent = in_turns(steps, turns, device)
    if dist.get_rank() == 0:
        size = 4 * sum(p.numel() for p in _model().parameters())
        print(json.dumps({"seconds": seconds, "sent": sent, "model_bytes": size}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
