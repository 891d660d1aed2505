"""The gradient noise scale: which batch size is worthwhile.

McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162. G is the true
gradient, and S the covariance of the gradients of single samples. The gradient of a batch of B
samples has an expected squared norm of |G|^2 + tr(S) / B. So the gradients of a small and of a
large batch give unbiased estimates of |G|^2 and tr(S) (appendix A.1). Their ratio is not unbiased,
so the two are averaged separately.
"""

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


class Average:
    """The exponential moving average of estimates, without the bias of its beginning.

    Args:
        decay: the weight of the earlier estimates, at least 0 and below 1.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._signal = self._noise = self._weight = 0.0

    def add(self, new: Estimate) -> None:
        """Add the estimates of a step."""
        keep = self._decay
        self._signal = keep * self._signal + (1 - keep) * new.signal
        self._noise = keep * self._noise + (1 - keep) * new.noise
        self._weight = keep * self._weight + (1 - keep)

    @property
    def mean(self) -> Estimate | None:
        """The mean estimates; None without any."""
        if not self._weight:
            return None
        return Estimate(self._signal / self._weight, self._noise / self._weight)

    @property
    def scale(self) -> float | None:
        """The noise scale tr(S) / |G|^2 in samples; None if it is not known yet."""
        mean = self.mean
        if mean is None or mean.signal <= 0 or mean.noise < 0:
            return None
        return mean.noise / mean.signal
