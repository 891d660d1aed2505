"""Arguments of DistributedOptimizer, and what it does in a job of one rank."""

import copy

import pytest
import torch
from torch import nn

from hvdkit.errors import UsageError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_one_rank_trains_as_without_it(hvd):
    model = nn.Linear(3, 2)
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    plain = sgd(reference)
    for _ in range(3):
        for m, o in ((model, optimizer), (reference, plain)):
            o.zero_grad()
            m(torch.ones(4, 3)).square().sum().backward()
            o.step()
    assert torch.equal(model.weight, reference.weight)


def test_state_loaded_before_wrapping_is_kept(hvd):
    model = nn.Linear(3, 2)
    plain = sgd(model)
    model(torch.ones(4, 3)).sum().backward()
    plain.step()
    momentum = plain.state[model.weight]["momentum_buffer"]
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer.state[model.weight]["momentum_buffer"] is momentum


def test_duplicate_names_are_refused(hvd):
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="the name 'w' twice"):
        hvd.DistributedOptimizer(sgd(model), [("w", model.weight), ("w", model.bias)])


def test_unnamed_parameters_are_refused(hvd):
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"lacks 1 of the optimizer's 2 parameters.*\[2\]"):
        hvd.DistributedOptimizer(sgd(model), [("weight", model.weight)])


def test_parameters_without_names_are_refused(hvd):
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"pairs \(name, parameter\)"):
        hvd.DistributedOptimizer(sgd(model), model.parameters())


def test_wrapping_twice_is_refused(hvd):
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(model)))
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(
            hvd.DistributedOptimizer(sgd(model), compression=hvd.Compression.fp16)
        )


@pytest.mark.parametrize("passes", [0, -1, 1.5])
def test_fewer_than_one_pass_is_refused(hvd, passes):
    with pytest.raises(UsageError, match="backward_passes_per_step is"):
        hvd.DistributedOptimizer(sgd(nn.Linear(3, 2)), backward_passes_per_step=passes)


def test_operations_that_make_no_gradient_are_refused(hvd):
    for op in (hvd.Min, hvd.Max, hvd.Product, 99):
        with pytest.raises(UsageError, match=r"expected hvd\.Average, hvd\.Sum or hvd\.Adasum"):
            hvd.DistributedOptimizer(sgd(nn.Linear(3, 2)), op=op)


def test_a_predivide_factor_needs_an_average(hvd):
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r"expected op=hvd\.Average"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(UsageError, match="expected more than 0"):
        hvd.DistributedOptimizer(sgd(model), gradient_predivide_factor=0.0)


def test_what_is_no_optimizer_is_refused(hvd):
    with pytest.raises(UsageError, match="optimizer is a Linear"):
        hvd.DistributedOptimizer(nn.Linear(3, 2))
    with pytest.raises(UsageError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(nn.Linear(3, 2).parameters()))


def test_lbfgs_state_is_refused(hvd):
    with pytest.raises(UsageError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(nn.Linear(3, 2).parameters()), 0)


def test_a_single_tensor_is_not_a_collection_of_parameters(hvd):
    with pytest.raises(UsageError, match="params is a tensor"):
        hvd.broadcast_parameters(torch.ones(3), root_rank=0)
