"""Several backward passes for one step: accumulation_steps, no_sync, flush."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdkit.core.accumulation import PassesDiffer
from hvdkit.core.consistency import RankMismatchError
from hvdkit.core.step_errors import BackwardFailed, GradientsChanged
from hvdkit.errors import UsageError
from tests.logs import recorded
from tests.parallel.torch.oracle import (
    DEVICE,
    OPTIMIZERS,
    Twins,
    adamw,
    assert_close,
    assert_raised_on_all_ranks,
    assert_same_on_all_ranks,
    batch_of,
    loss_of,
    sgd,
    small_model,
    whole_batch,
)

pytestmark = pytest.mark.device

KINDS = ["accumulation_steps", "backward_passes_per_step"]


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
    twins = Twins(hvd, OPTIMIZERS[kind], accumulation_steps=3)
    scaler = hvd.GradScaler(DEVICE.type, init_scale=2.0**8, enabled=scaled)
    for number in range(12):
        backward(hvd, twins.model, number, scaler.scale)
        twins.backward_of_one_process(number)
        if clip is not None:
            scaler.unscale_(twins.optimizer)
            twins.clip(clip)
        twins.step(lambda own: scaler.step(own))
        scaler.update()
        twins.zero_grad()
    twins.check()


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
    twins = Twins(hvd, accumulation_steps=3)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (twins.optimizer, twins.plain[0])
    ]
    for number in range(9):
        twins.train(number)
        for schedule in schedules if twins.optimizer.stepped else []:
            schedule.step()
    assert twins.optimizer.param_groups[0]["lr"] == 0.05 * 0.5**3
    twins.check()


@pytest.mark.parametrize("passes", [1, 3])
def test_two_losses_in_a_pass(hvd, passes):
    twins = Twins(hvd, adamw, accumulation_steps=passes)
    for number in range(4 * passes):
        with hvd.no_sync(twins.optimizer):
            twins.backward(lambda m, rank, n=number: m(batch_of(rank, n)).square().mean())
            twins.backward(lambda m, rank, n=number: 0.5 * m(batch_of(rank, n)).abs().mean())
        twins.train(number)
    twins.check()


def test_losses_of_different_parts_of_the_model(hvd):
    model = nn.ModuleDict({"a": linear(5, 2), "b": linear(5, 2)})
    twins = Twins(hvd, model=model)
    for number in range(3):
        with hvd.no_sync(twins.optimizer):
            twins.backward(lambda m, rank, n=number: loss_of(m["a"], batch_of(rank, n)))
        twins.train(lambda m, rank, n=number: loss_of(m["b"], batch_of(rank, n)))
    twins.check()


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


@pytest.mark.parametrize("setting", ["accumulation_steps", "backward_passes_per_step"])
def test_gradients_are_final_when_flush_calls_the_given_step(hvd, setting):
    model, reference = small_model(), small_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), **{setting: 3}
    )
    plain = sgd(reference.parameters())
    divisor = 2 if setting == "accumulation_steps" else 1

    def step():
        # With PyTorch's own function, as after the last pass of a whole window.
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for number in range(2):
        backward(hvd, model, number)
        if setting == "accumulation_steps":
            optimizer.step()
        (loss_of(reference, whole_batch(hvd, number)) / divisor).backward()
    assert optimizer.flush(step)
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
    twins = Twins(hvd, adamw, Checkpointed(use_reentrant), accumulation_steps=passes)
    twins.train(*range(4 * passes), clip=1.0)
    twins.check()


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


def test_a_window_with_groups_and_a_predivide_factor(hvd):
    twins = Twins(hvd, accumulation_steps=3, groups=2, gradient_predivide_factor=2.0)
    twins.train(*range(9))
    twins.check()


@pytest.mark.parametrize("where", ["window", "no_sync", "raised"])
@pytest.mark.parametrize("loads", ["plain", "wrapped"])
def test_loading_state_begins_a_new_window(hvd, loads, where):
    """The script calls `zero_grad()` only after a step."""
    own = []
    twins = Twins(hvd, lambda ps: own.append(adamw(ps)) or own[-1], accumulation_steps=3)
    model, optimizer = twins.model, twins.optimizer
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
    (own[0] if loads == "plain" else optimizer).load_state_dict(state)
    for number in range(3):
        twins.backward(number)
        twins.step()
    twins.check()


# Several optimizers


def linear(features, outputs):
    return nn.Linear(features, outputs).to(DEVICE, torch.float64)


@pytest.mark.parametrize("passes", [2, 3])
def test_a_pass_for_each_optimizer_before_the_steps(hvd, passes):
    """Actor and critic are an example."""
    models = nn.ModuleList([linear(5, 2), linear(5, 2)])
    twins = Twins(hvd, model=models, parts=list, accumulation_steps=passes)
    with recorded("hvdkit.torch") as records:
        for number in range(2 * passes):
            for k in (0, 1):
                twins.backward(lambda m, rank, k=k, n=number: loss_of(m[k], batch_of(rank, n)))
            twins.step()
            twins.zero_grad()
    twins.check()
    assert not records


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("passes", [2, 3])
def test_a_gan(hvd, passes, freezes):
    """If the discriminator is not frozen, the generator's pass also adds to its gradients."""
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
            for model, _ in twins.sides:
                model[1].requires_grad_(which == 1 or not freezes)
            twins.backward(partial(loss, which, number))
            for model, _ in twins.sides:
                model[1].requires_grad_(True)
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


@pytest.mark.parametrize("window", [0, 1])
def test_zero_grad_within_a_window(hvd, window):
    """It keeps the gradients of earlier batches, but not those before the first call of step()."""
    twins = Twins(hvd, model=linear(5, 2), accumulation_steps=3)
    twins.train(*range(3 * window))
    for number in range(3):
        twins.backward(100 + number)
        twins.zero_grad()
        twins.step()
    twins.check()


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
    twins = Twins(hvd, accumulation_steps=3)
    optimizer = twins.optimizer
    for number in range(3):
        dropped = False
        try:
            if number == 2 and hvd.rank() == 0:
                raise BackwardFailed
            backward(hvd, twins.model, number)
        except BackwardFailed:
            dropped = optimizer.drop_pass()
        assert dropped == (number == 2)
        if not dropped or falls_through:
            optimizer.step()
            assert not optimizer.stepped
            optimizer.zero_grad()
    twins.train(3, ranks=[rank for rank in range(hvd.size()) if rank != 1])
    twins.train(4, 5)
    twins.check()


def test_removing_the_gradients_of_a_complete_window(hvd):
    """Also before a batch in which a rank has no pass: all ranks begin a new window."""
    twins = Twins(hvd, model=linear(5, 2), accumulation_steps=3)
    for number in range(3):
        backward(hvd, twins.model, number)
        assert (hvd.clip_grad_norm_(twins.optimizer, 1.0) is None) == (number < 2)
        if number < 2:
            twins.optimizer.step()
    twins.model.zero_grad()
    for number in range(3):
        twins.backward(number, [rank for rank in range(hvd.size()) if (rank, number) != (1, 0)])
        twins.step()
    twins.check()


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


@pytest.mark.parametrize("then", ["pass", "step"])
def test_a_gradient_without_its_reduced_part_is_not_changed_unnoticed(hvd, then):
    model = small_model().to(DEVICE)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    backward(hvd, model, 0)
    with hvd.no_sync(optimizer):
        backward(hvd, model, 1)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    with pytest.raises(GradientsChanged, match=r"gradients were changed .*call optimizer.synchro"):
        backward(hvd, model, 2) if then == "pass" else optimizer.step()
    optimizer.zero_grad()
    backward(hvd, model, 3)
    optimizer.step()
    assert_same_on_all_ranks(hvd, model)


def test_a_round_that_a_late_rank_enters_elsewhere_is_no_change_by_the_script(hvd):
    models = [nn.Linear(3, 1, bias=False).to(DEVICE) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(sgd(model.parameters())) for model in models]

    def add(value):
        sum((model.weight * value).sum() for model in models).backward()

    add(100.0)
    with hvd.no_sync(optimizers[0]), hvd.no_sync(optimizers[1]):
        add(10.0)
    if hvd.rank() == 0:
        add(1.0)
    for optimizer in reversed(optimizers):  # the first call also reduces the other optimizer
        optimizer.synchronize()
    for model in models:
        gradient = torch.full((1, 3), 110 + 1 / hvd.size(), device=DEVICE)
        torch.testing.assert_close(model.weight.grad, gradient)


def test_a_step_of_the_plain_optimizer_in_a_window_raises(hvd):
    model = small_model().to(DEVICE)
    plain = sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(plain, accumulation_steps=2)
    backward(hvd, model, 0)
    with pytest.raises(UsageError, match="call step.. of the wrapped optimizer"):
        plain.step()
    for number in (1, 2):
        optimizer.step()
        optimizer.zero_grad()
        backward(hvd, model, number)
    assert_same_on_all_ranks(hvd, model)
