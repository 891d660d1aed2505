"""Sums that are sent as blocks of 8-bit integers (`hvdkit.reduction.int8`), with any engine.

hvdkit's own engine has such sums for the CPU (`hvdkit/engine/sources/int8_blocks.h`). Here the same
format is computed by PyTorch, on any device, and sent by `alltoall` and `allgather`.
`TorchBackend.sum_blocks` uses it where hvdkit's engine cannot compute the sum.
"""

import torch
from horovod.torch import mpi_ops

from hvdkit.reduction.int8 import BLOCK, BLOCK_BYTES


class BlockSum:
    """An in-place sum over the ranks. The constructor starts it.

    The buffer is divided into one part per rank. Each rank receives its part from all ranks, adds
    them, and sends the sum to all ranks.

    Args:
        buffer: float32, of shape [elements].
        name: the prefix of the collectives' names.
        factor: multiply the sum by it.
        process_set: the ranks.
    """

    def __init__(
        self, buffer: torch.Tensor, name: str, factor: float, process_set: mpi_ops.ProcessSet
    ) -> None:
        self._buffer = buffer
        self._name = name
        self._factor = factor
        self._process_set = process_set
        self._ranks = process_set.size()
        blocks = -(-buffer.numel() // BLOCK)
        blocks += -blocks % self._ranks
        padded = buffer.new_zeros(blocks * BLOCK)
        padded[: buffer.numel()] = buffer
        self._handle = mpi_ops.alltoall_async(
            encode(padded.view(-1, BLOCK)), name=f"{name}.parts", process_set=process_set
        )

    def wait(self) -> torch.Tensor:
        """Wait for the sum and return the buffer.

        Raises:
            HorovodInternalError: a collective failed.
        """
        received, _ = mpi_ops.synchronize(self._handle)
        parts = decode(received).view(self._ranks, -1, BLOCK)
        total = parts[0].clone()
        for part in parts[1:]:  # in the order of the ranks
            total += part
        handle = mpi_ops.allgather_async(
            encode(total * self._factor), f"{self._name}.sums", self._process_set
        )
        sums = decode(mpi_ops.synchronize(handle)).view(-1)
        return self._buffer.copy_(sums[: self._buffer.numel()])


def encode(numbers: torch.Tensor) -> torch.Tensor:
    """Encode each block as a float32 scale and a code of 8 bits for each number.

    Args:
        numbers: float32, of shape [blocks, BLOCK].

    Returns:
        uint8, of shape [blocks, BLOCK_BYTES].
    """
    largest = numbers.abs().amax(1, keepdim=True)
    scale = largest / 127
    # If the division has rounded down, the largest number would get a code above 127. This happens
    # with subnormal numbers.
    above = torch.nextafter(scale, scale.new_full((1,), torch.inf))
    scale = torch.where(scale * 127 < largest, above, scale)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    codes = torch.where(scale > 0, numbers / scale, 0.0).round_().to(torch.int8)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1)


def decode(blocks: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers, of shape [blocks, BLOCK], that `encode` has rounded."""
    assert blocks.shape[1] == BLOCK_BYTES
    scale = blocks[:, :4].contiguous().view(torch.float32)
    return blocks[:, 4:].view(torch.int8) * scale
