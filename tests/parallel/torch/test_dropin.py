"""Behaviour of horovod.torch that scripts rely on, besides the gradients' values."""

import copy
import gc
import time
import weakref

import pytest
import torch
from torch import nn

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.consistency import RankMismatchError
from hvdkit.core.coordination import BackwardFailed
from hvdkit.errors import HvdkitError, UsageError
from tests.parallel.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    adamw,
    assert_close,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    on_all_ranks,
    sgd,
    small_model,
    step_with_everyones_data,
    trained,
    whole_batch,
)


def step_with_own_data(hvd, model, optimizer, step):
    optimizer.zero_grad()
    loss_of(model, batch_of(hvd.rank(), step)).backward()
    optimizer.step()


# Groups, and the division of an average


@pytest.mark.device
@pytest.mark.parametrize(
    ("groups", "compression", "predivide"),
    [
        pytest.param(groups, *wire, marks=() if (i + j) % 4 == 0 else pytest.mark.long)
        for i, groups in enumerate(["one", "hundred", "num_groups", "lists", "some"])
        for j, wire in enumerate([("none", 1.0), ("none", 0.5), ("fp16", 2.0), ("bf16", 2.0)])
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
    model, reference = trained(
        hvd,
        sgd,
        model=model,
        steps=3,
        gradient_predivide_factor=predivide,
        compression=compression,
        clip=1.0,
        **options,
    )
    assert_close(model, reference, {"none": 1e-12, "fp16": 2e-3, "bf16": 2e-2}[compression])
    assert_same_on_all_ranks(hvd, model)


def buckets_of(optimizer):
    """Return the shapes in each bucket, largest bucket first."""
    named = {name: list(p.shape) for p, name in optimizer._names.items()}
    plan = optimizer._gradients.synchronizers[0].plan
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


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize(
    ("compression", "passes"), [("none", 1), ("none", 2), ("fp16", 1), ("bf16", 2)]
)
def test_a_process_set_trains_among_its_members(hvd, passes, compression):
    members = [0] if hvd.size() == 2 else [0, 2, 3]
    process_set = hvd.add_process_set(members)
    try:
        model = small_model()
        reference = copy.deepcopy(model)
        together = members if hvd.rank() in members else [hvd.rank()]
        optimizer = hvd.DistributedOptimizer(
            adamw(model.parameters()),
            model.named_parameters(),
            process_set=process_set,
            accumulation_steps=passes,
            compression=compression,
            find_unused_parameters=True,
        )
        plain = adamw(reference.parameters())
        for step in range(6):
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            hvd.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            x = torch.cat([batch_of(rank, step) for rank in together])
            (loss_of(reference, x) / passes).backward()
            if step % passes == passes - 1:
                nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
                plain.step()
                plain.zero_grad()
        assert optimizer.flush() is False
        assert_close(model, reference, {"none": 1e-12, "fp16": 5e-3, "bf16": 5e-2}[compression])
    finally:
        hvd.remove_process_set(process_set)


@pytest.mark.device(ranks=2)
def test_sparse_gradients_in_a_process_set(hvd):
    members = [1] if hvd.size() == 2 else [1, 3]
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
@pytest.mark.parametrize(
    ("compression", "find_unused"), [("none", False), ("fp16", True), ("bf16", False)]
)
def test_join_ends_epochs_of_different_lengths(hvd, compression, find_unused):
    """In the first epoch rank 0 has no batch at all, in the second it has the most."""
    n = hvd.size()
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        compression=compression,
        bucket_bytes=400,
        find_unused_parameters=find_unused,
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    number = 0
    for counts in ([2 * rank for rank in range(n)], [3] * n, [n - rank for rank in range(n)]):
        for k in range(counts[hvd.rank()]):
            step_with_own_data(hvd, model, optimizer, number + k)
        last = hvd.join()
        assert last in [rank for rank in range(n) if counts[rank] == max(counts)]
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        for k in range(max(counts)):
            plain.zero_grad()
            for rank in range(n):
                if k < counts[rank]:
                    # The rest counts as zeros.
                    (loss_of(reference, batch_of(rank, number + k)) / n).backward()
            plain.step()
        number += max(counts)
        assert_same_on_all_ranks(hvd, model)
    assert_close(model, reference, {"none": 1e-12, "fp16": 2e-3, "bf16": 2e-2}[compression])


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
@pytest.mark.parametrize(("compression", "passes"), [("none", 1), ("none", 2), ("fp16", 1)])
@pytest.mark.parametrize("find", [False, True])
def test_parameters_that_no_rank_uses(hvd, find, compression, passes):
    model = Branches()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        # Weight decay does not change parameters without a gradient.
        torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1),
        model.named_parameters(),
        find_unused_parameters=find,
        compression=compression,
        accumulation_steps=passes,
    )
    plain = torch.optim.SGD(reference.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1)
    for step in range(6):
        for _ in range(passes):
            model(batch_of(hvd.rank(), step), step, hvd.rank()).square().mean().backward()
            optimizer.step()
            if optimizer.stepped:
                has = {name: p.grad is not None for name, p in model.named_parameters()}
            optimizer.zero_grad()
        for rank in range(hvd.size()):
            out = reference(batch_of(rank, step), step, rank)
            (out.square().mean() / hvd.size()).backward()
        for name, p in reference.named_parameters():
            assert has[name] == (p.grad is not None or not find), (step, name)
            if p.grad is None and not find:
                p.grad = torch.zeros_like(p)
        plain.step()
        plain.zero_grad()
    assert_close(model, reference, 1e-12 if compression == "none" else 1e-2)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize("find", [False, True])
def test_a_rank_that_uses_nothing(hvd, find):
    model = small_model()
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(adamw(model.parameters()), find_unused_parameters=find)
    plain = adamw(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() != 0:
            loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(1, hvd.size()):
            (loss_of(reference, batch_of(rank, step)) / hvd.size()).backward()
        plain.step()
    assert_close(model, reference)


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
    model, reference = small_model(), small_model()
    for m in (model, reference):
        m[0].requires_grad_(False)
        m[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        adamw(model.parameters()), model.named_parameters(), accumulation_steps=2
    )
    plain = adamw(reference.parameters())
    for step in range(6):
        for m in (model, reference):
            m[2].requires_grad_(step >= 2)
            m[0].requires_grad_(step >= 4)
        for k in (2 * step, 2 * step + 1):
            loss_of(model, batch_of(hvd.rank(), k)).backward()
            optimizer.step()
            optimizer.zero_grad()
            (loss_of(reference, whole_batch(hvd, k)) / 2).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_layer_frozen_and_unfrozen(hvd, set_to_none):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), bucket_bytes=400)
    plain = sgd(reference.parameters())
    for step in range(6):
        for m in (model, reference):
            m[2].requires_grad_(step not in (2, 3))
        optimizer.zero_grad(set_to_none)
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad(set_to_none)
        loss_of(reference, whole_batch(hvd, step)).backward()
        plain.step()
    assert_close(model, reference)


# Ranks that differ


def other_dtype(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().float())
    return model


def frozen(model):
    model[2].weight.requires_grad_(False)
    return model


def other_shape(model):
    model[2] = nn.Linear(7, 5).double()
    return model


def longer(model):
    return nn.Sequential(*model, nn.Linear(2, 2).double())


def other_layout(model):
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    return model


DIFFERENCES = {
    "dtype": (other_dtype, {}, r"'2.weight', float32 \[6, 7\].*'2.weight', float64 \[6, 7\]"),
    "shape": (other_shape, {}, r"'2.weight', float64 \[5, 7\].*'2.weight', float64 \[6, 7\]"),
    "requires_grad": (frozen, {}, "'2.weight'.*requires_grad=False.*requires_grad=True"),
    "number": (longer, {}, r"parameter 6 .* is '5.weight'.*the optimizer has 6 parameters"),
    "layout": (other_layout, {}, r"strides \[1, 6\]"),
    "compression": (None, {"compression": "fp16"}, "compression: fp16.*compression: none"),
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
    "bucket_bytes": (None, {"bucket_bytes": 123}, "bucket_bytes: 123.*bucket_bytes: 25000000"),
    "groups": (None, {"groups": 2}, r"groups: \[\[0, 1, 2\], \[3, 4, 5\]\].*groups: \[\]"),
    "sparse_as_dense": (None, {"sparse_as_dense": True}, "sparse_as_dense: True.*: False"),
    "find_unused": (
        None,
        {"find_unused_parameters": True},
        "find_unused_parameters: True.*: False",
    ),
    "predivide": (None, {"gradient_predivide_factor": 2.0}, "factor: 2.0.*factor: chosen"),
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
    with pytest.raises(RankMismatchError):
        loss_of(model, batch_of(0, 0)).backward()
    optimizer.zero_grad()
    model, reference = trained(hvd, sgd, steps=3)
    assert_close(model, reference)


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
@pytest.mark.parametrize(("compression", "passes"), [("none", 2), ("fp16", 1), ("bf16", 2)])
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
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_channels_last(hvd, compression):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = model.to(DEVICE, torch.float64, memory_format=torch.channels_last)
    reference = copy.deepcopy(model)
    images = torch.randn(4 * hvd.size(), 3, 8, 8, dtype=torch.float64)
    images = images.to(DEVICE, memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), compression=compression)
    plain = sgd(reference.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(images[hvd.rank() :: hvd.size()]).square().mean().backward()
        optimizer.step()
        for p in model.parameters():
            assert p.grad.stride() == p.stride()
        plain.zero_grad()
        reference(images).square().mean().backward()
        plain.step()
    assert_close(model, reference, {"none": 1e-12, "fp16": 2e-3, "bf16": 2e-2}[compression])


@pytest.mark.device
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("alone", [False, True])
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
@pytest.mark.parametrize("passes", [1, 2])
def test_a_compiled_model(hvd, passes):
    model, reference = small_model(), small_model()
    try:
        backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
        compiled = torch.compile(model, backend=backend)
        compiled(batch_of(0, 0)).sum().backward()
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
    model.zero_grad()
    optimizer = hvd.DistributedOptimizer(
        sgd(compiled.parameters()), compiled.named_parameters(), accumulation_steps=passes
    )
    plain = sgd(reference.parameters())
    for step in range(3):
        for k in range(passes * step, passes * (step + 1)):
            loss_of(compiled, batch_of(hvd.rank(), k)).backward()
            optimizer.step()
            optimizer.zero_grad()
            (loss_of(reference, whole_batch(hvd, k)) / passes).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


# The memory of gradients


@pytest.mark.device
@pytest.mark.parametrize("zeroing", [True, False, "model"])
def test_gradients_are_views_of_buckets(hvd, zeroing):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(reference.parameters())
    pointers = set()
    for step in range(4):
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        # One bucket, the same memory in every step, and no byte more than the gradients.
        assert len(storages) == 1
        pointers |= storages
        elements = sum(p.numel() for p in model.parameters())
        assert next(model.parameters()).grad.untyped_storage().nbytes() == 8 * elements
        step_with_everyones_data(hvd, reference, plain, step)
        assert_close(
            nn.ParameterList([p.grad.clone() for p in model.parameters()]),
            nn.ParameterList([p.grad.clone() for p in reference.parameters()]),
        )
        if zeroing == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=zeroing)
        for p in model.parameters():
            assert p.grad is None if zeroing else not p.grad.any()
    assert len(pointers) == 1
    assert_close(model, reference)


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
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [*WRITES, "assign and data", "assign and copy_"])
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
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), bucket_bytes=400)
    plain = sgd(reference.parameters())

    def loss(m, x):
        x = x.detach().requires_grad_()
        value = m(x).square().mean(dim=1)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value.mean() + slope.square().sum(dim=1).mean()

    for step in range(3):
        optimizer.zero_grad()
        loss(model, batch_of(hvd.rank(), step)).backward(retain_graph=True)
        optimizer.step()
        plain.zero_grad()
        loss(reference, whole_batch(hvd, step)).backward()
        plain.step()
    assert_close(model, reference)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph_is_an_error(hvd):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    with pytest.raises(HvdkitError, match="create_graph=True"):
        loss_of(model, batch_of(hvd.rank(), 9)).backward(create_graph=True)
    for step in range(3):
        step_with_own_data(hvd, model, optimizer, step)
        step_with_everyones_data(hvd, reference, plain, step)
    assert_close(model, reference)


# Lifetime, state, closures


def test_an_optimizer_that_is_deleted_is_freed(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    step_with_own_data(hvd, model, optimizer, 0)
    reference = weakref.ref(optimizer)
    synchronizer = weakref.ref(optimizer._gradients.synchronizers[0])
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
    model, reference = small_model(), small_model()
    first = hvd.DistributedOptimizer(sgd(model.parameters()), bucket_bytes=400)
    if first_steps:
        step_with_own_data(hvd, model, first, 0)
        step_with_everyones_data(hvd, reference, sgd(reference.parameters()), 0)
    second = hvd.DistributedOptimizer(adamw(model.parameters()), compression="none")
    plain = adamw(reference.parameters())
    for step in range(1, 4):
        step_with_own_data(hvd, model, second, step)
        assert not first.gradients_wait()
        step_with_everyones_data(hvd, reference, plain, step)
    assert_close(model, reference)


def test_wrapping_twice_is_an_error(hvd):
    optimizer = hvd.DistributedOptimizer(sgd(small_model().parameters()))
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.device
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_is_saved_and_loaded(hvd, kind):
    """Save after three steps, load in a new job, make two steps: equal to an uninterrupted run."""
    straight, reference = trained(hvd, OPTIMIZERS[kind], steps=5)
    assert_close(straight, reference)
    model = small_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
    for step in range(3):
        step_with_own_data(hvd, model, optimizer, step)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step_with_own_data(hvd, model, optimizer, 77)
    model = small_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(3, 5):
        step_with_own_data(hvd, model, optimizer, step)
    assert_close(model, straight, 0)


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
    reference, _ = trained(hvd, adamw, steps=2)
    assert_close(model, reference, 0)


def test_closures_that_accumulate(hvd):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), backward_passes_per_step=2, bucket_bytes=400
    )
    plain = sgd(reference.parameters())
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            losses = [loss_of(model, batch_of(hvd.rank(), 2 * step + k)) / 2 for k in range(2)]
            for loss in losses:
                loss.backward()
            return sum(losses)

        assert optimizer.step(closure).item() > 0
        plain.zero_grad()
        for k in range(2):
            (loss_of(reference, whole_batch(hvd, 2 * step + k)) / 2).backward()
        plain.step()
    assert_close(model, reference)


@pytest.mark.device
@pytest.mark.parametrize("way", ["zero_grad", "synchronize", "step", "backward", "load"])
def test_an_exception_in_the_backward_pass_can_be_survived(hvd, way):
    """A pass raises on every rank, for example out of memory."""
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), bucket_bytes=400)
    plain = sgd(reference.parameters())
    step_with_own_data(hvd, model, optimizer, 0)
    step_with_everyones_data(hvd, reference, plain, 0)
    optimizer.zero_grad()
    failing = model[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch_of(hvd.rank(), 1)).backward()
    failing.remove()
    if way == "load":
        optimizer.load_state_dict(optimizer.state_dict())
    elif way == "backward":
        loss = loss_of(model, batch_of(hvd.rank(), 1))
        with pytest.raises(BackwardFailed):
            loss.backward()
    elif way != "zero_grad":
        with pytest.raises(BackwardFailed):
            getattr(optimizer, way)()
    optimizer.zero_grad()
    step_with_own_data(hvd, model, optimizer, 2)
    step_with_everyones_data(hvd, reference, plain, 2)
    assert_close(model, reference)


def test_clipping_needs_a_wrapped_optimizer(hvd):
    with pytest.raises(UsageError, match="not wrapped"):
        hvd.clip_grad_norm_(sgd(small_model().parameters()), 1.0)


@pytest.mark.device
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clipping_returns_the_norm_of_the_mean(hvd, norm_type):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    norm = hvd.clip_grad_norm_(optimizer, 0.1, norm_type=norm_type)
    loss_of(reference, whole_batch(hvd, 0)).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
    optimizer.step()


@pytest.mark.device(ranks=2)
def test_clipping_gradients_that_are_not_finite_is_an_error_on_every_rank(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    loss = loss_of(model, batch_of(hvd.rank(), 0))
    (loss * float("nan") if hvd.rank() == 1 else loss).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        hvd.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    assert on_all_ranks(hvd, "here") == ["here"] * hvd.size()
