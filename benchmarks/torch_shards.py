"""One rank of `scripts/bench_shards`: steps with sharded optimizers, and with their peers.

    torch_shards.py VARIANTS TURNS DEVICE

All variants train the same model in turns. The first rank prints a JSON object: the seconds of each
step of each variant (the slowest rank counts), the bytes that the network interface DEVICE of the
first rank's host has sent in these steps, and the bytes of the first rank's optimizer state.
"""

import functools
import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import hvdkit.torch as hvd
from benchmarks.torch_backends import _TOKENS, _WIDTH, _model, in_turns

_Made = tuple[nn.Module, torch.optim.Optimizer]


def _hvdkit(shard: str | None) -> _Made:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), shard=shard)


def _ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(_model(), gradient_as_bucket_view=True)


def _ddp_alone() -> _Made:
    model = _ddp()
    return model, torch.optim.AdamW(model.parameters(), 1e-4)


def _ddp_zero() -> _Made:
    model = _ddp()
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)


def _fsdp_kept() -> _Made:
    model = _model()
    for layer in (*model, model):
        fully_shard(layer, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), 1e-4)


VARIANTS: dict[str, Callable[[], _Made]] = {
    "sharded": lambda: _hvdkit("optimizer"),
    "replicated": lambda: _hvdkit(None),
    "ddp": _ddp_alone,
    "ddp-zero": _ddp_zero,
    "fsdp-kept": _fsdp_kept,
}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    optimizer = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer
    return sum(
        getattr(value, "_local_tensor", value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def main() -> None:
    """Make all steps in turns, and print the result."""
    names, turns, device = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    hvd.init()
    made = {name: VARIANTS[name]() for name in names}
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randn(1, _TOKENS, _WIDTH, generator=generator)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    steps = {name: functools.partial(step, *each) for name, each in made.items()}
    seconds, sent = in_turns(steps, turns, device)
    if dist.get_rank() == 0:
        size = 4 * sum(p.numel() for p in _model().parameters())
        state = {name: _state_bytes(optimizer) for name, (_, optimizer) in made.items()}
        print(json.dumps({"seconds": seconds, "sent": sent, "model_bytes": size, "state": state}))
    hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
