"""The error bound of int8, and a check of the engine's sums in blocks."""

import torch
from horovod.torch import mpi_ops
from torch import nn

BLOCK = 256

# Elements. A sum of fewer than 64 KiB is sent as float32; odd ones; more than one chunk.
SIZES = [3, 16384, 20_000, 33_333, 262_144, 1_500_001]


def bound(gradients):
    """Return the largest error of the mean of gradients of shape [ranks, elements]."""
    padded = nn.functional.pad(gradients.double().abs(), (0, -gradients.shape[1] % BLOCK))
    largest = padded.view(len(gradients), -1, BLOCK).amax((0, 2))
    per_element = largest.repeat_interleave(BLOCK)[: gradients.shape[1]]
    return 2 / 254 * per_element + (len(gradients) + 2) * 2**-24 * per_element


def of_all_magnitudes(size, rank):
    generator = torch.Generator().manual_seed(1000 * size + rank)
    exponents = torch.randint(-6, 6, (size,), generator=generator)
    return torch.randn(size, generator=generator) * 10.0**exponents


def reduce_in_engine(tensor):
    handle = mpi_ops.allreduce_async_(tensor, name="hvdkit.int8.check", op=mpi_ops.Sum)
    return mpi_ops.synchronize(handle)


def check_engine(hvd, new=lambda size: torch.empty(size)):
    """Assert that sums in blocks are within the bound, deterministic, and equal on all ranks.

    Args:
        hvd: hvdkit.torch.
        new: returns a float32 tensor of a given number of elements.
    """
    for size in SIZES:
        everyone = torch.stack([of_all_magnitudes(size, rank) for rank in range(hvd.size())])
        results = [reduce_in_engine(new(size).copy_(everyone[hvd.rank()])) for _ in range(2)]
        assert torch.equal(results[0], results[1])
        error = (results[0].double() / hvd.size() - everyone.double().mean(0)).abs()
        assert (error <= bound(everyone)).all(), size
        assert len(set(hvd.allgather_object(results[0].numpy().tobytes()))) == 1
    for value in (float("inf"), float("nan")):
        tensor = new(100_000).fill_(1.0)
        if hvd.rank() == hvd.size() - 1:
            tensor[70_000] = value
        total = reduce_in_engine(tensor)
        first = 70_000 // BLOCK * BLOCK
        assert total[first : first + BLOCK].isnan().all()
        assert total[:first].eq(hvd.size()).all()
        assert total[first + BLOCK :].eq(hvd.size()).all()
