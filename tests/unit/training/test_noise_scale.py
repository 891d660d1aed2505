"""The noise scale of gradients, from random samples of known mean and covariance."""

import numpy as np
import pytest

from hvdkit.training.noise_scale import Average, Estimate, estimate


def test_the_estimates_are_unbiased():
    """Gradients of single samples have the mean `true`, and independent components."""
    generator = np.random.default_rng(0)
    true, spread = np.array([0.3, -0.2, 0.1]), np.array([1.0, 2.0, 0.5])
    average = Average(decay=0.0)
    estimates = []
    for _ in range(4000):
        batches = true + spread * generator.normal(size=(4, 8, 3))  # four ranks, eight samples
        gradients = batches.mean(1)
        small = (gradients**2).sum(1).mean()
        large = (gradients.mean(0) ** 2).sum()
        estimates.append(estimate(small, large, 8, 32))
        average = average.after(estimates[-1])
    signal = np.mean([each.signal for each in estimates])
    noise = np.mean([each.noise for each in estimates])
    assert signal == pytest.approx((true**2).sum(), rel=0.1)
    assert noise == pytest.approx((spread**2).sum(), rel=0.02)
    # Single estimates of the signal may be negative. Then there is no scale.
    assert min(each.signal for each in estimates) < 0


def test_the_average_has_no_bias_at_its_beginning():
    average = Average(decay=0.9)
    assert average.scale is None
    average = average.after(Estimate(2.0, 6.0))
    assert average.scale == pytest.approx(3.0)
    average = average.after(Estimate(2.0, 6.0))
    assert average.scale == pytest.approx(3.0)
    average = average.after(Estimate(-100.0, 6.0))
    assert average.scale is None
