"""Orders of a script's own changes and passes, compared with the mean over the ranks.

`add(weight, value)` is a pass whose gradient is `value` for each element of the weight.
"""

import copy
import gc

import pytest
import torch
from torch import nn

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.reduction.step_errors import GradientsChanged
from tests.ranks.torch.oracle import DEVICE, assert_same_on_all_ranks


def weights(number=1, elements=3):
    return [nn.Parameter(torch.zeros(elements, device=DEVICE)) for _ in range(number)]


def wrapped(hvd, parameters, **options):
    plain = torch.optim.SGD(parameters, lr=1.0)
    names = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return hvd.DistributedOptimizer(plain, names, bucket_bytes=1, **options)


def add(weight, value):
    (weight * value).sum().backward()


def mean(hvd, function):
    return sum(function(rank) for rank in range(hvd.size())) / hvd.size()


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_are_written_before_passes_without_a_reduction(hvd, size):
    (w,) = weights()
    optimizer = wrapped(hvd, [w], backward_passes_per_step=size)
    for _ in range(size):
        add(w, 1.0)
    optimizer.step()
    w.grad.copy_(torch.full((3,), 10.0 * (hvd.rank() + 1)))
    with hvd.no_sync(optimizer):
        add(w, 1.0)
    optimizer.step()
    expected = mean(hvd, lambda rank: 10.0 * (rank + 1)) + 1.0
    torch.testing.assert_close(w.grad, torch.full_like(w, expected))


def test_a_sum_of_which_one_gradient_is_written_without_a_pass(hvd):
    first, last = weights(2)
    optimizer = wrapped(hvd, [first, last], op=hvd.Sum)
    add(first + last, 1.0)
    optimizer.step()
    first.grad.fill_(hvd.rank() + 1.0)
    optimizer.step()
    total = hvd.size() * mean(hvd, lambda rank: rank + 1.0)
    assert (first.grad[0].item(), last.grad[0].item()) == (total, hvd.size())


def test_a_copy_of_a_reduced_gradient_is_the_scripts_own(hvd):
    (w,) = weights()
    optimizer = wrapped(hvd, [w])
    add(w, 1.0)
    optimizer.step()
    own = copy.deepcopy(w.grad)
    optimizer.zero_grad()
    own.data.fill_(hvd.rank() + 1.0)
    w.grad = own
    add(w, 1.0)
    torch.testing.assert_close(w.grad, torch.full_like(w, mean(hvd, lambda rank: rank + 2.0)))


@pytest.mark.parametrize("kind", ["sum", "clipped"])
def test_a_conversion_of_a_reduced_gradient(hvd, kind):
    """PyTorch swaps the contents, and loses the hooks: nothing shows what is reduced."""
    (w,) = weights()
    model = nn.ParameterList([w])
    options = {"op": hvd.Sum} if kind == "sum" else {"max_grad_norm": 100.0}
    optimizer = wrapped(hvd, [w], **options)
    add(w, 1.0)
    optimizer.step()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    add(w, 1.0)
    with pytest.raises(GradientsChanged, match="were changed"):
        optimizer.step()
    optimizer.zero_grad()
    add(w, hvd.rank() + 1.0)
    factor = hvd.size() if kind == "sum" else 1
    assert w.grad.tolist() == [factor * mean(hvd, lambda rank: rank + 1.0)] * 3


@pytest.mark.parametrize("number", [1, 2])
def test_a_pass_after_the_script_has_cleared_hooks(hvd, number):
    """Without its hooks, the last parameter's gradient is complete before the first hook."""
    parameters = first, last = weights(2)
    optimizer = wrapped(hvd, parameters)

    def run(value):
        ((first * 1.0 + last) * value).sum().backward()

    run(1.0)
    for p in parameters[-number:]:
        p._backward_hooks.clear()
        p._post_accumulate_grad_hooks.clear()
    for passes in (1, 2):
        run(hvd.rank() + 1.0)
        optimizer.synchronize()
        expected = 1.0 + passes * mean(hvd, lambda rank: rank + 1.0)
        assert first.grad.tolist() == last.grad.tolist() == [expected] * 3


@pytest.mark.parametrize("sparse", [False, True])
def test_zeros_after_a_local_pass_over_other_parameters_on_each_rank(hvd, sparse):
    layers = [nn.Embedding(3, 1, sparse=sparse).to(DEVICE) for _ in range(2)]
    optimizer = wrapped(hvd, [layer.weight for layer in layers])
    rows = torch.tensor([0, 1], device=DEVICE)

    def run(reached, factor):
        sum(layer(rows).sum() * factor for layer in reached).backward()

    run(layers, 1.0)
    with hvd.no_sync(optimizer):
        run([layers[hvd.rank() % 2]], 5.0)
    for layer in layers:
        layer.zero_grad(set_to_none=False)
    run(layers, hvd.rank() + 1.0)
    expected = mean(hvd, lambda rank: rank + 1.0)
    for layer in layers:
        gradient = layer.weight.grad.to_dense() if sparse else layer.weight.grad
        assert gradient.flatten().tolist() == [expected, expected, 0.0]


def test_a_skipped_pass_is_repeated_over_other_parameters_on_each_rank(hvd):
    parameters = weights(2)
    optimizers = [wrapped(hvd, [p], on_nonfinite="skip") for p in parameters]
    add(sum(parameters), float("nan"))
    for p in parameters:
        p.grad.zero_()
    add(parameters[hvd.rank() % 2], 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_on_all_ranks(hvd, nn.ParameterList(parameters))
    assert all(p.isfinite().all() and p.any() for p in parameters[: hvd.size()])


@pytest.mark.parametrize("how", ["window", "no_sync"])
def test_a_flush_of_passes_that_only_one_rank_has(hvd, how):
    (w,) = weights()
    options = {"backward_passes_per_step": 3} if how == "window" else {}
    optimizer = wrapped(hvd, [w], **options)
    if hvd.rank() == 0:
        if how == "window":
            add(w, 1.0)
        else:
            with hvd.no_sync(optimizer):
                add(w, 1.0)
    assert optimizer.flush()
    assert not optimizer.flush()
    torch.testing.assert_close(w.detach(), torch.full_like(w, -1.0 / hvd.size()))


def test_a_pass_after_a_clipped_infinite_one_was_reset(hvd):
    (w,) = weights()
    wrapped_optimizer = wrapped(hvd, [w], max_grad_norm=1.0)
    add(w, float("inf"))
    w.grad.zero_()
    add(w, 3.0)
    assert wrapped_optimizer.grad_norm.isfinite()
    torch.testing.assert_close(w.grad.norm(), torch.ones((), device=DEVICE))


def test_a_window_of_a_sum_that_the_script_resets_on_a_rank_without_passes(hvd):
    (w,) = weights()
    optimizer = wrapped(hvd, [w], backward_passes_per_step=2)
    if hvd.rank() == 0:
        add(w, 1.0)
        add(w, 1.0)
    hvd.clip_grad_norm_(optimizer, 1.0)
    w.grad = None
    for _ in range(2):
        add(w, hvd.rank() + 1.0)
    optimizer.step()
    expected = -2 * mean(hvd, lambda rank: rank + 1.0)
    torch.testing.assert_close(w.detach(), torch.full_like(w, expected))


def test_a_parameter_that_is_appended_with_a_gradient_on_one_rank(hvd):
    first, last = weights(2)
    optimizer = wrapped(hvd, [first])
    add(first, 1.0)
    optimizer.param_groups[0]["params"].append(last)
    if hvd.rank() == 0:
        last.grad = torch.ones_like(last)
    optimizer.step()
    torch.testing.assert_close(last.detach(), torch.full_like(last, -1.0 / hvd.size()))


def test_a_later_hook_makes_gradients_finite(hvd):
    first, last = weights(2)
    optimizer = wrapped(hvd, [first, last], on_nonfinite="skip")

    def clean(p):
        p.grad.nan_to_num_(nan=1.0)

    for p in (first, last):
        p.register_post_accumulate_grad_hook(clean)
    add(first + last, float("nan"))
    optimizer.step()
    assert [p.tolist() for p in (first, last)] == [[-1.0] * 3] * 2


def remove(p, _):
    p.grad = None


def halve_the_other(p, other):
    if other.grad is not None:
        other.grad.mul_(0.5)


@pytest.mark.parametrize("hook", [remove, halve_the_other])
def test_a_hook_that_changes_more_than_its_own_gradient(hvd, hook):
    parameters = weights(6, 1000)
    optimizer = wrapped(hvd, parameters)
    add(sum(parameters), 1.0)  # this pass makes the plan, so later ones send buckets early
    optimizer.step()
    optimizer.zero_grad()
    for p in parameters:
        p.register_post_accumulate_grad_hook(
            lambda p: hook(p, parameters[-1]) if p is not parameters[-1] else None
        )
    with pytest.raises(GradientsChanged, match="a hook has"):
        add(sum(parameters), 1.0)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("accumulation_steps", r"call optimizer\.zero_grad\(\)"),
        ("backward_passes_per_step", r"only after optimizer\.step\(\)"),
    ],
)
def test_gradients_that_are_removed_inside_a_window(hvd, kind, advice):
    (w,) = weights()
    optimizer = wrapped(hvd, [w], **{kind: 3})
    add(w, 1.0)
    if kind == "accumulation_steps":
        optimizer.step()
    w.grad = None
    with pytest.raises(HvdkitError, match=advice):
        add(w, 1.0)
    optimizer.zero_grad()
    for _ in range(3):
        add(w, hvd.rank() + 1.0)
        if kind == "accumulation_steps":
            optimizer.step()
    optimizer.step()
    factor = 1 if kind == "accumulation_steps" else 3
    expected = -factor * mean(hvd, lambda rank: rank + 1.0)
    torch.testing.assert_close(w.detach(), torch.full_like(w, expected))


def test_gradients_that_are_removed_after_a_window(hvd):
    """Also before a batch in which a rank has no pass: all ranks begin a new window."""
    (w,) = weights()
    optimizer = wrapped(hvd, [w], accumulation_steps=3)
    for number in range(3):
        add(w, 100.0)
        assert (hvd.clip_grad_norm_(optimizer, 1.0) is None) == (number < 2)
        if number < 2:
            optimizer.step()
    w.grad = None
    for number in range(3):
        if (hvd.rank(), number) != (1, 0):
            add(w, 1.0)
        optimizer.step()
    expected = -(1 - 1 / hvd.size() / 3)
    torch.testing.assert_close(w.detach(), torch.full_like(w, expected))


@pytest.mark.parametrize("windows", [0, 1])
def test_zero_grad_between_the_passes_of_a_window(hvd, windows):
    """It keeps the gradients of earlier batches, but not those before the first call of step()."""
    (w,) = weights()
    optimizer = wrapped(hvd, [w], accumulation_steps=3)
    for _ in range(3 * windows):
        add(w, 0.0)
        optimizer.step()
        optimizer.zero_grad()
    for number in range(3):
        add(w, 3.0**number)
        optimizer.zero_grad()
        optimizer.step()
    assert (-w).tolist() == [(3 + 9) / 3] * 3


def test_a_change_before_a_reduction_is_forgotten_after_it(hvd):
    """After the reduction with a rank that made no pass, the gradients have not been changed."""
    (w,) = weights()
    optimizer = wrapped(hvd, [w], op=hvd.Sum)
    for step in range(3):
        if step:
            w.grad.zero_()
        if step == 0 or hvd.rank() != 1:
            add(w, 1.0)
        optimizer.step()
        assert w.grad.tolist() == [hvd.size() - (step > 0)] * 3


def test_a_change_of_data_before_a_late_rank_takes_part(hvd):
    """`p.grad.data` has no version counter, so only the values show the change."""
    (w,) = weights()
    optimizer = wrapped(hvd, [w])
    if hvd.rank() > 0:
        add(w, 1.0)
        w.grad.data.clamp_(max=0.25)
    with pytest.raises(GradientsChanged, match="differ between ranks"):
        optimizer.step()


@pytest.mark.parametrize("then", ["pass", "step"])
def test_a_gradient_without_its_reduced_part_is_changed(hvd, then):
    (w,) = weights()
    optimizer = wrapped(hvd, [w])
    add(w, 1.0)
    with hvd.no_sync(optimizer):
        add(w, 1.0)
    w.grad.clamp_(max=0.5)
    with pytest.raises(GradientsChanged, match=r"gradients were changed .*call optimizer.synchro"):
        add(w, 1.0) if then == "pass" else optimizer.step()
    optimizer.zero_grad()
    add(w, hvd.rank() + 1.0)
    assert w.grad.tolist() == [mean(hvd, lambda rank: rank + 1.0)] * 3


def test_a_round_that_a_late_rank_enters_at_another_optimizer(hvd):
    parameters = weights(2)
    optimizers = [wrapped(hvd, [p]) for p in parameters]
    add(sum(parameters), 100.0)
    with hvd.no_sync(optimizers[0]), hvd.no_sync(optimizers[1]):
        add(sum(parameters), 10.0)
    if hvd.rank() == 0:
        add(sum(parameters), 1.0)
    for optimizer in reversed(optimizers):  # the first call also reduces the other optimizer
        optimizer.synchronize()
    for p in parameters:
        torch.testing.assert_close(p.grad, torch.full_like(p, 110 + 1 / hvd.size()))


def test_a_step_of_the_plain_optimizer_in_a_window(hvd):
    (w,) = weights()
    plain = torch.optim.SGD([w], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, accumulation_steps=2)
    add(w, 1.0)
    with pytest.raises(UsageError, match="call step.. of the wrapped optimizer"):
        plain.step()
    optimizer.step()
    add(w, 1.0)
    optimizer.step()
    assert w.tolist() == [-1.0] * 3


def test_an_elastic_state_that_is_restored_after_a_pass(hvd):
    """A loop that calls zero_grad after the step would add to these gradients."""
    (w,) = weights()
    model = nn.ParameterList([w])
    state = hvd.elastic.TorchState(model=model, optimizer=wrapped(hvd, [w]))
    state.save()
    add(w, 5.0)
    state.restore()
    state.sync()
    add(w, 1.0)
    assert w.grad.tolist() == [1.0] * 3


def test_an_optimizer_is_not_freed_during_a_round(hvd):
    """A rank takes part with zeros for an optimizer that only a garbage collection will free."""
    from hvdkit.torch.reduction.coordination import Coordinator

    gc.disable()  # until the round has begun
    one, other = weights(2)
    optimizers = [wrapped(hvd, [p], check_parameters=False) for p in (one, other)]
    first = hvd.rank() == 0
    if not first:
        unused = optimizers.pop()
        unused.cycle = unused
        del unused, other
    complete_rounds = Coordinator._complete_rounds

    def collect_first(self, *arguments):
        gc.enable()
        gc.collect()
        complete_rounds(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "_complete_rounds", collect_first)
        add(other if first else one, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    if first:
        assert other.grad.tolist() == [1 / hvd.size()] * 3


def test_a_hook_that_moves_gradients_away(hvd):
    """`p.main_grad`, as in Megatron: hvdkit would reduce nothing."""
    (w,) = weights()
    optimizer = wrapped(hvd, [w])

    def move(p):
        p.main_grad, p.grad = p.grad, None

    handle = w.register_post_accumulate_grad_hook(move)
    with hvd.no_sync(optimizer):
        add(w, 1.0)
    with pytest.raises(GradientsChanged, match="a hook has set p.grad to None"):
        optimizer.synchronize()
    handle.remove()
    optimizer.zero_grad()
    add(w, hvd.rank() + 1.0)
    assert w.grad.tolist() == [mean(hvd, lambda rank: rank + 1.0)] * 3


class _ReturnsNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, used, unused):
        return used * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_function_that_returns_no_gradient(hvd, find_unused):
    """PyTorch calls the hooks of the parameter, but adds nothing to `p.grad`."""
    used, unused, partly = weights(3)
    optimizer = wrapped(hvd, [used, unused, partly], find_unused_parameters=find_unused)
    for count in (1, 2):
        other = partly if hvd.rank() else used
        loss = (hvd.rank() + 1) * _ReturnsNone.apply(used, unused).sum()
        (loss + _ReturnsNone.apply(other, partly).sum()).backward()
        first = mean(hvd, lambda rank: 2 * (rank + 1) + (0 if rank else 2))
        second = mean(hvd, lambda rank: 2 if rank else 0)
        torch.testing.assert_close(used.grad, torch.full_like(used, count * first))
        torch.testing.assert_close(partly.grad, torch.full_like(partly, count * second))
        if find_unused:
            assert unused.grad is None
        else:
            assert not unused.grad.any()
    optimizer.step()
