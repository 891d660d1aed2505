"""Compare tensors between ranks by digests, such as the parameters before the first reduction.

Mean gradients keep equal models equal, and different models different. Without this comparison, a
forgotten `broadcast_parameters` would train a different model on each rank without any error.
"""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from hvdkit.core.consistency import check_consistency
from hvdkit.torch.collectives import TorchCollectives

_CHUNK = 1 << 24


def check_values(collectives: TorchCollectives, parameters: Mapping[str, torch.Tensor]) -> None:
    """Check that all parameters have the same values on every rank. A collective.

    Raises:
        RankMismatchError: on every rank, naming the first parameter that differs.
    """
    pairs = zip(parameters, digests(list(parameters.values())), strict=True)
    check_consistency(
        collectives,
        [f"{name!r} has a value with digest {d:016x}" for name, d in pairs],
        "the values of the parameters",
        "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first backward "
        "pass, and with root_rank=last after last = hvd.join(). If ranks should have different "
        "values, pass check_parameters=False to hvd.DistributedOptimizer.",
    )


@torch.no_grad()
def digests(tensors: list[torch.Tensor]) -> list[int]:
    """Return a 64-bit digest of each tensor, with one copy to the host for all accelerators."""
    found: list[int | torch.Tensor] = []
    for tensor in tensors:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        content = dense.detach().contiguous().view(-1).view(torch.uint8)
        if content.device.type == "cpu":
            host: Any = content.numpy()
            found.append(xxhash.xxh64_intdigest(host) if len(host) else 0)
        else:
            found.append(_digest_on_device(content))
    computed = [each for each in found if isinstance(each, torch.Tensor)]
    values = iter(
        torch.stack([each.to(computed[0].device) for each in computed]).tolist() if computed else []
    )
    return [
        (next(values) if isinstance(each, torch.Tensor) else each) & 0xFFFFFFFFFFFFFFFF
        for each in found
    ]


def _digest_on_device(content: torch.Tensor) -> torch.Tensor:
    """Return a sum of the bytes, weighted by their index, in integers that wrap around."""
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    weights = torch.arange(1, min(_CHUNK, content.numel()) + 1, device=content.device)
    weights = weights * 0x9E3779B1 + 1
    for k, chunk in enumerate(content.split(_CHUNK)):
        total += (chunk.to(torch.int64) * weights[: chunk.numel()]).sum() * (2 * k + 1)
    return total
