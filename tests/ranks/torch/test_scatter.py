"""Reducescatter and allgather in the memory of one host."""

import pytest
import torch

from tests.ranks.torch import scatter_oracle
from tests.ranks.torch.scatter_oracle import DTYPES, ROWS, random_values


@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[3]], ids=str)
def test_reducescatter(hvd, dtype):
    for rows in ROWS:
        scatter_oracle.check_sums(hvd, dtype, rows)


def test_reducescatter_again_with_other_shapes_and_factors(hvd):
    """Use a name again while its response is in Horovod's cache."""
    ranks = hvd.size()
    for rows, width, op in [(8, 3, hvd.Sum), (8, 3, hvd.Average), (9, 2, hvd.Sum), (8, 3, hvd.Sum)]:
        for _ in range(3):
            total = sum(random_values(rows, torch.float32, r, width) for r in range(ranks))
            own = random_values(rows, torch.float32, hvd.rank(), width)
            result = hvd.reducescatter(own, op=op, name="changing")
            begin, end = scatter_oracle.part_of(rows, hvd.rank(), ranks)
            expected = total[begin:end] / (ranks if op == hvd.Average else 1)
            torch.testing.assert_close(result, expected)


def test_many_reducescatters_at_once(hvd):
    """Horovod fuses small reducescatters."""
    ranks = hvd.size()
    for _ in range(3):
        handles = [
            hvd.reducescatter_async(
                random_values(40 + k, torch.float32, hvd.rank()), op=hvd.Sum, name=f"many {k}"
            )
            for k in range(20)
        ]
        for k, handle in enumerate(handles):
            total = sum(random_values(40 + k, torch.float32, r) for r in range(ranks))
            begin, end = scatter_oracle.part_of(40 + k, hvd.rank(), ranks)
            torch.testing.assert_close(hvd.synchronize(handle), total[begin:end])
