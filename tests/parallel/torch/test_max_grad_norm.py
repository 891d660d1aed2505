"""`max_grad_norm`: gradients are clipped by their norm before `backward()` returns."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hvdkit.errors import UsageError
from tests.parallel.torch.oracle import assert_same_on_all_ranks, batch_of, loss_of, small_model

NORM = 0.3


def wrapped(hvd, model, **options):
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(
        plain, model.named_parameters(), max_grad_norm=NORM, check_interval=1, **options
    )


def clipped(hvd, model, numbers, ranks, divisor=1.0):
    """Compute the clipped mean gradient in one process; return the norm before clipping."""
    model.zero_grad()
    for number in numbers:
        for rank in ranks:
            (loss_of(model, batch_of(rank, number)) / hvd.size() / divisor).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), NORM)


def assert_clipped(hvd, model, reference, optimizer, norm, rounding=1e-9):
    torch.testing.assert_close(optimizer.grad_norm, norm, rtol=rounding, atol=0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "how", ["pass", "two passes", "copies", "no_sync", "late rank", "one rank"]
)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_gradients_are_those_of_one_process_that_clips(hvd, how, compression):
    model, reference = small_model(), small_model()
    alone = hvd.add_process_set([0]) if how == "one rank" else None
    try:
        if alone is not None and hvd.rank():
            return
        options = {} if alone is None else {"process_set": alone}
        optimizer = wrapped(hvd, model, compression=compression, **options)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        late = hvd.size() - 1
        for step in range(3):
            several = how in ("two passes", "copies", "no_sync")
            numbers = [2 * step, 2 * step + 1] if several else [step]
            for k, number in enumerate(numbers):
                local = how == "no_sync" and k == 0
                with hvd.no_sync(optimizer) if local else nullcontext():
                    if how != "late rank" or hvd.rank() != late:
                        loss_of(model, batch_of(hvd.rank(), number)).backward()
                if how == "copies" and hvd.rank() == late:
                    for p in model.parameters():
                        p.grad = p.grad.clone()
            if how == "late rank":
                optimizer.synchronize()
            ranks = [r for r in range(hvd.size()) if how != "late rank" or r != late]
            if alone is None:
                norm = clipped(hvd, reference, numbers, ranks)
            else:
                norm = clipped(hvd, reference, numbers, [0], 1 / hvd.size())
            rounding = 1e-9 if compression == "none" or alone is not None else 5e-3
            assert_clipped(hvd, model, reference, optimizer, norm, rounding)
            optimizer.step()
            optimizer.zero_grad()
            plain.step()
            reference.load_state_dict(model.state_dict())
            if alone is None:
                assert_same_on_all_ranks(hvd, model)
    finally:
        if alone is not None:
            hvd.remove_process_set(alone)


def test_only_a_whole_window_is_clipped(hvd):
    model, reference = small_model(), small_model()
    optimizer = wrapped(hvd, model, accumulation_steps=3)
    for number in range(3):
        loss_of(model, batch_of(hvd.rank(), number)).backward()
        if number < 2:
            optimizer.step()
            assert optimizer.grad_norm is None
    norm = clipped(hvd, reference, range(3), range(hvd.size()), 3)
    assert_clipped(hvd, model, reference, optimizer, norm)


def test_sparse_gradients(hvd):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double()
    optimizer = wrapped(hvd, model)
    for step in range(2):
        optimizer.zero_grad()
        (model(torch.tensor([1, 2 + hvd.rank(), 1])) * (step + 10)).square().sum().backward()
        found = [p.grad.to_dense() for p in model.parameters()]
        assert model[0].weight.grad.is_sparse
        norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in found]))
        assert optimizer.grad_norm > 1
        torch.testing.assert_close(float(norm), NORM, rtol=1e-5, atol=0)


def test_gradients_that_are_kept_over_a_step_are_clipped_with_the_next_ones(hvd):
    model, reference = small_model(), small_model()
    optimizer = wrapped(hvd, model)
    for number in range(2):
        loss_of(model, batch_of(hvd.rank(), number)).backward()
        for rank in range(hvd.size()):
            (loss_of(reference, batch_of(rank, number)) / hvd.size()).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), NORM)
        assert_clipped(hvd, model, reference, optimizer, norm)
        optimizer.step()
        reference.load_state_dict(model.state_dict())


def test_wrong_uses(hvd):
    model = small_model()
    for norm in (0, -1.0, float("inf"), float("nan"), "1", True):
        with pytest.raises(UsageError, match="expected a finite number above 0, or None"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=norm
            )
    optimizer = wrapped(hvd, model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, batch_of(hvd.rank(), 0))).backward()
    with pytest.raises(UsageError, match="Omit max_grad_norm"):
        scaler.step(optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_that_float16_cannot_represent(hvd, dtype):
    weight = nn.Parameter(torch.zeros(4, dtype=dtype))
    plain = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, max_grad_norm=1.0)
    (weight * 50000.0).sum().backward()
    assert optimizer.grad_norm.item() == pytest.approx(100000, rel=0.01)
    assert weight.grad.tolist() == pytest.approx([0.5] * 4, rel=0.01)
