"""Orders of a script's own changes and passes, compared with the mean over the ranks.

`add(weight, value)` is a pass whose gradient is `value` for each element of the weight.
"""

import copy

import pytest
import torch
from torch import nn

from hvdkit.core.step_errors import GradientsChanged
from tests.parallel.torch.oracle import DEVICE, assert_same_on_all_ranks


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


def test_a_conversion_of_a_reduced_sum(hvd):
    """PyTorch swaps the contents, and loses the hooks: nothing shows what is reduced."""
    (w,) = weights()
    model = nn.ParameterList([w])
    optimizer = wrapped(hvd, [w], op=hvd.Sum)
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
    assert w.grad.tolist() == [hvd.size() * mean(hvd, lambda rank: rank + 1.0)] * 3


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
