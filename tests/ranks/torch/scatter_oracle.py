"""Reducescatter and allgather, compared with each other and with allreduce."""

import torch
from horovod.torch import mpi_ops

# Rows. None for some ranks; different parts; below and above 64 KiB; several chunks.
ROWS = [1, 7, 100, 12_345, 300_001]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]


def random_values(rows, dtype, rank, width=3):
    """Return whole numbers whose sum over 4 ranks is exact in each dtype."""
    generator = torch.Generator().manual_seed(1000 * rows + rank)
    return torch.randint(-30, 31, (rows, width), generator=generator).to(dtype)


def part_of(rows, rank, ranks):
    """Return begin and end of a rank's part, as Horovod divides rows."""
    begin = rank * (rows // ranks) + min(rank, rows % ranks)
    return begin, begin + rows // ranks + (rank < rows % ranks)


def in_arena(tensor):
    from hvdkit.torch import shared_memory

    flat = shared_memory.empty(tensor.numel(), tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(tensor.shape)


def check_sums(hvd, dtype, rows):
    """Assert that reducescatter gives each rank its rows of the sum."""
    ranks, rank = hvd.size(), hvd.rank()
    everyone = [random_values(rows, dtype, r) for r in range(ranks)]
    begin, end = part_of(rows, rank, ranks)
    total = sum(values.double() for values in everyone)
    for place in (lambda tensor: tensor, in_arena, in_arena if rank % 2 else lambda t: t):
        # The second time, the response is in Horovod's cache.
        for _ in range(2):
            own = place(everyone[rank])
            result = mpi_ops.reducescatter(own, op=hvd.Sum, name=f"scatter {dtype}")
            assert torch.equal(result.double(), total[begin:end]), (dtype, rows)
            assert torch.equal(own, everyone[rank])
    if dtype.is_floating_point:
        result = mpi_ops.reducescatter(everyone[rank], op=hvd.Average, name="scatter mean")
        mean = (total / ranks)[begin:end]
        assert torch.allclose(result.double(), mean, rtol=2 * torch.finfo(dtype).eps)


def check_gathers(hvd, dtype, rows):
    """Assert that allgather returns the rows of all ranks, whose numbers differ."""
    ranks = hvd.size()
    everyone = [random_values(rows * r // ranks + rows % 3, dtype, r) for r in range(ranks)]
    for _ in range(2):
        gathered = mpi_ops.allgather(everyone[hvd.rank()], name=f"gather {dtype}")
        assert torch.equal(gathered, torch.cat(everyone)), (dtype, rows)


def check_bits(hvd, least=1):
    """Assert that a flat allreduce equals reducescatter and allgather, bit by bit."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for size in (200, 40_000, 1_000_003):
            if size * dtype.itemsize < least:
                continue
            generator = torch.Generator().manual_seed(hvd.rank())
            own = torch.randn(size, generator=generator).to(dtype)
            part = mpi_ops.reducescatter(own, op=hvd.Average, name="bits scatter")
            gathered = mpi_ops.allgather(part, name="bits gather")
            reduced = mpi_ops.allreduce(own, op=hvd.Average, name="bits reduce")
            assert torch.equal(gathered, reduced), (dtype, size)


def check_all(hvd, least=1):
    """Run all checks.

    Args:
        hvd: hvdkit.torch.
        least: the smallest tensor in bytes that `check_bits` compares. Smaller ones are summed in
            another order between hosts.
    """
    for dtype in DTYPES:
        for rows in ROWS:
            check_sums(hvd, dtype, rows)
            check_gathers(hvd, dtype, rows)
    check_bits(hvd, least)
