"""Gradients of ranks that have made different numbers of calls, which stock Horovod counts.

test_gradients_of_collectives.py has the gradients of all collectives.
"""

import sys

from tests.ranks.rank_pool import Configuration, start_ranks_of

UNEVEN = """
import torch
import hvdkit.torch as hvd
hvd.init()
alone = hvd.add_process_set([1])
if hvd.rank() == 1:
    hvd.allreduce(torch.ones(3), name="alone", process_set=alone)
x = torch.full((2, 3), hvd.rank() + 1.0, requires_grad=True)
y = hvd.allreduce(x * x, op=hvd.Average, name="mean")
# Stock Horovod takes no expanded gradients, as sum() alone would give.
(y * torch.full_like(y, 3.0)).sum().backward()
torch.testing.assert_close(x.grad, torch.full((2, 3), 6.0 * (hvd.rank() + 1)))
hvd.shutdown()
"""


def test_ranks_may_have_made_different_numbers_of_calls():
    environment = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4",
    }
    command = [sys.executable, "-c", UNEVEN]
    start_ranks_of(Configuration("torch", "gloo", 3), command, environment).wait(timeout=60)
