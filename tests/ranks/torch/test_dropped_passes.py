"""`drop_pass`: a rank that cannot make its pass drops the step on all ranks, in each use."""

import contextlib
import itertools

import pytest

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.reduction.step_errors import BackwardFailed
from tests.ranks.torch.oracle import (
    Fails,
    Twins,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
)

#: The uses, with the passes of a step.
USES = {
    "accumulation_steps": 2,
    "backward_passes_per_step": 2,
    "no_sync": 2,
    "reductions of two losses": 2,
}

#: Where the pass raises: in the forward pass, or before the gradients of a layer.
PLACES = ["forward", "loss", "hidden"]


class Failed(Exception):
    """The error of a pass."""


def loss_that_fails(model, x, place):
    if place == "forward":
        raise Failed
    if place == "loss":
        return Fails.apply(loss_of(model, x), Failed)
    handle = model[0].register_forward_hook(lambda *a: Fails.apply(a[2], Failed))
    try:
        return loss_of(model, x)
    finally:
        handle.remove()


@pytest.mark.parametrize("use", USES)
def test_all_ranks_drop_the_step(hvd, use):
    """Each second step fails on a rank: in each pass, and before the gradient of each layer."""
    passes = USES[use]
    options = {use: passes} if use in ("accumulation_steps", "backward_passes_per_step") else {}
    twins = Twins(hvd, **options)
    optimizer = twins.optimizer
    failures = list(itertools.product(range(passes), PLACES))
    for step in range(2 * len(failures)):
        failing, place = failures[step // 2] if step % 2 == 0 else (None, "")
        own = hvd.rank() == (step // 2) % hvd.size()
        caught = []
        for k in range(passes):
            local = use == "no_sync" and k < passes - 1
            number = step * passes + k
            with hvd.no_sync(optimizer) if local else contextlib.nullcontext():
                try:
                    if k == failing and own:
                        batch = batch_of(hvd.rank(), number)
                        loss_that_fails(twins.model, batch, place).backward()
                    twins.own_loss(number).backward()
                except (Failed, BackwardFailed) as error:
                    caught.append(type(error))
                    waits = use == "reductions of two losses" or k == passes - 1
                    assert optimizer.drop_pass() == waits
                    if waits:
                        break
            if use == "accumulation_steps" or k == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
            twins.backward_of_one_process(number)
        if failing is None:
            assert not caught
            twins.plain[0].step()
        elif own and use != "reductions of two losses" and failing < passes - 1:
            assert caught == [Failed, BackwardFailed]
        else:
            assert caught == [Failed if own else BackwardFailed]
        twins.plain[0].zero_grad()
    twins.check()


@pytest.mark.parametrize("end", ["flush", "join"])
def test_the_data_end_after_a_dropped_pass(hvd, end):
    """No rank uses the window, and the next one is whole."""
    twins = Twins(hvd, accumulation_steps=3)
    if hvd.rank() == 1:
        assert not twins.optimizer.drop_pass()
    else:
        twins.own_loss(0).backward()
    twins.own_loss(1).backward()
    if end == "flush":
        assert not twins.optimizer.flush()
    else:
        hvd.join()
    twins.train(0, 1, 2)
    twins.check()


def test_join_after_a_dropped_pass_under_no_sync(hvd):
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    if hvd.rank() == 1:
        with hvd.no_sync(optimizer):
            assert not optimizer.drop_pass()
    hvd.join()
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()
    assert_same_on_all_ranks(hvd, model)


def test_a_pass_that_is_dropped_after_its_reduction(hvd):
    """The other ranks make a step that the rank misses, so the ranks differ."""
    if hvd.size() == 1:
        pytest.skip("ranks cannot differ")
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    own = hvd.rank() == 1
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    if own:
        assert optimizer.drop_pass()
    else:
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(BackwardFailed):
            loss_of(model, batch_of(hvd.rank(), 1)).backward()
        optimizer.drop_pass()
    with pytest.raises(RankMismatchError) as caught:
        loss_of(model, batch_of(hvd.rank(), 2)).backward()
    assert_raised_on_all_ranks(hvd, caught)
