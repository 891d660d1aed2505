"""`DistributedOptimizer` on n ranks with a part of the batch each, compared with one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdkit.errors import HvdkitError, UsageError
from tests.ranks.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    Twins,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    small_model,
)

pytestmark = pytest.mark.device


def constant(shape, value, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype, device=DEVICE)


def test_tied_weights(hvd):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model.to(DEVICE, torch.float64)
    model[1].weight = model[0].weight
    names = list(model.named_parameters(remove_duplicate=False))
    assert len(names) == 2
    twins = Twins(hvd, model=model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    twins.optimizers = [hvd.DistributedOptimizer(plain, names)]
    twins.backward(lambda m, rank: m(constant((1, 4), rank + 1, torch.float64)).sum())
    twins.check_gradients()


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


def test_one_pass_too_many_is_an_error(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), backward_passes_per_step=2
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
def test_adasum(hvd):
    model = small_model(torch.float32)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, target = constant((1, 5), 1), constant((1, 2), 0)
    before = functional.mse_loss(model(x), target)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    if not hvd.mpi_enabled():
        with pytest.raises(UsageError, match="start the job with mpirun"):
            hvd.DistributedOptimizer(plain, op=hvd.Adasum)
        return
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Adasum)
    for _ in range(5):
        optimizer.zero_grad()
        functional.mse_loss(model(x), target).backward()
        optimizer.step()
    assert functional.mse_loss(model(x), target) < before
    assert_same_on_all_ranks(hvd, model)
