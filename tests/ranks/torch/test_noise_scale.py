"""`hvd.GradientNoiseScale` on a linear regression, whose noise scale is known."""

import pytest
import torch

from hvdkit.errors import UsageError

FEATURES, SAMPLES = 10, 16
NOISE = 0.5  # the standard deviation of the targets


def regression(hvd, **options):
    """Return a model at a fixed distance from the true weights, and its optimizer."""
    model = torch.nn.Linear(FEATURES, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def batches(hvd, count):
    """Yield batches of this rank. The true weights are zero."""
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(count):
        x = torch.randn(SAMPLES, FEATURES, generator=generator)
        yield x, NOISE * torch.randn(SAMPLES, 1, generator=generator)


@pytest.mark.parametrize("compression", ["none", pytest.param("fp16", marks=pytest.mark.long)])
def test_the_scale_of_a_linear_regression(hvd, compression):
    """The gradient of a sample is x (x.d - e), with the weights' distance d and the noise e.

    So G = d, and tr(S) = (n + 1) |d|^2 + n NOISE^2 for n features of variance 1.
    """
    model, optimizer = regression(hvd, compression=compression)
    noise = hvd.GradientNoiseScale(optimizer, samples=SAMPLES, every=1, decay=0.998)
    steps = 200
    for x, y in batches(hvd, steps):
        optimizer.zero_grad()
        (0.5 * (model(x) - y).square().mean()).backward()
        hvd.clip_grad_norm_(optimizer, 1e-3)  # it must not matter
        optimizer.step()
    signal = FEATURES * 0.1**2
    trace = (FEATURES + 1) * signal + FEATURES * NOISE**2
    assert noise.measured == steps
    assert noise.signal == pytest.approx(signal, rel=0.15)
    assert noise.noise == pytest.approx(trace, rel=0.1)
    assert noise.scale == pytest.approx(trace / signal, rel=0.25)
    # The same bits on all ranks.
    assert len(set(hvd.allgather_object(noise.scale))) == 1
    noise.close()


def test_only_some_steps_are_measured(hvd):
    model, optimizer = regression(hvd)
    noise = hvd.GradientNoiseScale(optimizer, samples=SAMPLES, every=3)
    watched = []
    for x, y in batches(hvd, 7):
        optimizer.zero_grad()
        watched.append(bool(model.weight._post_accumulate_grad_hooks) and bool(noise._reading))
        (0.5 * (model(x) - y).square().mean()).backward()
        optimizer.step()
    assert watched == [True, False, False, True, False, False, True]
    assert noise.measured == 3
    noise.close()
    assert not noise._reading


def test_a_step_with_two_passes_is_left_out(hvd):
    model, optimizer = regression(hvd)
    noise = hvd.GradientNoiseScale(optimizer, samples=SAMPLES, every=1)
    for step, (x, y) in enumerate(batches(hvd, 4)):
        optimizer.zero_grad()
        for _ in range(1 + step % 2):
            (0.5 * (model(x) - y).square().mean()).backward()
        optimizer.step()
    assert noise.measured == 2
    noise.close()


def test_ranks_that_join_or_make_no_pass(hvd):
    """Such steps are not measured, and all ranks measure the same steps after them."""
    model, optimizer = regression(hvd)
    noise = hvd.GradientNoiseScale(optimizer, samples=SAMPLES, every=2)

    def train(x, y):
        optimizer.zero_grad()
        if x is not None:
            (0.5 * (model(x) - y).square().mean()).backward()
        optimizer.step()

    # With `every=2`, ranks would count differently after an odd number of steps.
    for x, y in batches(hvd, 4 if hvd.rank() == 0 else 1):
        train(x, y)
    hvd.join()
    assert noise.measured == 1
    # In the first step only one rank has read its gradients.
    for x, y in batches(hvd, 3):
        train(x, y)
    assert noise.measured == 2
    assert len(set(hvd.allgather_object(noise.signal))) == 1
    for x, y in batches(hvd, 1):
        train(x, y)
        train(*(x, y) if hvd.rank() else (None, None))
    assert noise.measured == 2
    noise.close()


def test_two_passes_without_a_reduction_between_them(hvd):
    """The sum of both is one gradient of this rank."""
    measured = []
    for together in (False, True):
        model, optimizer = regression(hvd)
        noise = hvd.GradientNoiseScale(optimizer, samples=2 * SAMPLES, every=1)
        for x, y in batches(hvd, 20):
            optimizer.zero_grad()
            first, second = (0.25 * (model(a) - y).square().mean() for a in (x, -x))
            if together:
                (first + second).backward()
            else:
                with hvd.no_sync(optimizer):
                    first.backward()
                second.backward()
            optimizer.step()
        measured.append((noise.measured, noise.signal, noise.noise))
        noise.close()
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)


@pytest.mark.parametrize("of", ["hvdkit", "torch"])
def test_a_loss_scaler(hvd, of):
    """The estimates are those of the gradients without the loss scale."""
    make = hvd.GradScaler if of == "hvdkit" else torch.amp.GradScaler
    measured, scalers = [], []
    for scaled in (False, True, True):
        model, optimizer = regression(hvd)
        scaler = make("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)
        scalers.append(scaler)
        noise = hvd.GradientNoiseScale(optimizer, samples=SAMPLES, every=1)
        for x, y in batches(hvd, 6):
            optimizer.zero_grad()
            scaler.scale(0.5 * (model(x) - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        measured.append((noise.measured, noise.signal, noise.noise))
        noise.close()
    for each in measured[1:]:
        assert each == pytest.approx(measured[0], rel=1e-4)


def test_invalid_arguments(hvd):
    _, optimizer = regression(hvd)
    for options, text in [
        ({"samples": 0}, "samples is 0: expected a whole number >= 1"),
        ({"samples": 4, "every": 0}, "every is 0"),
        ({"samples": 4, "decay": 1.0}, "decay is 1.0"),
    ]:
        with pytest.raises(UsageError, match=text):
            hvd.GradientNoiseScale(optimizer, **options)
    for options in ({"op": hvd.Sum}, {"accumulation_steps": 2}):
        with pytest.raises(UsageError, match="needs the mean gradient of one pass per step"):
            hvd.GradientNoiseScale(regression(hvd, **options)[1], samples=4)


def test_one_measurement_for_each_optimizer(hvd):
    _, optimizer = regression(hvd)
    first = hvd.GradientNoiseScale(optimizer, samples=4)
    with pytest.raises(UsageError, match="has a GradientNoiseScale already"):
        hvd.GradientNoiseScale(optimizer, samples=4)
    first.close()
    hvd.GradientNoiseScale(optimizer, samples=4).close()
