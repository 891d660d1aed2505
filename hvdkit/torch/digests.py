"""Compare tensors between ranks by digests, such as the parameters before the first reduction.

All ranks apply the same reduced gradient. Equal models stay equal, and different models stay
different. Without this comparison, a script without `broadcast_parameters` would train a different
model on each rank, and no error would show it.
"""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from hvdkit.core.consistency import check_consistency
from hvdkit.torch.collectives import TorchCollectives

# Elements of 64 bits.
_CHUNK = 1 << 21


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
        "pass. After last = hvd.join(), call it with root_rank=last. If ranks should have "
        "different values, pass check_parameters=False to hvd.DistributedOptimizer.",
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content of a dense tensor as a one-dimensional uint8 tensor on its device.

    The result may share the tensor's memory.
    """
    plain = tensor.detach().as_subclass(torch.Tensor)
    contiguous = plain.resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor with one element may have any stride, which `view` would refuse.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


@torch.no_grad()
def digests(tensors: list[torch.Tensor]) -> list[int]:
    """Return a 64-bit digest of each tensor, with one copy to the host for all accelerators."""
    found: list[int | torch.Tensor] = []
    for tensor in tensors:
        dense = tensor.to_dense() if tensor.is_sparse else tensor
        content = bytes_of(dense)
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
    """Return a sum of 64-bit words, weighted by their index, in integers that wrap around.

    The weights are odd, so a change of a single bit changes the sum.
    """
    whole = content.numel() // 8 * 8
    # A view needs an address that is a multiple of 8 bytes.
    aligned = content.data_ptr() % 8 == 0
    words = (content if aligned else content.clone())[:whole].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=content.device)
    weights = 2 * torch.arange(min(_CHUNK, max(words.numel(), 8)), device=content.device) + 1
    weights *= 0x1E3779B97F4A7C15  # odd
    for k, chunk in enumerate(words.split(_CHUNK)):
        total += (chunk * weights[: chunk.numel()]).sum() * (2 * k + 1)
    rest = content[whole:].to(torch.int64)
    return total * 3 + (rest * weights[: rest.numel()]).sum()
