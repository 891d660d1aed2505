"""Gradients through collectives. Each test has new ranks, because Horovod counts calls."""

import sys

import pytest

from tests.ranks.rank_pool import Configuration, start_ranks_of

SCRIPT = """
import torch
import hvdkit.torch as hvd

hvd.init()
n, rank = hvd.size(), hvd.rank()


def differentiated(function):
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)
    y = function(x)
    # Stock Horovod takes no expanded gradients, as sum() alone would give. EXPANDED tests them.
    (y * torch.full_like(y, 3.0)).sum().backward()
    return y.detach(), x.grad
"""

ALL = """
y, gradient = differentiated(lambda x: hvd.allreduce(x * x, op=hvd.Average, name="mean"))
torch.testing.assert_close(y, torch.full((2, 3), sum((r + 1) ** 2 for r in range(n)) / n))
torch.testing.assert_close(gradient, torch.full((2, 3), 6.0 * (rank + 1)))
y, gradient = differentiated(lambda x: hvd.grouped_allreduce([x, 2 * x], name="two")[1])
torch.testing.assert_close(y, torch.full((2, 3), float(n + 1)))
torch.testing.assert_close(gradient, torch.full((2, 3), 6.0))
y, gradient = differentiated(lambda x: hvd.allgather(x, name="rows"))
assert y[::2, 0].tolist() == [r + 1.0 for r in range(n)]
torch.testing.assert_close(gradient, torch.full((2, 3), 3.0))
y, gradient = differentiated(lambda x: hvd.broadcast(x, root_rank=0, name="one"))
assert (y == 1).all()
torch.testing.assert_close(gradient, torch.full((2, 3), 3.0 if rank == 0 else 0.0))
hvd.shutdown()
"""

UNEVEN = """
alone = hvd.add_process_set([1])
if rank == 1:
    hvd.allreduce(torch.ones(3), name="alone", process_set=alone)
_, gradient = differentiated(lambda x: hvd.allreduce(x * x, op=hvd.Average, name="mean"))
torch.testing.assert_close(gradient, torch.full((2, 3), 6.0 * (rank + 1)))
hvd.shutdown()
"""

EXPANDED = """
x = torch.full((2, 3), rank + 1.0, requires_grad=True)
hvd.allreduce(x, name="mean").sum().backward()
torch.testing.assert_close(x.grad, torch.ones(2, 3))
hvd.shutdown()
"""


def run(code, controller="gloo"):
    environment = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4",
    }
    command = [sys.executable, "-c", SCRIPT + code]
    start_ranks_of(Configuration("torch", controller, 3), command, environment).wait(timeout=60)


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_collectives_are_differentiable(controller):
    run(ALL, controller)


def test_ranks_may_have_made_different_numbers_of_calls():
    run(UNEVEN)


@pytest.mark.long
def test_a_gradient_may_be_expanded():
    run(EXPANDED)
