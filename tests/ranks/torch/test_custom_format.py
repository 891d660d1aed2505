"""The wire format in docs/synchronizer.md, run from the guide."""

import re

import pytest
import torch

from tests.ranks.rank_pool import REPOSITORY
from tests.ranks.torch.oracle import DEVICE, Twins, adamw, on_all_ranks

pytestmark = pytest.mark.device

COUNT = 1001


def fixed_point():
    """Return the guide's format."""
    guide = (REPOSITORY / "docs" / "synchronizer.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", guide, re.S) if "(WireFormat)" in b)
    names = {}
    exec(block, names)
    return names["FixedPoint"]()


def gradients_of(rank, dtype, scale):
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(COUNT, generator=generator, dtype=torch.float64) * scale
    return values.to(DEVICE, dtype)


def reduced(hvd, gradient, compression, op=None):
    """Reduce one gradient in two steps, as a bucket of two parameters; return the second result."""
    dtype = gradient.dtype
    parameters = [
        torch.nn.Parameter(torch.zeros(size, dtype=dtype, device=DEVICE))
        for size in ((COUNT - 1,), ())
    ]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.0), compression=compression, op=op or hvd.Average
    )
    for _ in range(2):
        optimizer.zero_grad()
        loss = (parameters[0] * gradient[:-1]).sum() + parameters[1] * gradient[-1]
        loss.backward()
        optimizer.step()
    return torch.cat([p.grad.reshape(-1) for p in parameters]).cpu()


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_is_as_precise_as_the_guide_says(hvd, dtype, scale):
    n = hvd.size()
    everyone = [gradients_of(rank, dtype, scale).double().cpu() for rank in range(n)]
    mean = reduced(hvd, gradients_of(hvd.rank(), dtype, scale), fixed_point())
    largest = max(float(g.abs().max()) for g in everyone)
    # Rounded to a step before the sum, and to the gradients' dtype after it.
    bound = largest * (4 * n / 2**30 / 2 + 2 * torch.finfo(dtype).eps)
    assert float((mean.double() - sum(everyone) / n).abs().max()) <= bound


def test_the_sum_does_not_depend_on_the_order_of_the_ranks(hvd):
    results = [
        reduced(
            hvd,
            gradients_of((hvd.rank() + shift) % hvd.size(), torch.float32, 1.0),
            fixed_point(),
            hvd.Sum,
        )
        for shift in range(hvd.size())
    ]
    for result in results[1:]:
        assert torch.equal(result, results[0])
    assert len(set(on_all_ranks(hvd, results[0].numpy().tobytes()))) == 1


@pytest.mark.device(ranks=2)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_gradients_out_of_range_are_sent_as_they_are(hvd, value):
    gradient = gradients_of(hvd.rank(), torch.float32, 1.0)
    if hvd.rank() == 1:
        gradient[3] = value
    mean = reduced(hvd, gradient, fixed_point())
    torch.testing.assert_close(mean[3], torch.tensor(value / hvd.size()), equal_nan=True)
    everyone = [gradients_of(rank, torch.float32, 1.0).cpu() for rank in range(hvd.size())]
    torch.testing.assert_close(mean[:3], (sum(everyone) / hvd.size())[:3])


def test_a_training_equals_that_of_one_process(hvd):
    twins = Twins(hvd, adamw, accumulation_steps=2, compression=fixed_point())
    twins.train(*range(10), clip=1.0)
    twins.check(1e-6)


def test_other_dtypes_are_sent_as_they_are(hvd):
    gradient = torch.full((COUNT,), hvd.rank() + 1.0, dtype=torch.bfloat16, device=DEVICE)
    mean = reduced(hvd, gradient, fixed_point())
    assert (mean == (hvd.size() + 1) / 2).all()
