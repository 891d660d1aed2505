"""`hvd.GradientNoiseScale`: measure which batch size is worthwhile."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.errors import UsageError
from hvdkit.torch.amp import loss_scale
from hvdkit.torch.reduction.last_stages import Measure, norm_of
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer, wrapped
from hvdkit.training.noise_scale import Average, estimate

#: The optimizers with a `GradientNoiseScale` that is not closed.
_measured: weakref.WeakSet[WrappedOptimizer] = weakref.WeakSet()


class GradientNoiseScale:
    """Measure the gradient noise scale of McCandlish et al. (arXiv:1812.06162, appendix A.1).

    The measurement compares the gradients of each rank with their mean over the ranks. A batch that
    is much smaller than the scale wastes few samples. A batch that is much larger than the scale
    wastes many. See docs/performance.md.

    Every rank makes a `GradientNoiseScale`, after the optimizer, with the same arguments. In a
    measured step, all gradients are read twice, and three numbers are summed over the ranks.

    A step is not measured if a rank waits in `hvd.join()` or makes no backward pass, because the
    mean gradient then has fewer batches. Nor is a step measured whose gradients are reduced several
    times.

    Args:
        optimizer: a result of `hvd.DistributedOptimizer` with the mean over the ranks, and without
            accumulation.
        samples: the samples of each rank in a step, the same on all ranks. They include those of
            passes under `hvd.no_sync`.
        every: steps from one measured step to the next.
        decay: the weight of earlier measurements in the average, at least 0 and below 1.

    Raises:
        UsageError: an argument is invalid, there is only one rank, or the optimizer has another
            `GradientNoiseScale`.

    Example:
        noise = hvd.GradientNoiseScale(optimizer, samples=32)
        for x, y in loader:
            ...
            optimizer.step()
            monitor.step({"loss": loss, "noise scale": noise.scale or 0.0})
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        samples: int,
        every: int = 10,
        decay: float = 0.95,
    ) -> None:
        own = wrapped(optimizer)
        for name, value in (("samples", samples), ("every", every)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r}: expected a whole number >= 1")
        if not 0 <= decay < 1:
            raise UsageError(f"decay is {decay!r}: expected a number >= 0 and < 1")
        if own.op != mpi_ops.Average or own.reducer.window.size != 1:
            raise UsageError(
                "the noise scale needs the mean gradient of one pass per step: expected an "
                "optimizer with op=hvd.Average, and without accumulation"
            )
        ranks = own.process_set.size() if own.process_set.included() else 1
        if ranks is None or ranks < 2:
            raise UsageError(
                "the noise scale compares the gradients of ranks, and there is only one: start the "
                "job with two ranks or more"
            )
        if own in _measured:
            raise UsageError(
                "the optimizer has a GradientNoiseScale already: expected one per optimizer. Use "
                "that one, or call its close() first"
            )
        self._samples, self._every = samples, every
        self._average = Average(decay)
        self._process_set = own.process_set
        # A weak reference, because the optimizer holds the hook: a strong one would be a cycle.
        self._optimizer = weakref.ref(own)
        self._hook = own.register_step_pre_hook(self._before_step)
        _measured.add(own)
        #: What is read of the gradients of the next step; None in a step that is not measured.
        self._reading: _Reading | None = _Reading(own)

    @property
    def measured(self) -> int:
        """The number of measured steps."""
        return self._average.steps

    @property
    def scale(self) -> float | None:
        """The noise scale in samples; None until the mean estimates make it positive."""
        return self._average.scale

    @property
    def signal(self) -> float | None:
        """The mean estimate of the squared norm of the true gradient; None before the first."""
        mean = self._average.mean
        return None if mean is None else mean.signal

    @property
    def noise(self) -> float | None:
        """The mean estimate of the trace of the covariance of single samples' gradients.

        None before the first estimate.
        """
        mean = self._average.mean
        return None if mean is None else mean.noise

    def close(self) -> None:
        """Stop measuring. Every rank must call this after the same step."""
        self._hook.remove()
        self._take()
        optimizer = self._optimizer()
        if optimizer is not None:
            _measured.discard(optimizer)

    def _take(self) -> tuple[float, float] | None:
        """End the reading, and return its result."""
        reading, self._reading = self._reading, None
        if reading is None:
            return None
        reading.end()
        return reading.squares()

    def _before_step(self, *_: Any) -> None:
        """Hook before the plain optimizer's step."""
        optimizer = self._optimizer()
        assert optimizer is not None
        # It begins at 0 again after `init` and `join`, because ranks may have counted differently.
        step = optimizer.reducer.rounds.position.step
        found = self._take()
        if (step + 1) % self._every == 0:
            self._reading = _Reading(optimizer)
        if step % self._every:
            return
        # On the CPU on all ranks: a rank without gradients has no device.
        own = torch.tensor(
            [*(found or (0.0, 0.0)), found is not None], dtype=torch.float64, device="cpu"
        )
        small, large, count = mpi_ops.allreduce(
            own, name="hvdkit.noise_scale", op=mpi_ops.Sum, process_set=self._process_set
        ).tolist()
        # A rank in `join` adds zeros.
        ranks = self._process_set.size() or 1
        if count == ranks > 1 and math.isfinite(small + large):
            whole = self._samples * ranks
            divisor = ranks * (loss_scale([optimizer]) or 1.0) ** 2
            new = estimate(small / divisor, large / divisor, self._samples, whole)
            self._average = self._average.after(new)


class _Reading:
    """Read the gradients of one step, before and after they are reduced.

    Args:
        optimizer: the optimizer, before the backward pass of the step.
    """

    def __init__(self, optimizer: WrappedOptimizer) -> None:
        # The squared norm of each of this rank's gradients before the reduction. A gradient may
        # arrive several times before its round: after `no_sync`, in re-entrant checkpoints, and
        # after a backward pass that raised. The last value is the gradient that is reduced.
        self._small: dict[torch.Tensor, torch.Tensor] = {}
        # For each round, the squared norm of all reduced gradients, before they are clipped.
        self._large: list[torch.Tensor] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._add)
            for parameter in optimizer.reducer.parameters()
            if parameter.requires_grad
        ]
        self._stage = Measure(lambda gradients: self._large.append(_sum(map(_square, gradients))))
        self._stages = optimizer.reducer.gradients.stages
        self._stages.insert(0, self._stage)

    def end(self) -> None:
        """Stop reading."""
        for hook in self._hooks:
            hook.remove()
        self._stages.remove(self._stage)

    def squares(self) -> tuple[float, float] | None:
        """Return the squared norms of this rank's gradients and of the reduced ones.

        None if this rank made no pass, or if there were no or several rounds.
        """
        if not self._small or len(self._large) != 1:
            return None
        return float(_sum(self._small.values())), float(self._large[0])

    def _add(self, parameter: torch.Tensor) -> None:
        """Hook when the gradient of this rank is complete."""
        if parameter.grad is not None:
            self._small[parameter] = _square(parameter.grad)


@torch.no_grad()
def _square(gradient: torch.Tensor) -> torch.Tensor:
    return norm_of([gradient]).double() ** 2


def _sum(values: Iterable[torch.Tensor]) -> torch.Tensor:
    found = list(values)
    if not found:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([each.to(found[0].device) for each in found]).sum()
