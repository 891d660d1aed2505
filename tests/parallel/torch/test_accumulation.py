"""Several backward passes for one step: accumulation_steps, no_sync, flush."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.consistency import RankMismatchError
from hvdkit.core.coordination import BackwardFailed
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.parallel.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    adamw,
    assert_close,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
    trained,
    whole_batch,
)

pytestmark = pytest.mark.device


def wrapped(hvd, model, make=adamw, **options):
    options.setdefault("accumulation_steps", 3)
    return hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), bucket_bytes=400, **options
    )


def backward(hvd, model, number, scale=lambda loss: loss):
    scale(loss_of(model, batch_of(hvd.rank(), number))).backward()


@pytest.mark.parametrize(
    ("kind", "scaled", "clip"),
    [
        ("sgd", False, 0.1),
        ("adamw", True, 0.1),
        ("sgd", True, None),
        ("adamw", False, None),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [
                ("adamw", False, 0.1),
                ("sgd", True, 0.1),
                ("adamw", True, None),
                ("sgd", False, None),
            ]
        ),
    ],
)
def test_calls_after_every_pass(hvd, kind, clip, scaled):
    model = small_model()
    optimizer = wrapped(hvd, model, OPTIMIZERS[kind])
    scaler = hvd.GradScaler(DEVICE.type, init_scale=2.0**8, enabled=scaled)
    stepped = []
    for number in range(12):
        backward(hvd, model, number, scaler.scale)
        if clip is not None:
            scaler.unscale_(optimizer)
            norm = hvd.clip_grad_norm_(optimizer, clip)
            assert (norm is None) == (number % 3 != 2)
        scaler.step(optimizer)
        stepped.append(optimizer.stepped)
        scaler.update()
        optimizer.zero_grad()
    assert stepped == [False, False, True] * 4
    _, reference = trained(hvd, OPTIMIZERS[kind], steps=4, passes=3, clip=clip)
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


def test_a_step_inside_a_window_changes_nothing(hvd):
    model = small_model()
    optimizer = wrapped(hvd, model)
    before = copy.deepcopy(model)
    for number in range(2):
        backward(hvd, model, number)
        gradients = [p.grad.clone() for p in model.parameters()]
        assert hvd.clip_grad_norm_(optimizer, 1e-6) is None
        optimizer.synchronize()
        assert optimizer.step() is None
        optimizer.zero_grad()
        assert not optimizer.stepped
        assert all(
            torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)
        )
    assert_close(model, before, 0)
    assert not optimizer.state
    backward(hvd, model, 2)
    optimizer.step()
    assert optimizer.stepped


def test_a_schedule_follows_stepped(hvd):
    model, reference = small_model(), small_model()
    optimizer, plain = wrapped(hvd, model, sgd), sgd(reference.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    reference_schedule = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    for number in range(9):
        backward(hvd, model, number)
        optimizer.step()
        if optimizer.stepped:
            schedule.step()
        optimizer.zero_grad()
        (loss_of(reference, whole_batch(hvd, number)) / 3).backward()
        if number % 3 == 2:
            plain.step()
            reference_schedule.step()
            plain.zero_grad()
    assert schedule.get_last_lr() == reference_schedule.get_last_lr() == [0.05 * 0.5**3]
    assert_close(model, reference)


@pytest.mark.parametrize("passes", [1, 3])
def test_two_losses_in_a_pass(hvd, passes):
    model, reference = small_model(), small_model()
    optimizer = wrapped(hvd, model, accumulation_steps=passes)
    plain = adamw(reference.parameters())
    for step in range(4):
        for k in range(passes * step, passes * (step + 1)):
            x = batch_of(hvd.rank(), k)
            with hvd.no_sync(optimizer):
                model(x).square().mean().backward()
                (0.5 * model(x).abs().mean()).backward()
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            x = whole_batch(hvd, k)
            loss = reference(x).square().mean() + 0.5 * reference(x).abs().mean()
            ((loss + loss_of(reference, x)) / passes).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


def test_losses_of_different_parts_of_the_model(hvd):
    # Each loss reaches a part of the model.
    model = nn.ModuleDict({"a": nn.Linear(5, 2), "b": nn.Linear(5, 2)})
    model.to(DEVICE, torch.float64)
    reference = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(reference.parameters())
    for step in range(3):
        with hvd.no_sync(optimizer):
            loss_of(model["a"], batch_of(hvd.rank(), step)).backward()
        loss_of(model["b"], batch_of(hvd.rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in ("a", "b"):
            loss_of(reference[part], whole_batch(hvd, step)).backward()
        plain.step()
        plain.zero_grad()
    assert_close(model, reference)


def test_no_sync_ends_with_an_exception(hvd):
    model = small_model()
    optimizer = wrapped(hvd, model, accumulation_steps=1)
    with pytest.raises(ZeroDivisionError), hvd.no_sync(optimizer):
        raise ZeroDivisionError
    backward(hvd, model, 0)
    optimizer.step()
    assert_same_on_all_ranks(hvd, model)


def test_no_sync_takes_a_wrapped_optimizer_only(hvd):
    with (
        pytest.raises(UsageError, match="not wrapped"),
        hvd.no_sync(sgd(small_model().parameters())),
    ):
        pass


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_only_the_last_pass_communicates(hvd, compression):
    from horovod.torch import mpi_ops

    model = small_model()
    optimizer = wrapped(hvd, model, compression=compression)
    calls = []
    original = mpi_ops.allreduce_async_

    def counted(*args, **kwargs):
        calls.append(kwargs.get("name"))
        return original(*args, **kwargs)

    mpi_ops.allreduce_async_ = counted
    try:
        counts = []
        for number in range(9):
            backward(hvd, model, number)
            during = len(calls)
            optimizer.step()
            counts.append((during, len(calls)))
            optimizer.zero_grad()
            calls.clear()
    finally:
        mpi_ops.allreduce_async_ = original
    assert [c for i, c in enumerate(counts) if i % 3 != 2] == [(0, 0)] * 6
    # From the second window on, buckets leave during the backward pass already.
    assert counts[5][0] > 0
    assert counts[8][0] > 0
    assert counts[2][1] > 0


def test_flush_without_passes_does_nothing(hvd):
    model = small_model()
    before = copy.deepcopy(model)
    for steps in (1, 3):
        optimizer = wrapped(hvd, model, accumulation_steps=steps)
        assert optimizer.flush() is False
        assert not optimizer.stepped
        for number in range(steps):
            backward(hvd, model, number)
            optimizer.step()
        optimizer.zero_grad()
        assert optimizer.flush() is False
        model.load_state_dict(before.state_dict())
    assert_close(model, before, 0)


def constant(value):
    """Return the input of a linear layer whose gradient has the three elements `value`."""
    return torch.full((1, 3), float(value), device=DEVICE)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("passes", [1, 2])
def test_flush_takes_the_mean_of_the_passes_that_there_were(hvd, passes, compression):
    model = nn.Linear(3, 1, bias=False).to(DEVICE)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), accumulation_steps=4, compression=compression
    )
    for window in range(2):
        for k in range(passes):
            model(constant(hvd.rank() + 1 + 4 * k)).sum().backward()
            optimizer.step()
        assert optimizer.flush(), window
        assert optimizer.stepped
        mean = (hvd.size() + 1) / 2 + 4 * (passes - 1) / 2
        torch.testing.assert_close(model.weight.grad, constant(mean))
        optimizer.zero_grad()
    # The next window is a whole one again.
    for k in range(4):
        model(constant(hvd.rank() + 1 + 4 * k)).sum().backward()
        optimizer.step()
        assert optimizer.stepped == (k == 3)
    torch.testing.assert_close(model.weight.grad, constant((hvd.size() + 1) / 2 + 6))


@pytest.mark.device(ranks=2)
def test_flush_on_ranks_with_different_numbers_of_passes(hvd):
    model = small_model()
    before = copy.deepcopy(model)
    optimizer = wrapped(hvd, model)
    for number in range(1 if hvd.rank() == 1 else 2):
        backward(hvd, model, number)
        optimizer.step()
    with pytest.raises(PassesDiffer) as caught:
        optimizer.flush()
    message = assert_raised_on_all_ranks(hvd, caught)
    for ranks, count in (([1], 1), ([rank for rank in range(hvd.size()) if rank != 1], 2)):
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        assert f"{who}: step 1, reduction 1, at its step, pass {count} of its window" in message
    assert_close(model, before, 0)


@pytest.mark.device(ranks=2)
def test_flush_if_some_ranks_have_no_passes(hvd):
    model = small_model()
    optimizer = wrapped(hvd, model)
    if hvd.rank() == 0:
        backward(hvd, model, 0)
    with pytest.raises(PassesDiffer, match=r"rank 0: .*pass 1 of its window.*rank"):
        optimizer.flush()


def test_flush_calls_the_given_step(hvd):
    model, reference = small_model(), small_model()
    optimizer, plain = wrapped(hvd, model), adamw(reference.parameters())
    scaler = hvd.GradScaler(DEVICE.type, init_scale=64.0)
    norms = []

    def step():
        scaler.unscale_(optimizer)
        norms.append(hvd.clip_grad_norm_(optimizer, 0.1))
        scaler.step(optimizer)
        scaler.update()

    for number in range(5):
        backward(hvd, model, number, scaler.scale)
        step()
        optimizer.zero_grad()
    assert optimizer.flush(step)
    assert [norm is None for norm in norms] == [True, True, False, True, True, False]
    for window in ((0, 1, 2), (3, 4)):
        plain.zero_grad()
        for number in window:
            (loss_of(reference, whole_batch(hvd, number)) / len(window)).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    assert_close(model, reference)


class Checkpointed(nn.Module):
    """Recomputes its layers in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = small_model()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant:
            x = x.detach().requires_grad_()
        for layers in (self.layers[:2], self.layers[2:4], self.layers[4:]):
            x = checkpoint(layers, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_is_one_pass(hvd, use_reentrant, passes):
    model, reference = trained(
        hvd,
        adamw,
        model=Checkpointed(use_reentrant),
        passes=passes,
        steps=4,
        clip=1.0,
        bucket_bytes=400,
    )
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_passes_are_counted_if_everything_is_checkpointed(hvd, use_reentrant):
    model = Checkpointed(use_reentrant)
    optimizer = wrapped(hvd, model)
    stepped = []
    for number in range(6):
        backward(hvd, model, number)
        optimizer.step()
        stepped.append(optimizer.stepped)
        optimizer.zero_grad()
    assert stepped == [False, False, True] * 2


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True, None])
def test_a_number_of_steps_that_is_none(hvd, steps):
    with pytest.raises(UsageError, match="accumulation_steps is .*whole number >= 1"):
        wrapped(hvd, small_model(), accumulation_steps=steps)


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


def one():
    return torch.ones(1, device=DEVICE, dtype=torch.float64)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_horovods_passes_are_summed(hvd, op):
    model = nn.Linear(1, 1, bias=False).to(DEVICE, torch.float64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        backward_passes_per_step=3,
        op=getattr(hvd, op),
    )
    for k in range(3):
        (model(one()) * (hvd.rank() + 1 + k)).sum().backward()
    optimizer.step()
    total = sum(rank + 1 + k for rank in range(hvd.size()) for k in range(3))
    assert model.weight.grad.item() == (total / hvd.size() if op == "Average" else total)


def test_sum_over_the_ranks_is_still_a_mean_over_the_passes(hvd):
    model = nn.Linear(1, 1, bias=False).to(DEVICE, torch.float64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), accumulation_steps=2, op=hvd.Sum
    )
    for k in range(2):
        (model(one()) * (hvd.rank() + 1 + 2 * k)).sum().backward()
        optimizer.step()
    assert model.weight.grad.item() == sum(rank + 2 for rank in range(hvd.size()))


def test_a_window_with_groups_and_a_predivide_factor(hvd):
    model, reference = trained(hvd, sgd, passes=3, steps=3, groups=2, gradient_predivide_factor=2.0)
    assert_close(model, reference)


@pytest.mark.parametrize("where", ["window", "no_sync", "raised"])
@pytest.mark.parametrize("loads", ["plain", "wrapped"])
def test_loading_state_begins_a_new_window(hvd, loads, where):
    """The script calls `zero_grad()` only after a step."""
    model, reference = small_model(), small_model()
    own, plain = adamw(model.parameters()), adamw(reference.parameters())
    optimizer = hvd.DistributedOptimizer(own, accumulation_steps=3, bucket_bytes=400)
    state = copy.deepcopy(optimizer.state_dict())
    if where == "no_sync":
        with hvd.no_sync(optimizer):
            backward(hvd, model, 99)
    elif where == "raised":
        handle = model[0].bias.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(hvd, model, 99)
        handle.remove()
    else:
        backward(hvd, model, 99)
        optimizer.step()
    (own if loads == "plain" else optimizer).load_state_dict(state)
    for number in range(3):
        backward(hvd, model, number)
        optimizer.step()
        (loss_of(reference, whole_batch(hvd, number)) / 3).backward()
    assert optimizer.stepped
    plain.step()
    assert_close(model, reference)


# Several optimizers


def linear(features, outputs):
    return nn.Linear(features, outputs).to(DEVICE, torch.float64)


class Parts(nn.Module):
    """An encoder and two heads, each with its own optimizer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.a, self.b = linear(5, 4), linear(4, 2), linear(4, 2)

    def loss(self, x, task):
        return (getattr(self, task)(self.encoder(x).tanh()) - x[:, :2].sin()).square().mean()

    def optimizers(self, wrap=lambda optimizer: optimizer):
        return [wrap(sgd(part.parameters())) for part in (self.encoder, self.a, self.b)]


def task_of(rank, number, differ):
    return "ab"[(number + (rank if differ else 0)) % 2]


@pytest.mark.parametrize("differ", [False, True], ids=["same task", "other tasks"])
@pytest.mark.parametrize("kind", ["accumulation_steps", "backward_passes_per_step"])
def test_a_window_does_not_depend_on_what_a_pass_reaches(hvd, kind, differ):
    model, reference = Parts(), Parts()
    optimizers = model.optimizers(lambda each: hvd.DistributedOptimizer(each, **{kind: 2}))
    plain = reference.optimizers()
    mean = kind == "accumulation_steps"
    for number in range(8):
        task = task_of(hvd.rank(), number, differ)
        model.loss(batch_of(hvd.rank(), number), task).backward()
        for rank in range(hvd.size()):
            loss = reference.loss(batch_of(rank, number), task_of(rank, number, differ))
            (loss / hvd.size() / (2 if mean else 1)).backward()
        for optimizer in optimizers:
            if mean or number % 2:
                optimizer.step()
                optimizer.zero_grad()
        for optimizer in plain:
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert [optimizer.steps for optimizer in optimizers] == [4, 4, 4]
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("passes", [2, 3])
def test_a_pass_for_each_optimizer_before_the_steps(hvd, passes):
    """Actor and critic are an example."""
    models = [linear(5, 2), linear(5, 2)]
    references = copy.deepcopy(models)
    optimizers = [
        hvd.DistributedOptimizer(sgd(m.parameters()), accumulation_steps=passes) for m in models
    ]
    plain = [sgd(m.parameters()) for m in references]
    with recorded("hvdkit.torch") as records:
        for number in range(2 * passes):
            for model, reference in zip(models, references, strict=True):
                loss_of(model, batch_of(hvd.rank(), number)).backward()
                (loss_of(reference, whole_batch(hvd, number)) / passes).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for optimizer in plain if number % passes == passes - 1 else []:
                optimizer.step()
                optimizer.zero_grad()
    for model, reference in zip(models, references, strict=True):
        assert_close(model, reference)
    assert not records


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("passes", [2, 3])
def test_a_gan(hvd, passes, freezes):
    """If the discriminator is not frozen, the generator's pass also adds to its gradients."""
    torch.manual_seed(0)
    pair = [linear(5, 5), linear(5, 1)]
    others = copy.deepcopy(pair)
    optimizers = [
        hvd.DistributedOptimizer(sgd(m.parameters()), accumulation_steps=passes) for m in pair
    ]
    plain = [sgd(m.parameters()) for m in others]

    def losses(generator, discriminator, x, share):
        yield 1, (discriminator(x) - discriminator(generator(x).detach())).tanh().mean() * share
        discriminator.requires_grad_(not freezes)
        yield 0, discriminator(generator(x)).tanh().mean() * share
        discriminator.requires_grad_(True)

    for number in range(3 * passes):
        for which, loss in losses(*pair, batch_of(hvd.rank(), number), 1):
            optimizers[which].zero_grad()
            loss.backward()
            optimizers[which].step()
        for which, loss in losses(*others, whole_batch(hvd, number), 1 / passes):
            if number % passes == 0:
                plain[which].zero_grad()
            loss.backward()
            if number % passes == passes - 1:
                plain[which].step()
    assert [optimizer.steps for optimizer in optimizers] == [3, 3]
    for own, other in zip(pair, others, strict=True):
        assert_close(own, other)


@pytest.mark.parametrize("kind", ["accumulation_steps", "backward_passes_per_step"])
def test_autograd_grad_in_a_whole_window(hvd, kind):
    model = small_model()
    optimizer = wrapped(hvd, model, **{"accumulation_steps": 1, kind: 2})
    for number in range(2):
        backward(hvd, model, number)
        if number == 0 and kind == "accumulation_steps":
            optimizer.step()
    gradients = [p.grad.clone() for p in model.parameters()]
    torch.autograd.grad(loss_of(model, batch_of(hvd.rank(), 2)), list(model.parameters()))
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient)
    optimizer.step()
    assert optimizer.stepped


@pytest.mark.parametrize("kind", ["accumulation_steps", "backward_passes_per_step"])
@pytest.mark.parametrize("missing", [0, 1, 2, 5])
def test_a_batch_without_a_pass_on_one_rank(hvd, missing, kind):
    """For example, no sample of the batch has a loss."""
    model, reference = linear(5, 2), linear(5, 2)
    reference.load_state_dict(model.state_dict())
    optimizer = wrapped(hvd, model, sgd, **{"accumulation_steps": 1, kind: 3})
    plain = sgd(reference.parameters())
    mean = kind == "accumulation_steps"
    for number in range(12):
        for rank in range(hvd.size()):
            if rank == hvd.size() - 1 and number == missing:
                continue
            if rank == hvd.rank():
                loss_of(model, batch_of(rank, number)).backward()
            loss = loss_of(reference, batch_of(rank, number)) / hvd.size()
            (loss / 3 if mean else loss).backward()
        last = number % 3 == 2
        if mean or last:
            optimizer.step()
            assert optimizer.stepped == last
            optimizer.zero_grad()
        if last:
            plain.step()
            plain.zero_grad()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


def test_each_call_of_step_counts(hvd):
    """Also if no rank has a pass, and before the first one."""
    model, reference = linear(5, 2), linear(5, 2)
    reference.load_state_dict(model.state_dict())
    optimizer, plain = wrapped(hvd, model, sgd), sgd(reference.parameters())
    for number in range(9):
        if number % 2:
            backward(hvd, model, number)
            (loss_of(reference, whole_batch(hvd, number)) / 3).backward()
        optimizer.step()
        assert optimizer.stepped == (number % 3 == 2)
        optimizer.zero_grad()
        if optimizer.stepped:
            plain.step()
            plain.zero_grad()
    assert_close(model, reference)


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
    assert optimizer.steps == 2
    expected = passes == 2 and hvd.rank() == 0
    texts = [record.getMessage() for record in records]
    assert len(texts) == expected
    assert all("counts calls of step()" in text for text in texts)


@pytest.mark.parametrize("window", [0, 1])
def test_zero_grad_within_a_window(hvd, window):
    """It keeps the gradients of earlier batches, but not those before the first call of step()."""
    model, reference = linear(5, 2), linear(5, 2)
    reference.load_state_dict(model.state_dict())
    optimizer, plain = wrapped(hvd, model, sgd), sgd(reference.parameters())
    for number in range(3 * window):
        backward(hvd, model, number)
        optimizer.step()
    optimizer.zero_grad()
    reference.load_state_dict(model.state_dict())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3):
        backward(hvd, model, 100 + number)
        optimizer.zero_grad()
        (loss_of(reference, whole_batch(hvd, 100 + number)) / 3 * (number > 0)).backward()
        optimizer.step()
    assert optimizer.stepped
    plain.step()
    assert_close(model, reference)


@pytest.mark.parametrize("follows", ["", "step", "zero_grad step"])
def test_a_call_after_a_dropped_pass(hvd, follows):
    """The drop of the last batch stands for the call of step() of this batch."""
    model = small_model()
    optimizer = wrapped(hvd, model)
    steps = []
    for number in range(9):
        if number == 5 and hvd.rank() == 0:
            dropped = optimizer.drop_pass()
        else:
            try:
                backward(hvd, model, number)
                dropped = False
            except BackwardFailed:
                dropped = optimizer.drop_pass()
        assert dropped == (number == 5)
        for call in follows.split() if dropped else ("step", "zero_grad"):
            getattr(optimizer, call)()
        if optimizer.stepped and not dropped:
            steps.append(number)
    assert steps == [2, 8]
    assert_same_on_all_ranks(hvd, model)


@pytest.mark.parametrize("falls_through", [False, True])
def test_a_rank_without_a_pass_after_a_dropped_pass(hvd, falls_through):
    """All ranks count its call of step() alike, so all ranks step after the same batch."""
    model, reference = small_model(), small_model()
    reference.load_state_dict(model.state_dict())
    optimizer, plain = wrapped(hvd, model, sgd), sgd(reference.parameters())
    for number in range(6):
        dropped = False
        try:
            if number == 2 and hvd.rank() == 0:
                raise BackwardFailed
            if (hvd.rank(), number) != (1, 3):
                backward(hvd, model, number)
        except BackwardFailed:
            dropped = optimizer.drop_pass()
        assert dropped == (number == 2)
        if not dropped or falls_through:
            optimizer.step()
            assert optimizer.stepped == (number == 5)
            optimizer.zero_grad()
    for number in range(3, 6):
        for rank in range(hvd.size()):
            if (rank, number) != (1, 3):
                (loss_of(reference, batch_of(rank, number)) / hvd.size() / 3).backward()
    plain.step()
    assert_close(model, reference)
    assert_same_on_all_ranks(hvd, model)


def test_removing_the_gradients_of_a_complete_window(hvd):
    """Also before a batch in which a rank has no pass: all ranks begin a new window."""
    model, reference = linear(5, 2), linear(5, 2)
    reference.load_state_dict(model.state_dict())
    optimizer, plain = wrapped(hvd, model, sgd), sgd(reference.parameters())
    for number in range(3):
        backward(hvd, model, number)
        assert (hvd.clip_grad_norm_(optimizer, 1.0) is None) == (number < 2)
        if number < 2:
            optimizer.step()
    model.zero_grad()
    for number in range(3):
        for rank in range(hvd.size()):
            if (rank, number) != (1, 0):
                if rank == hvd.rank():
                    backward(hvd, model, number)
                (loss_of(reference, batch_of(rank, number)) / hvd.size() / 3).backward()
        optimizer.step()
        assert optimizer.stepped == (number == 2)
    plain.step()
    assert_close(model, reference)
