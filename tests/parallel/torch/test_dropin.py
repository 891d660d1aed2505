"""Behaviour of horovod.torch that scripts rely on, besides the gradients' values."""

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.consistency import RankMismatchError
from hvdkit.core.step_errors import BackwardFailed
from hvdkit.errors import UsageError
from tests.parallel.torch.oracle import (
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
)

#: After a few steps.
NEAR = {"none": 1e-12, "fp16": 2e-3, "bf16": 2e-2}


def step_with_own_data(hvd, model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, batch_of(hvd.rank(), step)).backward()
    optimizer.step()


# Groups, and the division of an average


@pytest.mark.device
@pytest.mark.parametrize(
    ("groups", "compression", "predivide"),
    [
        ("one", "none", 1.0),
        ("hundred", "bf16", 2.0),
        ("num_groups", "fp16", 2.0),
        ("lists", "none", 0.5),
        ("some", "none", 1.0),
    ],
)
def test_groups_change_nothing_but_the_buckets(hvd, groups, predivide, compression):
    model = small_model()
    layers = [list(layer.parameters()) for layer in model[::2]]
    options = {
        "one": {"groups": 1},
        "hundred": {"groups": 100},
        "num_groups": {"num_groups": 2},
        "lists": {"groups": layers},
        "some": {"groups": [layers[0], (layers[2][1],)]},
    }[groups]
    twins = Twins(
        hvd,
        model=model,
        gradient_predivide_factor=predivide,
        compression=compression,
        **options,
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
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), groups=groups
        )
        step_with_own_data(hvd, model, optimizer, 0)
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
            hvd.DistributedOptimizer(
                sgd(model.parameters()), model.named_parameters(), groups=groups
            )


@pytest.mark.device
def test_groups_of_several_dtypes(hvd):
    model = nn.ParameterList(
        [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float64) * 2]
    ).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model, lr=0.0), groups=[list(model)])
    (sum(p.sum().double() for p in model) * (hvd.rank() + 1)).backward()
    optimizer.step()
    for p in model:
        assert p.grad.tolist() == [(hvd.size() + 1) / 2] * 3


# Process sets


@pytest.fixture
def members(hvd):
    return [0] if hvd.configuration.size == 2 else [0, 2, 3]


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize(("compression", "passes"), [("fp16", 1), ("bf16", 2)])
def test_a_process_set_trains_among_its_members(hvd, members, passes, compression):
    process_set = hvd.add_process_set(members)
    try:
        together = members if hvd.rank() in members else [hvd.rank()]
        twins = Twins(
            hvd,
            adamw,
            process_set=process_set,
            accumulation_steps=passes,
            compression=compression,
            find_unused_parameters=True,
        )
        twins.share = passes * len(together)
        for step in range(6):
            twins.backward(step, together)
            hvd.clip_grad_norm_(twins.optimizer, 1.0)
            if step % passes == passes - 1:
                nn.utils.clip_grad_norm_(twins.reference.parameters(), 1.0)
            twins.step()
            twins.zero_grad()
        assert twins.optimizer.flush() is False
        assert_close(
            twins.model,
            twins.reference,
            {"fp16": 5e-3, "bf16": 5e-2}[compression],
        )
    finally:
        hvd.remove_process_set(process_set)


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


# Ranks with different numbers of batches


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize(("compression", "find_unused"), [("none", False), ("fp16", True)])
def test_join_ends_epochs_of_different_lengths(hvd, compression, find_unused):
    """In the first epoch rank 0 has no batch at all, in the second it has the most."""
    n = hvd.size()
    twins = Twins(
        hvd,
        partial(torch.optim.SGD, lr=0.05),
        compression=compression,
        find_unused_parameters=find_unused,
    )
    model, (plain,) = twins.model, twins.plain
    number = 0
    for counts in ([2 * rank for rank in range(n)], [3] * n, [n - rank for rank in range(n)]):
        for k in range(counts[hvd.rank()]):
            step_with_own_data(hvd, model, twins.optimizer, number + k)
        last = hvd.join()
        assert last in [rank for rank in range(n) if counts[rank] == max(counts)]
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(twins.optimizer, root_rank=last)
        for k in range(max(counts)):
            plain.zero_grad()
            # The rest counts as zeros.
            twins.backward_of_one_process(number + k, [r for r in range(n) if k < counts[r]])
            plain.step()
        number += max(counts)
        assert_same_on_all_ranks(hvd, model)
    assert_close(model, twins.reference, NEAR[compression])


def test_ranks_that_have_joined_are_excluded_from_the_comparison(hvd):
    """A rank that has joined is not compared, but the other ranks still are."""
    if hvd.size() < 4:
        pytest.skip("needs two ranks that can disagree beside one that has joined")
    model = small_model()
    different = hvd.rank() == hvd.size() - 1
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), bucket_bytes=400 if different else 500
    )
    if hvd.rank() != 0:
        with pytest.raises(RankMismatchError):
            loss_of(model, batch_of(hvd.rank(), 0)).backward()
        optimizer.zero_grad()
    hvd.join()


# find_unused_parameters


class Branches(nn.Module):
    """`b` is used in odd steps, `c` by rank 1 alone, `d` never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(5, 2) for _ in range(4))
        self.to(DEVICE, torch.float64)

    def forward(self, x, step, rank):
        y = self.a(x)
        if step % 2:
            y = y + self.b(x)
        if rank == 1 and step > 2:
            y = y + self.c(x)
        return y


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize(
    ("find", "compression", "passes"), [(False, "none", 1), (False, "fp16", 1), (True, "none", 2)]
)
def test_parameters_that_no_rank_uses(hvd, find, compression, passes):
    twins = Twins(
        hvd,
        # Weight decay does not change parameters without a gradient.
        partial(torch.optim.SGD, lr=1e-4, momentum=0.9, weight_decay=0.1),
        Branches(),
        find_unused_parameters=find,
        compression=compression,
        accumulation_steps=passes,
    )
    for step in range(6):
        for k in range(passes):
            twins.backward(lambda m, rank, s=step: m(batch_of(rank, s), s, rank).square().mean())
            if k == passes - 1:
                for q in twins.reference.parameters() if not find else ():
                    q.grad = torch.zeros_like(q) if q.grad is None else q.grad
            twins.step()
            if k == passes - 1:
                has, expected = (
                    [p.grad is not None for p in model.parameters()] for model, _ in twins.sides
                )
                assert has == expected, step
            twins.zero_grad()
    twins.check()


@pytest.mark.device(ranks=2)
def test_unused_sparse_parameters(hvd):
    model = nn.ModuleList([nn.Embedding(4, 2, sparse=True) for _ in range(2)]).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), find_unused_parameters=True
    )
    for step in range(3):
        optimizer.zero_grad()
        loss = model[0](torch.tensor([0], device=DEVICE)).sum()
        if step and hvd.rank() == 1:
            loss = loss + model[1](torch.tensor([1], device=DEVICE)).sum()
        loss.backward()
        optimizer.step()
        assert model[0].weight.grad is not None
        assert (model[1].weight.grad is not None) == bool(step)


# Frozen parameters


@pytest.mark.device
def test_layers_are_unfrozen_one_after_another(hvd):
    twins = Twins(hvd, adamw, accumulation_steps=2)
    for step in range(6):
        for model, _ in twins.sides:
            model[2].requires_grad_(step >= 2)
            model[0].requires_grad_(step >= 4)
        twins.train(2 * step, 2 * step + 1)
    twins.check()


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
    "dtype": (other_dtype, {}, r"'2.weight', float32 \[6, 7\].*'2.weight', float64 \[6, 7\]"),
    "requires_grad": (frozen, {}, "'2.weight'.*requires_grad=False.*requires_grad=True"),
    "number": (longer, {}, r"parameter 6 .* is '5.weight'.*the optimizer has 6 parameters"),
    "layout": (other_layout, {}, r"strides \[1, 6\]"),
    "accumulation_steps": (
        None,
        {"accumulation_steps": 2},
        "accumulation_steps: 2.*accumulation_steps: 1",
    ),
    "backward_passes_per_step": (
        None,
        {"backward_passes_per_step": 2},
        "passes per step: 2.*passes per step: 1",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_first_difference_is_named_on_every_rank(hvd, difference):
    change, options, message = DIFFERENCES[difference]
    model = small_model()
    different = hvd.rank() == 0
    if different and change is not None:
        model = change(model)
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()),
        model.named_parameters(),
        **(options if different else {}),
    )
    passes = max([1, *(v for k, v in options.items() if "passes" in k or "steps" in k)])
    began = time.monotonic()
    for _ in range(passes - 1 if different else 0):
        sum(p.sum().double() for p in model.parameters()).backward()
        if "accumulation_steps" in options:
            optimizer.step()
    last = sum(p.sum().double() for p in model.parameters())
    with pytest.raises(RankMismatchError, match=message) as caught:
        last.backward()
    optimizer.zero_grad()
    assert time.monotonic() - began < 10
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


def test_training_continues_after_a_disagreement(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), op=hvd.Sum if hvd.rank() == 0 else hvd.Average
    )
    with pytest.raises(RankMismatchError, match=r"rank 0: op: sum; ranks? 1.*: op: average"):
        loss_of(model, batch_of(0, 0)).backward()
    optimizer.zero_grad()
    twins = Twins(hvd)
    twins.train(0, 1, 2)
    twins.check()


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


@pytest.mark.device
@pytest.mark.parametrize(("what", "passes"), [("model", 2), ("blocks", 1)])
def test_a_compiled_model(hvd, what, passes):
    twins = Twins(hvd, accumulation_steps=passes)
    try:
        backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
        compiled = twins.model
        if what == "model":
            compiled = torch.compile(compiled, backend=backend)
        else:
            for block in compiled:
                block.compile(backend=backend)
        torch.autograd.grad(compiled(batch_of(0, 0)).sum(), list(compiled.parameters()))
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
    twins.train(
        *(
            lambda m, rank, k=k: loss_of(compiled if m is twins.model else m, batch_of(rank, k))
            for k in range(3 * passes)
        )
    )
    twins.check()


# The memory of gradients


@pytest.mark.device
@pytest.mark.parametrize("zeroing", [True, False, "model"])
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


def test_a_gradient_kept_by_the_user_may_be_overwritten_but_not_a_copy(hvd):
    # `p.grad` is the optimizer's memory after a step; it is not before the first.
    model = small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    local = model[0].weight.grad
    kept = local.clone()
    optimizer.step()
    assert torch.equal(local, kept)


WRITES = {
    "assign": lambda p, g: setattr(p, "grad", g),
    "copy_": lambda p, g: p.grad.copy_(g),
    "data": lambda p, g: p.grad.data.copy_(g),
}


@pytest.mark.device
@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("assign", False),
        ("copy_", True),
        ("data", False),
        ("assign and data", True),
        ("assign and copy_", False),
    ],
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


@pytest.mark.device
def test_create_graph_and_retain_graph(hvd):
    """A gradient penalty: the backward pass of a backward pass."""

    def loss(m, x):
        x = x.detach().requires_grad_()
        value = m(x).square().mean(dim=1)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value.mean() + slope.square().sum(dim=1).mean()

    twins = Twins(hvd)
    for step in range(3):
        loss(twins.model, batch_of(hvd.rank(), step)).backward(retain_graph=True)
        twins.backward_of_one_process(lambda m, rank, s=step: loss(m, batch_of(rank, s)))
        twins.step()
        twins.zero_grad()
    twins.check()


# Lifetime, state, closures


def test_an_optimizer_that_is_deleted_is_freed(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    step_with_own_data(hvd, model, optimizer, 0)
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


@pytest.mark.parametrize("first_steps", [True, False])
def test_a_model_wrapped_again_is_reduced_by_the_new_optimizer_only(hvd, first_steps):
    first = Twins(hvd)
    if first_steps:
        first.train(0)
    second = Twins(hvd, adamw, first.model, compression="none")
    for step in range(1, 4):
        second.train(step)
        assert not first.optimizer.gradients_wait()
    second.check()


def test_wrapping_twice_is_an_error(hvd):
    optimizer = hvd.DistributedOptimizer(sgd(small_model().parameters()))
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.device(ranks=2)
def test_state_is_broadcast_from_the_root(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()))
    step_with_own_data(hvd, model, optimizer, 0)
    if hvd.rank() != 0:
        for p in model.parameters():
            optimizer.state[p]["exp_avg"].fill_(9)
            p.data.fill_(9)
        optimizer.param_groups[0]["lr"] = 9.0
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.01
    step_with_own_data(hvd, model, optimizer, 1)
    twins = Twins(hvd, adamw)
    twins.train(0, 1)
    assert_close(model, twins.model, 0)


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
@pytest.mark.parametrize("way", ["synchronize", "step", "backward", "load"])
def test_an_exception_in_the_backward_pass_can_be_survived(hvd, way):
    """A pass raises on every rank, for example out of memory."""
    twins = Twins(hvd)
    optimizer = twins.optimizer
    twins.train(0)
    failing = twins.model[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        twins.own_loss(1).backward()
    failing.remove()
    if way == "load":
        optimizer.load_state_dict(optimizer.state_dict())
    elif way == "backward":
        with pytest.raises(BackwardFailed):
            twins.own_loss(1).backward()
    else:
        with pytest.raises(BackwardFailed):
            getattr(optimizer, way)()
    optimizer.zero_grad()
    twins.train(2)
    twins.check()


def test_clipping_needs_a_wrapped_optimizer(hvd):
    with pytest.raises(UsageError, match="not wrapped"):
        hvd.clip_grad_norm_(sgd(small_model().parameters()), 1.0)


@pytest.mark.device
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_returns_the_norm_of_the_mean(hvd, norm_type):
    twins = Twins(hvd)
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
