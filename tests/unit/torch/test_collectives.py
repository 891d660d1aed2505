"""A job of one rank that does not skip collectives; see hvdkit.agreement.collectives."""

import copy

import pytest
import torch
from horovod.torch import mpi_ops
from torch import nn

from hvdkit.agreement.collectives import SINGLE_RANK_COLLECTIVES

#: Relative error of one rounding to the wire format, and some more for several steps.
BOUNDS = {"none": 0.0, "fp16": 2**-9, "bf16": 2**-6}


@pytest.mark.parametrize("compression", BOUNDS)
@pytest.mark.parametrize("switch", [None, "1"])
def test_one_rank_enters_collectives_only_with_the_switch(hvd, compression, switch):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    entered = []
    allreduce = mpi_ops.allreduce_async_

    def recorded(*args, **kwargs):
        entered.append(kwargs["name"])
        return allreduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_ops, "allreduce_async_", recorded)
        if switch:
            patch.setenv(SINGLE_RANK_COLLECTIVES, switch)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            compression=compression,
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(3):
            for m, o in ((model, optimizer), (reference, plain)):
                o.zero_grad()
                m(torch.ones(4, 3)).square().sum().backward()
                o.step()
    assert bool(entered) == bool(switch)
    bound = BOUNDS[compression] if switch else 0.0
    torch.testing.assert_close(model.weight, reference.weight, rtol=bound, atol=bound)
