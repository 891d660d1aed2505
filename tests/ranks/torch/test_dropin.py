"""Behaviour of horovod.torch that scripts rely on, besides the gradients' values."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from hvdkit.reduction.accumulation import PassesDiffer
from tests.ranks.torch.oracle import (
    DEVICE,
    Twins,
    adamw,
    assert_close,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    on_all_ranks,
    sgd,
    small_model,
    train_step,
    wrapped,
)

#: After a few steps.
NEAR = {"none": 1e-12, "fp16": 2e-3, "bf16": 2e-2}


# Groups, and the division of an average


@pytest.mark.device
@pytest.mark.parametrize(
    ("groups", "compression", "predivide"),
    [("hundred", "bf16", 2.0), ("num_groups", "fp16", 2.0), ("some", "none", 0.5)],
)
def test_groups_change_nothing_but_the_buckets(hvd, groups, predivide, compression):
    model = small_model()
    layers = [list(layer.parameters()) for layer in model[::2]]
    options = {
        "hundred": {"groups": 100},
        "num_groups": {"num_groups": 2},
        "some": {"groups": [layers[0], (layers[2][1],)]},
    }[groups]
    twins = Twins(
        hvd, model=model, gradient_predivide_factor=predivide, compression=compression, **options
    )
    twins.train(0, 1, 2, clip=1.0)
    twins.check(NEAR[compression])


def buckets_of(optimizer):
    """Return the shapes in each bucket, largest bucket first."""
    named = {name: list(p.shape) for p, name in optimizer._parameter_names.items()}
    plan = optimizer.reducer.gradients.parts[0].synchronizer.plan
    buckets = [[named[plan.specs[i].name] for i in sorted(b.parameters)] for b in plan.buckets]
    return sorted(buckets, key=lambda b: (-len(b), b))


def test_groups_are_buckets(hvd):
    model = small_model()
    first, last = list(model[0].parameters()), list(model[4].parameters())
    for groups, expected in (
        (0, [[[7, 5], [7], [6, 7], [6], [2, 6], [2]]]),
        (2, [[[6], [2, 6], [2]], [[7, 5], [7], [6, 7]]]),
        ([first, last], [[[2, 6], [2]], [[6, 7], [6]], [[7, 5], [7]]]),
        (99, [[[2]], [[2, 6]], [[6]], [[6, 7]], [[7]], [[7, 5]]]),
    ):
        optimizer = wrapped(hvd, model, groups=groups)
        train_step(hvd, model, optimizer, 0)
        assert buckets_of(optimizer) == expected, groups


def test_invalid_groups(hvd):
    model, other = small_model(), small_model()
    for groups, message in (
        (-1, "groups is -1: expected 0 or more"),
        (["0.weight"], "a list of lists of parameters"),
        ([model[0].weight], "a list of lists of parameters"),
        ([[other[0].weight]], "not one of the optimizer's parameters"),
        ([["0.weight"]], "not one of the optimizer's parameters"),
        ([[model[0].weight], [model[0].weight]], "'0.weight' twice"),
    ):
        with pytest.raises(UsageError, match=message):
            wrapped(hvd, model, groups=groups)


# Process sets


@pytest.fixture
def members(hvd):
    return [0] if hvd.configuration.size == 2 else [0, 2, 3]


@pytest.mark.device(ranks=2)
def test_sparse_gradients_in_a_process_set(hvd, members):
    process_set = hvd.add_process_set(members)
    try:
        model = nn.Embedding(6, 2, sparse=True).to(DEVICE)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0), process_set=process_set
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([hvd.rank(), 5, 5], device=DEVICE)).sum().backward()
            optimizer.step()
        together = members if hvd.rank() in members else [hvd.rank()]
        expected = torch.zeros(6, 2, device=DEVICE)
        expected[together] = 1 / len(together)
        expected[5] = 2
        torch.testing.assert_close(model.weight.grad.to_dense(), expected)
    finally:
        hvd.remove_process_set(process_set)


# find_unused_parameters


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize(("find", "compression"), [(True, "none"), (False, "fp16")])
def test_unused_sparse_parameters(hvd, find, compression):
    model = nn.ModuleList([nn.Embedding(4, 2, sparse=True) for _ in range(2)]).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        find_unused_parameters=find,
        compression=compression,
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = model[0](torch.tensor([0], device=DEVICE)).sum()
        if step and hvd.rank() == 1:
            loss = loss + model[1](torch.tensor([1], device=DEVICE)).sum()
        loss.backward()
        optimizer.step()
        assert model[0].weight.grad.to_dense()[0].tolist() == [1, 1]
        if step == 0:
            assert model[1].weight.grad is None or (not find and not model[1].weight.grad.any())
        else:
            assert model[1].weight.grad.is_sparse
            share = 1 / hvd.size()
            assert model[1].weight.grad.to_dense().tolist() == [[0, 0], [share] * 2, *[[0, 0]] * 2]


# Ranks that differ


def other_dtype(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().float())
    return model


def frozen(model):
    model[2].weight.requires_grad_(False)
    return model


def longer(model):
    return nn.Sequential(*model, nn.Linear(2, 2).double())


def other_layout(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


DIFFERENCES = {
    "dtype": (other_dtype, r"'2.weight', float32 \[6, 7\].*'2.weight', float64 \[6, 7\]"),
    "requires_grad": (frozen, "'2.weight'.*requires_grad=False.*requires_grad=True"),
    "number": (longer, r"parameter 6 .* is '5.weight'.*the optimizer has 6 parameters"),
    "layout": (other_layout, r"strides \[1, 6\]"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_first_difference_is_named_on_every_rank(hvd, difference):
    change, message = DIFFERENCES[difference]
    model = change(small_model()) if hvd.rank() == 0 else small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with pytest.raises(RankMismatchError, match=message) as caught:
        sum(p.sum().double() for p in model.parameters()).backward()
    optimizer.zero_grad()
    text = assert_raised_on_all_ranks(hvd, caught)
    assert "rank 0: " in text
    assert f"rank{'s' if hvd.size() > 2 else ''} 1" in text


def test_different_orders_and_optimizers(hvd):
    first = hvd.rank() == 0
    model = small_model()
    parameters = list(model.named_parameters())
    parameters = parameters[::-1] if first else parameters
    optimizer = hvd.DistributedOptimizer(sgd([p for _, p in parameters]), parameters)
    with pytest.raises(RankMismatchError, match=r"parameter 0 .*'4.bias'.*'0.weight'"):
        loss_of(model, batch_of(0, 0)).backward()
    optimizer.zero_grad()
    model = small_model()
    optimizer = hvd.DistributedOptimizer((sgd if first else adamw)(model.parameters()))
    with pytest.raises(RankMismatchError, match=r"optimizer: SGD.*optimizer: AdamW"):
        loss_of(model, batch_of(0, 0)).backward()
    optimizer.zero_grad()


# Unusual parameters


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.device
@pytest.mark.parametrize(("compression", "passes"), [("fp16", 1), ("bf16", 2)])
def test_dtypes_side_by_side(hvd, compression, passes):
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, 2, dtype=d)) for d in DTYPES])
    model.to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model, lr=0.0), compression=compression, accumulation_steps=passes
    )
    for _ in range(3):
        for k in range(passes):
            factor = hvd.rank() + 1 + 4 * k
            loss = sum((factor * p).real.float().sum() for p in model)
            loss = loss + sum(p.imag.float().sum() for p in model if p.is_complex())
            loss.backward()
            optimizer.step()
        mean = (hvd.size() + 1) / 2 + 2 * (passes - 1)
        for p in model:
            assert p.grad.dtype == p.dtype
            expected = mean + 1j if p.is_complex() else mean
            torch.testing.assert_close(p.grad, torch.full_like(p, expected), rtol=1e-2, atol=1e-2)
        optimizer.zero_grad()


@pytest.mark.device
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_channels_last(hvd, compression):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = model.to(DEVICE, torch.float64, memory_format=torch.channels_last)
    images = torch.randn(4 * hvd.size(), 3, 8, 8, dtype=torch.float64)
    images = images.to(DEVICE, memory_format=torch.channels_last)
    twins = Twins(hvd, model=model, compression=compression)
    for _ in range(3):
        twins.backward(lambda m, rank: m(images[rank :: hvd.size()]).square().mean())
        twins.step()
        assert not model[0].weight.grad.is_contiguous()
        assert all(p.grad.stride() == p.stride() for p in model.parameters())
        twins.zero_grad()
    assert_close(model, twins.reference, NEAR[compression])


@pytest.mark.device
@pytest.mark.parametrize(("alone", "compression"), [(False, "bf16"), (True, "fp16")])
def test_a_parameter_without_elements_and_one_without_dimensions(hvd, alone, compression):
    model = nn.ParameterList(
        [
            nn.Parameter(torch.zeros(0, 4)),
            nn.Parameter(torch.tensor(1.0)),
            nn.Parameter(torch.ones(3)),
        ]
    ).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model, lr=1.0),
        compression=compression,
        groups=[[p] for p in model] if alone else 0,
        find_unused_parameters=True,
    )
    for _ in range(3):
        optimizer.zero_grad()
        # Numbers that every wire format holds exactly.
        (sum(p.sum() for p in model) * (hvd.rank() + 1) / 8).backward()
        optimizer.step()
    expected = 1 - 3 * (hvd.size() + 1) / 16
    assert model[0].grad.shape == (0, 4)
    assert model[1].item() == expected
    assert model[2].tolist() == [expected] * 3


@pytest.mark.device
def test_gradients_that_are_expanded_or_transposed(hvd):
    parameter = nn.Parameter(torch.zeros(3, 4, device=DEVICE))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0))
    gradients = [
        torch.full((1, 1), hvd.rank() + 1.0, device=DEVICE).expand(3, 4),
        (torch.arange(12.0, device=DEVICE).reshape(4, 3) * (hvd.rank() + 1)).t(),
    ]
    for gradient in gradients:
        optimizer.zero_grad()
        parameter.backward(gradient)
        expected = hvd.allreduce(gradient.contiguous(), name="expected")
        optimizer.step()
        torch.testing.assert_close(parameter.grad, expected)


# The memory of gradients


@pytest.mark.device
@pytest.mark.parametrize("zeroing", [False, "model"])
def test_gradients_are_views_of_buckets(hvd, zeroing):
    twins = Twins(hvd, bucket_bytes=10**6)
    model, optimizer = twins.model, twins.optimizer
    pointers = set()
    for step in range(4):
        twins.backward(step)
        twins.step()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        # One bucket, the same memory in every step, and no byte more than the gradients.
        assert len(storages) == 1
        pointers |= storages
        elements = sum(p.numel() for p in model.parameters())
        assert next(model.parameters()).grad.untyped_storage().nbytes() == 8 * elements
        twins.check_gradients()
        twins.plain[0].zero_grad()
        if zeroing == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=zeroing)
        for p in model.parameters():
            assert p.grad is None if zeroing else not p.grad.any()
    assert len(pointers) == 1
    twins.check()


WRITES = {
    "assign": lambda p, g: setattr(p, "grad", g),
    "copy_": lambda p, g: p.grad.copy_(g),
    "data": lambda p, g: p.grad.data.copy_(g),
}


@pytest.mark.device
@pytest.mark.parametrize(
    ("kind", "frozen"), [("assign and data", True), ("assign and copy_", False)]
)
def test_gradients_given_by_hand(hvd, kind, frozen):
    """Gradients are written without a backward pass, as in some scripts."""
    model = small_model().requires_grad_(not frozen)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    kinds = kind.split(" and ")
    for step in range(3):
        for number, p in enumerate(model.parameters()):
            write = WRITES[kinds[number % len(kinds)] if step else "assign"]
            write(p, torch.full_like(p, hvd.rank() + step))
        optimizer.step()
        for p in model.parameters():
            assert (p.grad == (hvd.size() - 1) / 2 + step).all()


def test_a_frozen_parameter_that_has_a_gradient_on_some_ranks_is_an_error(hvd):
    """The ranks without one would not step this parameter."""
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for ranks in (range(1), range(hvd.size()), range(1)):
        optimizer.zero_grad()
        if hvd.rank() in ranks:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        if len(ranks) == hvd.size():
            optimizer.step()
            continue
        with pytest.raises(PassesDiffer):
            optimizer.step()
    assert_same_on_all_ranks(hvd, model)


# Lifetime, state, closures


def test_an_optimizer_that_is_deleted_is_freed(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    train_step(hvd, model, optimizer, 0)
    reference = weakref.ref(optimizer)
    synchronizer = weakref.ref(optimizer.reducer.gradients.parts[0].synchronizer)
    del optimizer
    gc.collect()
    assert reference() is None
    assert synchronizer() is None
    # Its hooks are still there, and do nothing.
    model.zero_grad()
    for step in range(3):
        loss_of(model, batch_of(hvd.rank(), step)).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for step in range(3):
        loss_of(model, batch_of(hvd.rank(), step)).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_closures_that_accumulate(hvd):
    twins = Twins(hvd, backward_passes_per_step=2)
    for step in range(3):

        def loss(model, rank, k):
            return loss_of(model, batch_of(rank, k)) / 2

        def closure(numbers=(2 * step, 2 * step + 1)):
            twins.zero_grad()
            for k in numbers:
                twins.backward(partial(loss, k=k))
            return torch.ones(())

        assert twins.optimizer.step(closure) == 1
        twins.plain[0].step()
    twins.check()


@pytest.mark.device
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_returns_the_norm_of_the_mean(hvd, norm_type):
    def two_groups(parameters):
        return torch.optim.SGD([{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=0.1)

    twins = Twins(hvd, two_groups)
    twins.backward(0)
    norm = hvd.clip_grad_norm_(twins.optimizer, 0.1, norm_type=norm_type)
    expected = nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    twins.check_gradients()
    twins.step()


@pytest.mark.device(ranks=2)
def test_clipping_gradients_that_are_not_finite_is_an_error_on_every_rank(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    loss = loss_of(model, batch_of(hvd.rank(), 0))
    (loss * float("nan") if hvd.rank() == 1 else loss).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        hvd.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert on_all_ranks(hvd, "here") == ["here"] * hvd.size()
