"""Results of reducescatters whose responses are in Horovod's cache."""

import torch

from tests.ranks.torch.scatter_oracle import part_of, random_values


def test_reducescatter_again_with_other_shapes_and_factors(hvd):
    ranks = hvd.size()
    for rows, width, op in [(8, 3, hvd.Sum), (8, 3, hvd.Average), (9, 2, hvd.Sum), (8, 3, hvd.Sum)]:
        for _ in range(3):
            total = sum(random_values(rows, torch.float32, r, width) for r in range(ranks))
            own = random_values(rows, torch.float32, hvd.rank(), width)
            result = hvd.reducescatter(own, op=op, name="changing")
            begin, end = part_of(rows, hvd.rank(), ranks)
            expected = total[begin:end] / (ranks if op == hvd.Average else 1)
            torch.testing.assert_close(result, expected)
