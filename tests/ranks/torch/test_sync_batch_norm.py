"""`hvd.SyncBatchNorm` on CPUs, compared with `torch.nn.BatchNorm` in one process with all data."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from hvdkit.errors import UsageError

KINDS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
COUNTS = [3, 1, 0, 5]  # samples of the ranks


def batches_of(hvd, shape, counts, dtype=torch.float64):
    """Return the samples of each rank. Mean and standard deviation depend on the rank."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(n, 3, *shape, generator=generator, dtype=torch.float64) for n in counts]
    return [(x * (r + 1) + 10 * r).to(dtype) for r, x in enumerate(drawn[: hvd.size()])]


def forward_and_back(layer, x, places):
    """Return the output, and the gradients of a loss with a different weight for each element."""
    x = x.clone().requires_grad_()
    y = layer(x)
    inner = y.shape[1:]
    weights = torch.arange(inner.numel(), dtype=y.dtype).view(inner).sin()
    numbers = torch.tensor(places, dtype=y.dtype).view(-1, *[1] * len(inner))
    (y.pow(3) * weights * numbers).sum().backward()
    return y.detach(), x.grad


def assert_as_one_process(hvd, batches, rtol=1e-9, steps=2, **options):
    ours, plain = hvd.SyncBatchNorm(3, **options), KINDS[batches[0].dim()](3, **options)
    for layer in (ours, plain):
        layer.to(torch.float64 if batches[0].dtype == torch.float64 else torch.float32)
        if layer.affine:
            with torch.no_grad():
                layer.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
    first = sum(len(b) for b in batches[: hvd.rank()])
    here = slice(first, first + len(batches[hvd.rank()]))
    places = torch.arange(1, sum(map(len, batches)) + 1).tolist()
    for _ in range(steps):
        y, of_x = forward_and_back(ours, batches[hvd.rank()], places[here])
        whole_y, whole_of_x = forward_and_back(plain, torch.cat(batches), places)
        torch.testing.assert_close(y, whole_y[here], rtol=rtol, atol=rtol)
        scale = whole_of_x.abs().max().item()
        torch.testing.assert_close(of_x, whole_of_x[here], rtol=rtol, atol=rtol * scale)
    for own, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
        total = hvd.allreduce(own.grad, op=hvd.Sum)
        scale = wanted.grad.abs().max().item()
        torch.testing.assert_close(total, wanted.grad, rtol=rtol, atol=rtol * scale)
    for own, wanted in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=rtol, atol=rtol)
        assert torch.equal(hvd.broadcast(own, root_rank=0), own)
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(batches[0]), plain(batches[0]), rtol=rtol, atol=rtol)


def test_a_batch_without_samples_on_all_ranks(hvd):
    layer = hvd.SyncBatchNorm(3)
    x = torch.zeros(0, 3, 4, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer.running_mean, torch.zeros(3))
    assert torch.equal(layer.running_var, torch.ones(3))
    assert torch.equal(layer.weight.grad, torch.zeros(3))


@pytest.mark.parametrize("shape", [(), (4,), (4, 5), (2, 3, 2)])
def test_it_is_that_of_one_process(hvd, shape):
    assert_as_one_process(hvd, batches_of(hvd, shape, COUNTS))


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"eps": 0.1, "momentum": 0.5}],
    ids=lambda options: "-".join(options),
)
def test_options(hvd, options):
    assert_as_one_process(hvd, batches_of(hvd, (4,), COUNTS), steps=3, **options)


@pytest.mark.skipif(
    "bias" not in inspect.signature(nn.BatchNorm1d).parameters, reason="PyTorch has no bias=False"
)
def test_without_a_bias(hvd):
    batches = batches_of(hvd, (4,), COUNTS)
    assert_as_one_process(hvd, batches, bias=False, device="cpu", dtype=torch.float64)
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, bias=False))
    layer(batches[hvd.rank()].float()).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


def test_float32_keeps_its_digits_far_from_zero(hvd):
    batches = [b + 1000 for b in batches_of(hvd, (8,), [40] * 4, torch.float32)]
    assert_as_one_process(hvd, batches, rtol=2e-3)


def test_bfloat16_input(hvd):
    layer = hvd.SyncBatchNorm(3)
    x = batches_of(hvd, (4,), [6] * 4, torch.bfloat16)
    y = layer(x[hvd.rank()].requires_grad_())
    y.square().sum().backward()
    assert y.dtype == x[hvd.rank()].grad.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32
    wanted = nn.BatchNorm1d(3)(torch.cat(x).float())
    mine = slice(6 * hvd.rank(), 6 * (hvd.rank() + 1))
    torch.testing.assert_close(y.float(), wanted[mine], rtol=1e-2, atol=1e-2)


def test_without_running_statistics(hvd):
    batches = batches_of(hvd, (4,), [6] * 4)
    layer = hvd.SyncBatchNorm(3, track_running_stats=False).double()
    alone = nn.BatchNorm1d(3, track_running_stats=False).double()
    wanted = alone(torch.cat(batches))
    mine = slice(6 * hvd.rank(), 6 * (hvd.rank() + 1))
    torch.testing.assert_close(layer(batches[hvd.rank()]), wanted[mine])
    # As in PyTorch's class, an evaluation on one rank does not wait for the others.
    if hvd.rank() == 0:
        torch.testing.assert_close(layer.eval()(batches[0]), alone.eval()(batches[0]))


def test_a_rank_that_has_joined_contributes_nothing(hvd):
    batches = batches_of(hvd, (4,), [6] * 4)
    layer = hvd.SyncBatchNorm(3).double()
    if hvd.rank() > 0:
        y = layer(batches[hvd.rank()])
    hvd.join()
    if hvd.rank() > 0:
        wanted = nn.BatchNorm1d(3).double()(torch.cat(batches[1:]))
        torch.testing.assert_close(y, wanted[6 * (hvd.rank() - 1) : 6 * hvd.rank()])


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_model_normalizes_over_its_process_set(hvd, is_copied):
    sets = [hvd.add_process_set(list(range(k, hvd.size(), 2))) for k in range(2)]
    mine = next(each for each in sets if each.included())
    batches = batches_of(hvd, (4,), COUNTS)
    places = list(range(1, 1 + sum(map(len, batches))))
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), mine)
    model = (copy.deepcopy(model) if is_copied else model).double()
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=mine)
    # The other set has a further layer before this one.
    if mine is sets[1]:
        hvd.SyncBatchNorm(3, process_set=mine).double()(batches[hvd.rank()])
    start = sum(len(batches[rank]) for rank in mine.ranks if rank < hvd.rank())
    here = slice(start, start + len(batches[hvd.rank()]))
    y, of_x = forward_and_back(model, batches[hvd.rank()], places[here])
    plain = nn.BatchNorm1d(3).double()
    whole = torch.cat([batches[rank] for rank in mine.ranks])
    whole_y, whole_of_x = forward_and_back(plain, whole, places[: len(whole)])
    torch.testing.assert_close(y, whole_y[here], rtol=1e-9, atol=1e-9)
    scale = whole_of_x.abs().max().item()
    torch.testing.assert_close(of_x, whole_of_x[here], rtol=1e-9, atol=1e-9 * scale)
    torch.testing.assert_close(model[0].running_var, plain.running_var)
    assert pickle.loads(pickle.dumps(model))[0].process_set is hvd.global_process_set
    for each in sets:
        hvd.remove_process_set(each)


@pytest.mark.parametrize(("of_layer", "of_optimizer"), [("all", "set"), ("set", "all")])
def test_a_layer_that_normalizes_over_samples_of_another_model_raises(hvd, of_layer, of_optimizer):
    """Normalization over a part of the ranks that train the model is valid."""
    sets = [hvd.add_process_set(list(range(k, hvd.size(), 2))) for k in range(2)]
    used = {"all": hvd.global_process_set, "set": next(s for s in sets if s.included())}
    layer = hvd.SyncBatchNorm(3, process_set=used[of_layer])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, process_set=used[of_optimizer])
    x = torch.full((2, 3), float(hvd.rank()))
    if of_layer == "set":
        layer(x).sum().backward()
        optimizer.step()
    else:
        with pytest.raises(UsageError, match=r"over ranks \[0, 1.*over ranks \[[01].*process_set"):
            layer(x)
        assert not layer.running_mean.any()
    for each in sets:
        hvd.remove_process_set(each)


def test_a_model_is_converted(hvd):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.1, momentum=None), nn.Sequential(nn.Tanh())
    )
    model[2].append(nn.BatchNorm2d(4, affine=False).eval())
    before = model.state_dict()
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
    outer, inner = model[1], model[2][1]
    assert isinstance(outer, hvd.SyncBatchNorm)
    assert isinstance(inner, hvd.SyncBatchNorm)
    assert (outer.eps, outer.momentum, outer.training) == (0.1, None, True)
    assert (inner.affine, inner.training) == (False, False)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    alone = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4))
    assert isinstance(alone, hvd.SyncBatchNorm)


def test_wrong_shapes_are_refused(hvd):
    with pytest.raises(ValueError, match="at least 2D"):
        hvd.SyncBatchNorm(3)(torch.zeros(3))


class TwoNames(nn.Module):
    """Normalizes twice with one layer."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


CONVERTED = {"two names": TwoNames, "of PyTorch": lambda: nn.Sequential(nn.SyncBatchNorm(4))}


@pytest.mark.parametrize("make", list(CONVERTED))
def test_conversion_of_layers_that_would_stay_local(hvd, make):
    calls = []
    x = torch.randn(3 * hvd.size(), 4, generator=torch.Generator().manual_seed(0))
    reference = TwoNames() if make == "two names" else nn.BatchNorm1d(4)
    model = CONVERTED[make]()
    next(model.children()).register_forward_hook(lambda *_: calls.append(1))
    hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    output = model(x[3 * hvd.rank() : 3 * hvd.rank() + 3])
    expected = reference(x)[3 * hvd.rank() : 3 * hvd.rank() + 3]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert calls


class WithActivation(nn.BatchNorm2d):
    """A layer whose forward does more."""

    def forward(self, x):
        return super().forward(x).relu()


class OtherDefaults(nn.BatchNorm2d):
    """A layer that differs in its arguments only."""

    def __init__(self, features):
        super().__init__(features, momentum=0.01)


def test_conversion_refuses_layers_that_it_would_change(hvd):
    convert = hvd.SyncBatchNorm.convert_sync_batchnorm
    weighted = nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(3), "weight", dim=None)
    for layer, text in (
        (WithActivation(3), "WithActivation '1' has a forward"),
        (nn.LazyBatchNorm2d(), "LazyBatchNorm2d '1' is not initialised"),
        (weighted, "parametrization"),
    ):
        model = nn.Sequential(nn.BatchNorm2d(3), layer)
        with pytest.raises(UsageError, match=text):
            convert(model)
        assert type(model[0]) is nn.BatchNorm2d
    assert convert(OtherDefaults(4)).momentum == 0.01
