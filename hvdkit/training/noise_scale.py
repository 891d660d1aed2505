"""The gradient noise scale: which batch size is worthwhile.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162. G is the true
gradient, and S the covariance of the gradients of single samples. The gradient of a batch of B
samples has an expected squared norm of |G|^2 + tr(S) / B. So the gradients of a small and of a
large batch give unbiased estimates of |G|^2 and tr(S) (appendix A.1). Their ratio is not unbiased,
so the two are averaged separately.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


def estimate(small: float, large: float, small_batch: float, large_batch: float) -> "Estimate":
    """Return the estimates from one step.

    Args:
        small: the squared norm of the gradient of a small batch; the mean, if there are several.
        large: the squared norm of the gradient of the large batch.
        small_batch: samples in a small batch.
        large_batch: samples in the large batch.
    """
    difference = large_batch - small_batch
    signal = (large_batch * large - small_batch * small) / difference
    noise = (small - large) * small_batch * large_batch / difference
    return Estimate(signal, noise)


@dataclass(frozen=True)
class Estimate:
    """Estimates of |G|^2 and of tr(S). Those of a single step may be negative.

    Attributes:
        signal: the squared norm of the true gradient.
        noise: the trace of the covariance of the gradients of single samples.
    """

    signal: float
    noise: float


@dataclass(frozen=True)
class Average:
    """The exponential moving average of estimates, without the bias of its beginning.

    Attributes:
        decay: the weight of the earlier estimates, at least 0 and below 1.
        steps: the number of estimates.
        weighted: their weighted sum.
    """

    decay: float
    steps: int = 0
    weighted: Estimate = Estimate(0.0, 0.0)

    def after(self, new: Estimate) -> "Average":
        """Return the average with the estimates of a further step."""
        keep = self.decay
        signal = keep * self.weighted.signal + (1 - keep) * new.signal
        noise = keep * self.weighted.noise + (1 - keep) * new.noise
        return Average(keep, self.steps + 1, Estimate(signal, noise))

    @property
    def mean(self) -> Estimate | None:
        """The mean estimates; None without any."""
        if not self.steps:
            return None
        weight = 1 - self.decay**self.steps
        return Estimate(self.weighted.signal / weight, self.weighted.noise / weight)

    @property
    def scale(self) -> float | None:
        """The noise scale tr(S) / |G|^2 in samples; None if it is not known yet."""
        mean = self.mean
        if mean is None or mean.signal <= 0 or mean.noise < 0:
            return None
        return mean.noise / mean.signal


def learning_rate_factor(scale: float, batch: float, new_batch: float) -> float:
    """Return the factor for the learning rate of SGD if the batch changes.

    The best learning rate is proportional to 1 / (1 + scale / batch) (McCandlish et al., section
    2.2). It grows in proportion to a batch that is much smaller than the noise scale.

    Args:
        scale: the noise scale in samples.
        batch: the samples in a step, of all ranks, for which the learning rate is good.
        new_batch: the new number of samples.
    """
    return (1 + scale / batch) / (1 + scale / new_batch)


def steps_factor(scale: float, batch: float, new_batch: float) -> float:
    """Return the factor for the number of steps to the same loss if the batch changes.

    Each step reduces the loss by an amount in proportion to 1 / (1 + scale / batch) (section 2.2).

    Args:
        scale: see `learning_rate_factor`.
        batch: see `learning_rate_factor`.
        new_batch: see `learning_rate_factor`.
    """
    return 1 / learning_rate_factor(scale, batch, new_batch)


def confidence(blocks: Sequence[Estimate]) -> tuple[float, float] | None:
    """Return an interval that contains the noise scale with a probability of about 95 %.

    It is the jackknife's: the noise scale is computed without each of the blocks in turn. The
    interval is that of the logarithm, plus and minus two standard errors.

    Args:
        blocks: the sums of the estimates of consecutive steps, of equal numbers of steps.

    Returns:
        None if there are fewer than five blocks, or if an estimate without one of the blocks is
        not positive.
    """
    count = len(blocks)
    if count < 5:
        return None
    signal, noise = sum(b.signal for b in blocks), sum(b.noise for b in blocks)
    others = [(signal - b.signal, noise - b.noise) for b in blocks]
    if signal <= 0 or noise <= 0 or any(s <= 0 or n <= 0 for s, n in others):
        return None
    logarithms = [math.log(n / s) for s, n in others]
    mean = sum(logarithms) / count
    variance = (count - 1) / count * sum((each - mean) ** 2 for each in logarithms)
    width = math.exp(2 * math.sqrt(variance))
    return noise / signal / width, noise / signal * width
