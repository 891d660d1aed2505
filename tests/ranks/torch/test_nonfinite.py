"""Gradients with NaN or infinity: their rank and parameter are named before the sum hides them."""

import random
from contextlib import contextmanager

import pytest
import torch

from hvdkit.errors import UsageError
from hvdkit.reduction.nonfinite import NonFiniteGradients
from tests.logs import recorded
from tests.ranks.torch.oracle import (
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
)


def spoil(parameter, value):
    """Let the next gradient of a parameter contain a value that is not finite."""

    def hook(gradient):
        handle.remove()
        spoiled = gradient.clone()
        spoiled.view(-1)[-1] = value
        return spoiled

    handle = parameter.register_hook(hook)


def wrapped(hvd, model, policy, **options):
    return hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), on_nonfinite=policy, **options
    )


@pytest.mark.parametrize(("seed", "compression"), [*enumerate(["none", "fp16", "int8", "none"])])
def test_the_rank_and_the_parameter_are_named(hvd, seed, compression):
    draw = random.Random(seed)
    model = small_model(torch.float32)
    # Small buckets: some are reduced in place before the pass ends.
    optimizer = wrapped(hvd, model, "raise", bucket_bytes=100, compression=compression)
    name, parameter = draw.choice(list(model.named_parameters()))
    bad, step = draw.randrange(hvd.size()), draw.randrange(3)
    value = draw.choice([float("nan"), float("inf"), -float("inf")])
    for now in range(4):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        if now == step and hvd.rank() == bad:
            spoil(parameter, value)
        loss = loss_of(model, batch_of(hvd.rank(), now, torch.float32))
        if now == step:
            with pytest.raises(NonFiniteGradients) as caught:
                loss.backward()
            message = assert_raised_on_all_ranks(hvd, caught)
            assert f"on 1 of {hvd.size()} ranks" in message
            assert f"rank {bad}: '{name}'" in message
            assert message.count("'") == 2
            assert all(map(torch.equal, before, model.parameters()))
            optimizer.zero_grad()
            continue
        loss.backward()
        optimizer.step()
    assert_same_on_all_ranks(hvd, model)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("passes", [1, 2])
def test_all_ranks_skip_the_step(hvd, passes):
    """Also if an earlier pass of a window had a NaN. A skipped step leaves no gradients.

    So a script that calls `zero_grad()` only after a step that was made does not add to NaN.
    """
    model, twin = small_model(), small_model()
    optimizer = wrapped(hvd, model, "skip", accumulation_steps=passes)
    other = wrapped(hvd, twin, "ignore", accumulation_steps=passes)
    with recorded("hvdkit") as log:
        for step in range(6):
            for k in range(passes):
                if step == 3 and k == 0 and hvd.rank() == 1:
                    spoil(model[0].bias, float("nan"))
                loss_of(model, batch_of(hvd.rank(), step)).backward()
                optimizer.step()
            assert optimizer.stepped == (step != 3)
            if step == 3:
                assert not any(p.grad.any() for p in model.parameters())
                continue
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(twin, batch_of(hvd.rank(), step)).backward()
                other.step()
            other.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert_same_on_all_ranks(hvd, model)
    lines = [record.getMessage() for record in log]
    assert len(lines) == (hvd.rank() == 0)
    assert all("rank 1: '0.bias'" in line and "skip this step" in line for line in lines)


def test_a_rank_without_a_pass_skips_too(hvd):
    model = small_model()
    optimizer = wrapped(hvd, model, "skip")
    for step in range(3):
        optimizer.zero_grad()
        if hvd.rank() == 1 and step == 1:
            spoil(model[0].bias, float("nan"))
        if hvd.rank() != 0 or step != 1:
            loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        assert optimizer.stepped == (step != 1)
    assert_same_on_all_ranks(hvd, model)


@contextmanager
def ranks_of(hvd, alone):
    """Return a process set of one rank or of all ranks; None on a rank outside of it."""
    if not alone:
        yield hvd.global_process_set
        return
    own = hvd.add_process_set([0])
    try:
        yield own if hvd.rank() == 0 else None
    finally:
        hvd.remove_process_set(own)


def gradients_of(model, step, bad):
    """Compute gradients like a script that assigns them."""
    loss = loss_of(model, batch_of(0, step))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    if bad:
        gradients[1].view(-1)[-1] = float("nan")
    return gradients


@pytest.mark.parametrize(
    ("way", "alone"),
    [
        ("assign", False),
        ("assign one", True),
        ("write in place", False),
        ("no_sync", True),
        ("no_sync", False),
        ("flush", False),
    ],
)
def test_every_way_to_a_step(hvd, way, alone):
    with ranks_of(hvd, alone) as group:
        if group is None:
            return
        model = small_model()
        passes = 3 if way == "flush" else 1
        optimizer = wrapped(hvd, model, "skip", process_set=group, accumulation_steps=passes)
        first, second, *others = model.parameters()
        for step in range(4):
            bad = step == 2 and hvd.rank() == 0
            if way != "write in place":
                optimizer.zero_grad()
            if way in ("assign", "write in place") and not (way == "write in place" and step == 0):
                for p, gradient in zip(
                    model.parameters(), gradients_of(model, step, bad), strict=True
                ):
                    if way == "assign":
                        p.grad = gradient
                    else:
                        # Different values on the ranks: otherwise they count as reduced.
                        p.grad.copy_(gradient * (1 + hvd.rank()))
            elif way == "assign one":
                first.grad, second.grad = gradients_of(model, step, bad)[:2]
                torch.autograd.backward(
                    loss_of(model, batch_of(hvd.rank(), step)), inputs=list(others)
                )
            else:
                if bad:
                    spoil(second, float("nan"))
                loss = loss_of(model, batch_of(hvd.rank(), step))
                if way == "no_sync":
                    with hvd.no_sync(optimizer):
                        loss.backward()
                else:
                    loss.backward()
            if way == "flush":
                assert optimizer.flush()
            else:
                optimizer.step()
            assert optimizer.stepped == (step != 2)
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("mend", "then", "alone"),
    [
        ("remove", "pass", False),
        ("remove", "pass of others", True),
        ("remove", "step", False),
        ("repair", "pass", True),
        ("repair", "pass of others", False),
        ("repair", "step", False),
    ],
)
def test_a_gradient_that_the_script_mends_raises_no_error(hvd, mend, then, alone):
    with ranks_of(hvd, alone) as group:
        if group is None:
            return
        model = small_model()
        optimizer = wrapped(hvd, model, "raise", process_set=group)
        _, second, *others = model.parameters()
        if hvd.rank() == 0:
            spoil(second, float("nan"))
        with hvd.no_sync(optimizer):
            loss_of(model, batch_of(hvd.rank(), 0)).backward()
        if mend == "remove":
            model.zero_grad()
        else:
            second.grad.nan_to_num_()
        if then != "step":
            inputs = None if then == "pass" else list(others)
            torch.autograd.backward(loss_of(model, batch_of(hvd.rank(), 1)), inputs=inputs)
        optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("drop", "alone"),
    [("optimizer.zero_grad", True), ("model.zero_grad", False), ("load_state_dict", False)],
)
def test_gradients_that_the_script_drops_skip_no_later_step(hvd, drop, alone):
    with ranks_of(hvd, alone) as group:
        if group is None:
            return
        model = small_model()
        optimizer = wrapped(hvd, model, "skip", process_set=group)
        state = optimizer.state_dict()
        if hvd.rank() == 0:
            spoil(model[0].bias, float("nan"))
        loss_of(model, batch_of(hvd.rank(), 0)).backward()
        if drop == "load_state_dict":
            optimizer.load_state_dict(state)
        (optimizer if drop == "optimizer.zero_grad" else model).zero_grad()
        loss_of(model, batch_of(hvd.rank(), 1)).backward()
        optimizer.step()
        assert optimizer.stepped
        assert optimizer.hvdkit_skipped_steps == 0
        assert all(p.isfinite().all() for p in model.parameters())


def test_one_rank(hvd):
    with ranks_of(hvd, alone=True) as group:
        if group is not None:
            model = small_model()
            optimizer = wrapped(hvd, model, "raise", process_set=group)
            spoil(model[0].bias, float("nan"))
            with pytest.raises(NonFiniteGradients, match="'0.bias'. Call"):
                loss_of(model, batch_of(0, 0)).backward()
            del optimizer


def test_wrong_uses(hvd):
    model = small_model()
    with pytest.raises(UsageError, match="on_nonfinite is 'stop': expected 'ignore', 'raise' or"):
        wrapped(hvd, model, "stop")
    optimizer = wrapped(hvd, model, "skip")
    with pytest.raises(UsageError, match="Use on_nonfinite='raise'"):
        optimizer.step(lambda: loss_of(model, batch_of(hvd.rank(), 0)))


def test_the_first_gradient_of_an_unfrozen_parameter(hvd):
    """The ranks plan its reduction only in this pass."""
    model = small_model()
    model[0].bias.requires_grad_(False)
    optimizer = wrapped(hvd, model, "raise")
    loss_of(model, batch_of(hvd.rank(), 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].bias.requires_grad_(True)
    before = [p.detach().clone() for p in model.parameters()]
    if hvd.rank() == 1:
        spoil(model[0].bias, float("nan"))
    with pytest.raises(NonFiniteGradients) as caught:
        loss_of(model, batch_of(hvd.rank(), 1)).backward()
    assert "rank 1: '0.bias'" in assert_raised_on_all_ranks(hvd, caught)
    assert all(map(torch.equal, before, model.parameters()))
    for step in range(2, 4):
        optimizer.zero_grad()
        loss_of(model, batch_of(hvd.rank(), step)).backward()
        optimizer.step()
    assert_same_on_all_ranks(hvd, model)
