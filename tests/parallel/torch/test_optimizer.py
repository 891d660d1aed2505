"""`DistributedOptimizer` on n ranks with a part of the batch each, compared with one process."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdkit.core.consistency import RankMismatchError
from hvdkit.errors import HvdkitError, UsageError
from tests.parallel.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    assert_close,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    small_model,
    step_with_everyones_data,
    whole_batch,
)

pytestmark = pytest.mark.device


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_one_process_with_the_whole_batch(hvd, kind, passes):
    model = small_model()
    reference = copy.deepcopy(model)
    reference_optimizer = OPTIMIZERS[kind](reference.parameters())
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
        bucket_bytes=400,
    )
    for step in range(20):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        for k in range(passes):
            loss_of(model, batch_of(hvd.rank(), passes * step + k)).backward()
            loss_of(reference, whole_batch(hvd, passes * step + k)).backward()
        optimizer.step()
        reference_optimizer.step()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


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


def test_frozen_parameters_are_left_alone_until_they_are_unfrozen(hvd):
    model = small_model()
    model[0].weight.requires_grad_(False)
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adamw"](model.parameters()), model.named_parameters()
    )
    reference_optimizer = OPTIMIZERS["adamw"](reference.parameters())
    before = model[0].weight.clone()
    for step in range(6):
        if step == 3:
            assert torch.equal(model[0].weight, before)
            model[0].weight.requires_grad_(True)
            reference[0].weight.requires_grad_(True)
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        loss_of(reference, whole_batch(hvd, step)).backward()
        optimizer.step()
        reference_optimizer.step()
    assert_close(model, reference)
    assert not torch.equal(model[0].weight, before)


def test_parameters_can_be_frozen_later(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters()
    )
    for step in range(4):
        if step == 2:
            model[0].weight.requires_grad_(False)
            frozen = model[0].weight.clone()
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
    # Neither weight decay nor momentum may move it.
    assert torch.equal(model[0].weight, frozen)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("when", ["before the pass", "after the pass"])
def test_a_parameter_group_can_be_added(hvd, when):
    """A group that is added after the pass has gradients of this rank already."""
    model = small_model()
    reference = copy.deepcopy(model)

    def add():
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
        reference_optimizer.add_param_group({"params": list(reference[2].parameters()), "lr": 0.05})

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[4].parameters(), lr=0.1))
    reference_optimizer = torch.optim.SGD(reference[4].parameters(), lr=0.1)
    for step in range(4):
        if step == 2 and when == "before the pass":
            add()
        model.zero_grad()
        reference.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        loss_of(reference, whole_batch(hvd, step)).backward()
        if step == 2 and when == "after the pass":
            add()
        optimizer.step()
        reference_optimizer.step()
    assert_close(model, reference)


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


def test_several_dtypes_in_one_model(hvd):
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
    model = nn.ParameterList([nn.Parameter(constant((3,), 0, dtype)) for dtype in dtypes])
    loss = sum(
        ((hvd.rank() + 1) * p).real.float().sum() + (p.imag.sum() if p.is_complex() else 0)
        for p in model
    )
    gradients = gradients_after_one_step(hvd, model, loss)
    mean = (hvd.size() + 1) / 2
    for dtype, gradient in zip(dtypes, gradients.values(), strict=True):
        assert gradient.dtype == dtype
        expected = mean + 1j if dtype.is_complex else mean
        torch.testing.assert_close(gradient, constant((3,), expected, dtype))


def test_gradients_that_are_not_contiguous(hvd):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(DEVICE, memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8).to(DEVICE, memory_format=torch.channels_last)
    reference = copy.deepcopy(model)
    scale = sum(range(1, hvd.size() + 1)) / hvd.size()
    (reference(images).square().sum() * scale).backward()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    (model(images).square().sum() * (hvd.rank() + 1)).backward()
    strides = model.weight.grad.stride()
    assert not model.weight.grad.is_contiguous()
    optimizer.step()
    assert model.weight.grad.stride() == strides
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


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
    model = small_model()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        reference_optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        loss_of(reference, whole_batch(hvd, step)).backward()
        optimizer.step()
        reference_optimizer.step()
    assert_close(model, reference)


def test_zero_grad_between_backward_and_step_begins_anew(hvd):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    plain = OPTIMIZERS["sgd"](reference.parameters())
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.zero_grad()
    loss_of(model, batch_of(hvd.rank(), 1)).backward()
    optimizer.step()
    step_with_everyones_data(hvd, reference, plain, 1)
    assert_close(model, reference)


def test_step_with_a_closure_uses_reduced_gradients(hvd):
    model = small_model()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(hvd.rank(), step))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.item() > 0
        reference_optimizer.zero_grad()
        loss_of(reference, whole_batch(hvd, step)).backward()
        reference_optimizer.step()
    assert_close(model, reference)


def test_clipping_between_synchronize_and_step(hvd):
    model = small_model()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(4):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        loss_of(reference, whole_batch(hvd, step)).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        reference_optimizer.step()
    assert_close(model, reference)


@pytest.mark.parametrize("holds", ["plain", "wrapped"])
def test_lr_schedulers_may_hold_either_optimizer(hvd, holds):
    model = small_model()
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference_schedule = torch.optim.lr_scheduler.ExponentialLR(reference_optimizer, 0.5)
    if holds == "plain":
        schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
        optimizer = hvd.DistributedOptimizer(plain)
    else:
        optimizer = hvd.DistributedOptimizer(plain)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        loss_of(reference, whole_batch(hvd, step)).backward()
        optimizer.step()
        schedule.step()
        reference_optimizer.step()
        reference_schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert_close(model, reference)


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


def test_a_model_can_be_wrapped_again(hvd):
    model = small_model()
    first = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    first.step()
    second = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    for step in range(3):
        second.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        second.step()
    assert_same_on_all_ranks(hvd, model)


def test_two_models_alike_may_be_in_flight_at_once(hvd):
    models = [small_model(), small_model()]
    optimizers = [
        hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](m.parameters()), m.named_parameters(), bucket_bytes=200
        )
        for m in models
    ]
    references = copy.deepcopy(models)
    for step in range(3):
        for i, m in enumerate(models):
            loss_of(m, batch_of(hvd.rank(), 10 * i + step)).backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
    for i, reference in enumerate(references):
        optimizer = OPTIMIZERS["sgd"](reference.parameters())
        for step in range(3):
            loss_of(reference, whole_batch(hvd, 10 * i + step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_close(models[i], reference)


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
def test_different_models_are_the_same_clear_error_on_every_rank(hvd):
    width = 8 if hvd.rank() == 1 else 7
    model = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 2))
    model.to(DEVICE, torch.float64)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters()
    )
    with pytest.raises(RankMismatchError) as caught:
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.zero_grad()
    message = str(caught.value)
    assert "'0.weight', float64 [8, 5]" in message
    assert "'0.weight', float64 [7, 5]" in message
    assert "rank 1:" in message
    assert hvd.allgather_object(message) == [message] * hvd.size()


@pytest.mark.device(ranks=2)
def test_different_settings_are_an_error_on_every_rank(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), op=hvd.Sum if hvd.rank() == 0 else hvd.Average
    )
    with pytest.raises(RankMismatchError, match=r"rank 0: op: sum; ranks? 1.*: op: average"):
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.zero_grad()


@pytest.mark.device(ranks=2)
def test_a_process_set_reduces_among_its_members(hvd):
    members = [1] if hvd.size() == 2 else [1, 3]
    process_set = hvd.add_process_set(members)
    try:
        model = nn.Linear(3, 1, bias=False).to(DEVICE)
        loss = (hvd.rank() + 1) * model(torch.ones(1, 3, device=DEVICE)).sum()
        gradients = gradients_after_one_step(hvd, model, loss, process_set=process_set)
        inside = sum(rank + 1 for rank in members) / len(members)
        expected = inside if hvd.rank() in members else hvd.rank() + 1
        torch.testing.assert_close(gradients["weight"], constant((1, 3), expected))
    finally:
        hvd.remove_process_set(process_set)


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
