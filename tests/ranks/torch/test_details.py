"""One test for each deliberate mistake that no other test had found."""

import copy
import random

import numpy as np
import pytest
import torch

from hvdkit.agreement.consistency import RankMismatchError
from tests.ranks.torch.oracle import Twins, batch_of, loss_of, small_model, wrapped


def two_groups(model):
    """An optimizer with the layers' weights in one group and their biases in another."""
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    return torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.5}], lr=0.1)


def test_nested_no_sync_ends_with_the_outer_one(hvd):
    model, reference = small_model(), small_model()
    optimizer = wrapped(hvd, model)
    with hvd.no_sync(optimizer):
        with hvd.no_sync(optimizer):
            loss_of(model, batch_of(hvd.rank(), 0)).backward()
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    for _ in range(2):
        loss_of(reference, batch_of(hvd.rank(), 0)).backward()
    # This rank's own.
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_values_of_all_parameter_groups_are_compared(hvd):
    model = small_model()
    if hvd.rank() == 1:
        with torch.no_grad():
            model[2].bias.add_(1)
    optimizer = hvd.DistributedOptimizer(two_groups(model), model.named_parameters())
    with pytest.raises(RankMismatchError, match=r"'2\.bias' on rank 1"):
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
    assert optimizer is not None


def test_autograd_grad_after_a_pass_without_communication(hvd):
    twins = Twins(hvd)
    for step in range(2):
        # Gradients of the last step are left, and are reduced ones.
        with hvd.no_sync(twins.optimizer):
            twins.backward(step)
        torch.autograd.grad(twins.own_loss(9), list(twins.model.parameters()))
        twins.backward(step)
        twins.check_gradients()


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_some_gradients_of_a_bucket_are_in_its_memory(hvd, op):
    twins = Twins(hvd, op=getattr(hvd, op), bucket_bytes=10**6)
    for step in range(3):
        twins.zero_grad(set_to_none=False)
        for p in list(twins.model.parameters())[::2]:
            p.grad = None
        twins.backward(step)
        twins.check_gradients()


def test_a_scheduler_of_the_plain_optimizer_after_loading(hvd):
    model = small_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_broadcast_optimizer_state_fills_the_state_in_place(hvd):
    """The plain and the wrapped optimizer share the state, and the script may refer to it."""
    model = small_model()
    plain = torch.optim.AdamW(model.parameters())
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    state = optimizer.state
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state is plain.state is state
    assert all(state[p] for p in model.parameters())


def test_a_rank_that_is_given_to_a_sampler(hvd):
    sampler = hvd.DistributedSampler(range(8), num_replicas=2, rank=0, shuffle=False)
    assert list(sampler) == [0, 2, 4, 6]


def test_the_optimizer_that_wraps_parameters_again_is_the_only_one_that_reduces(hvd):
    twins = Twins(hvd, op=hvd.Sum)
    second = wrapped(hvd, twins.model, op=hvd.Sum)
    assert not twins.optimizer.gradients_wait()
    twins.backward(0)
    twins.check_gradients()
    assert not twins.optimizer.gradients_wait()
    assert second.gradients_wait()


def test_random_numbers_of_a_seeded_data_set_leave_those_of_the_script_alone(hvd):
    def draws():
        return random.random(), float(np.random.random()), float(torch.rand(1))

    def seed():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seed()
    expected = draws()
    sampler = hvd.ResumableSampler(12, 2, seed=1)
    data = sampler.seeded(list(range(12)))
    seed()
    assert [data[index] for index in sampler]
    assert draws() == expected
