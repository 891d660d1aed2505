"""`DistributedOptimizer` on n ranks with a part of the batch each, compared with one process."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdkit.errors import HvdkitError, UsageError
from tests.parallel.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    Twins,
    adamw,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
)

pytestmark = pytest.mark.device


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_one_process_with_the_whole_batch(hvd, kind):
    twins = Twins(hvd, OPTIMIZERS[kind], backward_passes_per_step=3)
    for step in range(12):
        for k in range(3):
            twins.backward(3 * step + k)
        twins.step()
        twins.zero_grad()
    twins.check()


def constant(shape, value, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def gradients_after_one_step(hvd, model, loss, **options):
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters(), **options
    )
    loss.backward()
    optimizer.step()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("predivide", [1.0, 8.0])
def test_average_may_divide_before_the_sum(hvd, predivide):
    model = nn.Linear(3, 1, bias=False).to(DEVICE)
    loss = (hvd.rank() + 1) * model(torch.ones(1, 3, device=DEVICE)).sum()
    gradients = gradients_after_one_step(
        hvd, model, loss, op=hvd.Average, gradient_predivide_factor=predivide
    )
    torch.testing.assert_close(gradients["weight"], constant((1, 3), (hvd.size() + 1) / 2))


def test_sum_does_not_divide(hvd):
    model = nn.Linear(3, 1, bias=False).to(DEVICE)
    loss = (hvd.rank() + 1) * model(torch.ones(1, 3, device=DEVICE)).sum()
    gradients = gradients_after_one_step(hvd, model, loss, op=hvd.Sum)
    assert gradients["weight"].tolist() == [[sum(range(1, hvd.size() + 1))] * 3]


def test_a_rank_that_does_not_use_a_parameter_counts_as_zeros(hvd):
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1), "c": nn.Linear(2, 1)})
    model.to(DEVICE)
    loss = model["a"](torch.ones(2, device=DEVICE)).sum()
    if hvd.rank() == hvd.size() - 1:
        loss = loss + model["b"](torch.ones(2, device=DEVICE)).sum()
    gradients = gradients_after_one_step(hvd, model, loss)
    torch.testing.assert_close(gradients["a.weight"], constant((1, 2), 1))
    torch.testing.assert_close(gradients["b.weight"], constant((1, 2), 1 / hvd.size()))
    assert gradients["c.weight"].tolist() == [[0, 0]]


@pytest.mark.parametrize("make", [sgd, adamw])
def test_frozen_parameters_are_left_alone(hvd, make):
    """Neither weight decay nor momentum may move them."""
    twins = Twins(hvd, make)
    values = []
    for step in range(8):
        for model, _ in twins.sides:
            model[0].weight.requires_grad_(step in (2, 3, 4))
        twins.train(step)
        values.append(twins.model[0].weight.clone())
    twins.check()
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(values)]
    assert moved == [False, True, True, True, False, False, False]


@pytest.mark.parametrize("when", ["before the pass", "after the pass"])
def test_a_parameter_group_can_be_added(hvd, when):
    """A group that is added after the pass has gradients of this rank already."""
    twins = Twins(hvd, partial(torch.optim.SGD, lr=0.1), parts=lambda model: [model[4]])

    def add():
        for model, (optimizer,) in twins.sides:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})

    for step in range(4):
        for model, _ in twins.sides:
            model.zero_grad()
        if step == 2 and when == "before the pass":
            add()
        twins.backward(step)
        if step == 2 and when == "after the pass":
            add()
        twins.step()
    twins.check()


def test_tied_weights(hvd):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model.to(DEVICE, torch.float64)
    model[1].weight = model[0].weight
    x = constant((1, 4), hvd.rank() + 1, torch.float64)
    reference = copy.deepcopy(model)
    for rank in range(hvd.size()):
        (reference(torch.full_like(x, rank + 1.0)).sum() / hvd.size()).backward()
    names = list(model.named_parameters(remove_duplicate=False))
    assert len(names) == 2
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), names)
    model(x).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)


def test_sparse_gradients_stay_sparse(hvd):
    model = nn.Embedding(10, 3, sparse=True).to(DEVICE)
    rows = torch.tensor([hvd.rank(), 9], device=DEVICE)
    gradients = gradients_after_one_step(hvd, model, model(rows).sum())
    assert gradients["weight"].is_sparse
    expected = constant((10, 3), 0)
    expected[: hvd.size()] = 1 / hvd.size()
    expected[9] = 1
    torch.testing.assert_close(gradients["weight"].to_dense(), expected)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_both_ways(hvd, set_to_none):
    twins = Twins(hvd)
    for step in range(3):
        twins.zero_grad(set_to_none=set_to_none)
        twins.own_loss(100).backward()
        twins.zero_grad(set_to_none=set_to_none)  # between backward and step: begins anew
        twins.backward(step)
        twins.step()
    twins.check()


def test_step_with_a_closure_uses_reduced_gradients(hvd):
    twins = Twins(hvd)
    for step in range(3):

        def closure(step=step):
            twins.zero_grad()
            twins.backward(step)
            return twins.own_loss(step)

        assert twins.optimizer.step(closure).item() > 0
        twins.plain[0].step()
    twins.check()


def test_clipping_between_synchronize_and_step(hvd):
    twins = Twins(hvd)
    for step in range(4):
        twins.backward(step)
        twins.optimizer.synchronize()
        for model, _ in twins.sides:
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        with twins.optimizer.skip_synchronize():
            twins.step()
        twins.zero_grad()
    twins.check()


@pytest.mark.parametrize("holds", ["plain before wrapping", "plain", "wrapped"])
def test_lr_schedulers_may_hold_either_optimizer(hvd, holds):
    schedules, own = [], []

    def make(parameters):
        own.append(torch.optim.SGD(parameters, lr=0.1))
        if holds == "plain before wrapping" or len(own) == 2:
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(own[-1], 0.5))
        return own[-1]

    twins = Twins(hvd, make)
    if holds != "plain before wrapping":
        held = own[0] if holds == "plain" else twins.optimizer
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(held, 0.5))
    for step in range(4):
        twins.train(step)
        for schedule in schedules:
            schedule.step()
    assert twins.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    twins.check()


@pytest.mark.parametrize("loads", ["before wrapping", "plain", "wrapped"])
def test_state_goes_to_and_from_a_plain_optimizer(hvd, loads):
    model = small_model()
    plain = OPTIMIZERS["adamw"](model.parameters())
    optimizer = hvd.DistributedOptimizer(plain)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())

    restored = small_model()
    restored.load_state_dict(weights)
    other = OPTIMIZERS["adamw"](restored.parameters())
    other.param_groups[0]["lr"] = 7.0
    if loads == "before wrapping":
        other.load_state_dict(saved)
    wrapped = hvd.DistributedOptimizer(other)
    if loads != "before wrapping":
        (other if loads == "plain" else wrapped).load_state_dict(saved)
    assert wrapped.state is other.state
    assert wrapped.param_groups is other.param_groups
    for m, o in ((model, optimizer), (restored, wrapped)):
        o.zero_grad()
        loss_of(m, batch_of(hvd.rank(), 2)).backward()
        o.step()
    assert_close(restored, model)


def test_the_result_is_an_instance_of_the_users_class(hvd):
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adamw"](small_model().parameters()))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"


def test_step_hooks_run_once(hvd):
    model = small_model()
    plain = OPTIMIZERS["sgd"](model.parameters())
    calls = []
    plain.register_step_post_hook(lambda *_: calls.append("plain"))
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.register_step_post_hook(lambda *_: calls.append("wrapped"))
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()
    assert calls == ["plain", "wrapped"]


def test_two_models_alike_may_be_in_flight_at_once(hvd):
    models = nn.ModuleList([small_model(), small_model()])
    twins = Twins(hvd, model=models, parts=list)
    for step in range(3):
        for i in (0, 1):
            twins.backward(lambda m, rank, i=i, n=step: loss_of(m[i], batch_of(rank, 10 * i + n)))
        twins.step()
        twins.zero_grad()
    twins.check()


def test_one_pass_too_many_is_an_error(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=2,
    )
    for _ in range(2):
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    with pytest.raises(HvdkitError, match="pass 3 began before .* backward_passes_per_step is 2"):
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()


def test_the_number_of_passes_can_be_changed(hvd):
    model = nn.Linear(1, 1, bias=False).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        model(constant((1,), hvd.rank() + 1)).backward()
    optimizer.step()
    assert model.weight.grad.item() == hvd.size() + 1


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize("option", ["fp16", "groups", "adasum"])
def test_options_that_horovods_optimizer_has(hvd, option):
    options = {
        "fp16": {"compression": hvd.Compression.fp16},
        "groups": {"groups": 2},
        "adasum": {"op": hvd.Adasum},
    }[option]
    model = small_model(torch.float32)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, target = constant((1, 5), 1), constant((1, 2), 0)
    before = functional.mse_loss(model(x), target)
    if option == "adasum" and not hvd.mpi_enabled():
        with pytest.raises(UsageError, match="start the job with mpirun"):
            hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), **options)
        return
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), **options
    )
    for _ in range(5):
        optimizer.zero_grad()
        functional.mse_loss(model(x), target).backward()
        optimizer.step()
    assert functional.mse_loss(model(x), target) < before
    assert_same_on_all_ranks(hvd, model)
