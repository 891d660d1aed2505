"""Learning-rate schedules as pure functions of the step, the same for every framework."""

import math
from dataclasses import dataclass

from hvdkit.errors import UsageError


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up to a scaled peak, then half a cosine down to zero.

    With n ranks, a step uses n times as much data as with one rank, so an epoch has n times fewer
    steps. The linear scaling rule makes the rate n times as large, and needs a warm-up (Goyal et
    al., arXiv:1706.02677). The cosine is from Loshchilov and Hutter, without restarts
    (arXiv:1608.03983).

    Attributes:
        base_lr: the rate for one rank.
        total_steps: the number of steps of the whole training.
        warmup_steps: the number of steps until the peak rate is reached.
        scale: peak rate / `base_lr`, usually the number of ranks.

    Raises:
        UsageError: a value is out of range.

    Example:
        schedule = WarmupCosine(base_lr=0.05, total_steps=1000, warmup_steps=100, scale=hvd.size())
        for step in range(schedule.total_steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
    """

    base_lr: float
    total_steps: int
    warmup_steps: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.base_lr > 0 and math.isfinite(self.base_lr)):
            raise UsageError(f"base_lr is {self.base_lr}: expected a finite number above 0")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise UsageError(f"scale is {self.scale}: expected a finite number above 0")
        if self.total_steps < 1:
            raise UsageError(f"total_steps is {self.total_steps}: expected at least 1")
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise UsageError(
                f"warmup_steps is {self.warmup_steps}: expected 0 to total_steps, "
                f"{self.total_steps}"
            )

    @property
    def peak_lr(self) -> float:
        """The rate at the end of the warm-up."""
        return self.base_lr * self.scale

    def __call__(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0; zero from `total_steps` on."""
        if step < 0:
            raise UsageError(f"step is {step}: expected 0 or more")
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if step >= self.total_steps:
            return 0.0
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.peak_lr * 0.5 * (1.0 + math.cos(math.pi * done))
