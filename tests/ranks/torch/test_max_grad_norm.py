"""`max_grad_norm`: gradients are clipped by their norm before `backward()` returns."""

import pytest
import torch
from torch import nn

from hvdkit.errors import UsageError
from tests.ranks.torch.oracle import batch_of, loss_of, small_model

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


def test_one_rank(hvd):
    """The other searches have several, see sequences.py."""
    alone = hvd.add_process_set([0])
    if hvd.rank() == 0:
        model, reference = small_model(), small_model()
        optimizer = wrapped(hvd, model, process_set=alone)
        for number in range(2):
            loss_of(model, batch_of(0, number)).backward()
        norm = clipped(hvd, reference, range(2), [0], 1 / hvd.size())
        assert_clipped(hvd, model, reference, optimizer, norm)
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
