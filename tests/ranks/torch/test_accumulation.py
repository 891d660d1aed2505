"""Several backward passes for one step: accumulation_steps, no_sync, flush."""

from functools import partial

import pytest
import torch
from torch import nn

from hvdkit.agreement.consistency import RankMismatchError
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.ranks.torch.oracle import (
    DEVICE,
    Twins,
    adamw,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
)

pytestmark = pytest.mark.device


def wrapped(hvd, model, make=adamw, **options):
    options.setdefault("accumulation_steps", 3)
    return hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), bucket_bytes=400, **options
    )


def backward(hvd, model, number, scale=lambda loss: loss):
    scale(loss_of(model, batch_of(hvd.rank(), number))).backward()


def test_two_losses_in_a_pass(hvd):
    twins = Twins(hvd, adamw, accumulation_steps=3)
    for number in range(12):
        with hvd.no_sync(twins.optimizer):
            twins.backward(lambda m, rank, n=number: m(batch_of(rank, n)).square().mean())
            twins.backward(lambda m, rank, n=number: 0.5 * m(batch_of(rank, n)).abs().mean())
        twins.train(number)
    twins.check()


def test_no_sync_ends_with_an_exception(hvd):
    model = small_model()
    optimizer = wrapped(hvd, model, accumulation_steps=1)
    with pytest.raises(ZeroDivisionError), hvd.no_sync(optimizer):
        raise ZeroDivisionError
    backward(hvd, model, 0)
    optimizer.step()
    assert_same_on_all_ranks(hvd, model)


def test_a_wrapped_optimizer_is_needed(hvd):
    plain = sgd(small_model().parameters())
    with pytest.raises(UsageError, match="not wrapped"), hvd.no_sync(plain):
        pass
    with pytest.raises(UsageError, match="not wrapped"):
        hvd.clip_grad_norm_(plain, 1.0)


def test_flush_calls_the_given_step(hvd):
    twins = Twins(hvd, adamw, accumulation_steps=3)
    optimizer, (plain,) = twins.optimizer, twins.plain
    scaler = hvd.GradScaler(DEVICE.type, init_scale=64.0)
    norms = []

    def step():
        scaler.unscale_(optimizer)
        norms.append(hvd.clip_grad_norm_(optimizer, 0.1))
        scaler.step(optimizer)
        scaler.update()

    for number in range(5):
        backward(hvd, twins.model, number, scaler.scale)
        step()
        optimizer.zero_grad()
    assert optimizer.flush(step)
    assert [norm is None for norm in norms] == [True, True, False, True, True, False]
    for window in ((0, 1, 2), (3, 4)):
        plain.zero_grad()
        for number in window:
            twins.backward_of_one_process(number)
        for p in twins.reference.parameters():
            p.grad *= 3 / len(window)
        nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.1)
        plain.step()
    twins.check()


def test_gradients_are_final_when_flush_calls_the_given_step(hvd):
    twins = Twins(hvd, backward_passes_per_step=3)

    def step():
        # With PyTorch's own function, as after the last pass of a whole window.
        nn.utils.clip_grad_norm_(twins.model.parameters(), 0.1)
        twins.optimizer.step()

    for number in range(2):
        twins.backward(number)
    assert twins.optimizer.flush(step)
    nn.utils.clip_grad_norm_(twins.reference.parameters(), 0.1)
    twins.plain[0].step()
    twins.check()


def test_two_ways_of_accumulating_do_not_mix(hvd):
    with pytest.raises(UsageError, match="(?i)pass only one of the two"):
        wrapped(hvd, small_model(), accumulation_steps=2, backward_passes_per_step=2)
    with pytest.raises(UsageError, match=r"op is hvd\.Adasum.*pass backward_passes_per_step=2"):
        wrapped(hvd, small_model(), accumulation_steps=2, op=hvd.Adasum)
    with pytest.raises(UsageError, match="(?i)pass only one of the two"):
        wrapped(hvd, small_model()).set_backward_passes_per_step(2)


def test_a_closure_does_not_go_with_accumulation(hvd):
    with pytest.raises(UsageError, match=r"step\(closure\) was called with accumulation_steps 3"):
        wrapped(hvd, small_model()).step(lambda: torch.ones(()))


@pytest.mark.device(ranks=2)
def test_different_windows_are_an_error_on_every_rank(hvd):
    model = small_model()
    steps = 2 if hvd.rank() == 0 else 3
    optimizer = wrapped(hvd, model, accumulation_steps=steps)
    for number in range(steps - 1):
        backward(hvd, model, number)
        optimizer.step()
    with pytest.raises(RankMismatchError, match=r"accumulation_steps: 2.*accumulation_steps: 3"):
        backward(hvd, model, steps)
    optimizer.zero_grad()


# Several optimizers


def linear(features, outputs):
    return nn.Linear(features, outputs).to(DEVICE, torch.float64)


def test_a_gan(hvd):
    """The discriminator is not frozen, so the generator's pass also adds to its gradients."""
    passes = 2
    torch.manual_seed(0)
    pair = nn.ModuleList([linear(5, 5), linear(5, 1)])
    twins = Twins(hvd, model=pair, parts=list, accumulation_steps=passes)

    def loss(which, number, model, rank):
        generator, discriminator = model
        x = batch_of(rank, number)
        if which == 1:
            return (discriminator(x) - discriminator(generator(x).detach())).tanh().mean()
        return discriminator(generator(x)).tanh().mean()

    for number in range(3 * passes):
        for which in (1, 0):
            twins.optimizers[which].zero_grad()
            if number % passes == 0:
                twins.plain[which].zero_grad()
            twins.backward(partial(loss, which, number))
            twins.optimizers[which].step()
            if number % passes == passes - 1:
                twins.plain[which].step()
    assert [optimizer.hvdkit_steps for optimizer in twins.optimizers] == [3, 3]
    twins.check()


def test_each_call_of_step_counts(hvd):
    """Also if no rank has a pass, and before the first one."""
    twins = Twins(hvd, model=linear(5, 2), accumulation_steps=3)
    for number in range(9):
        twins.train(number, ranks=None if number % 2 else [])
    twins.check()


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_without_calls_are_named(hvd, passes):
    """A script that calls step() once for a window would make a step for 2 of its windows."""
    model = small_model()
    optimizer = wrapped(hvd, model, accumulation_steps=2)
    with recorded("hvdkit.torch") as records:
        for number in range(4 * passes):
            backward(hvd, model, number)
            if number % passes == passes - 1:
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.hvdkit_steps == 2
    expected = passes == 2 and hvd.rank() == 0
    texts = [record.getMessage() for record in records]
    assert len(texts) == expected
    assert all("counts calls of step()" in text for text in texts)


REMOVALS = {
    "model": lambda model: model.zero_grad(set_to_none=False),
    "in place": lambda model: [p.grad.zero_() for p in model.parameters()],
    "to None": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("removal", REMOVALS)
def test_a_reduced_part_is_removed_with_the_rest_of_the_gradient(hvd, op, removal):
    model = nn.Linear(3, 1, bias=False).to(DEVICE)
    nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=getattr(hvd, op))

    def add(value):
        (model.weight * value).sum().backward()

    add(100.0)
    with hvd.no_sync(optimizer):
        add(10.0)
    REMOVALS[removal](model)
    add(1.0 + hvd.rank())
    ranks = range(hvd.size())
    expected = sum(1.0 + rank for rank in ranks) / (1 if op == "Sum" else hvd.size())
    assert model.weight.grad.tolist() == [[expected] * 3]
