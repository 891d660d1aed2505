"""`Monitor` for PyTorch."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from horovod.torch import mpi_ops

from hvdkit.agreement.collectives import check_member, check_process_set
from hvdkit.errors import UsageError
from hvdkit.monitor import Logger, metrics
from hvdkit.monitor.framework import as_float
from hvdkit.monitor.monitor import BaseMonitor
from hvdkit.runtime.counters import counters
from hvdkit.torch.amp import loss_scale
from hvdkit.torch.collectives import TorchCollectives
from hvdkit.torch.reduction.backward_passes import coordinator_of
from hvdkit.torch.reduction.last_stages import norm_of
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer, wrapped_optimizers


class Monitor(BaseMonitor):
    """Measure a training loop on all ranks, and write a record every few steps.

    Every rank makes one, after the optimizers, and calls `step` after each step of the optimizer.
    Only the first rank writes. A record has the mean, the minimum and the maximum over the ranks,
    and the slowest rank. See docs/monitoring.md for the metrics.

    Args:
        loggers: where to write, see `hvdkit.monitor`. Default: `ConsoleLogger()`.
        every: steps per record. A record covers all of these steps.
        grad_norm: in steps with a record, compute the norm of the reduced gradients. This reads all
            gradients once. If the script calls `hvd.clip_grad_norm_`, records have the norm without
            this argument, too.
        process_set: the ranks that train together.

    Raises:
        UsageError: an argument is invalid.
        RankMismatchError: on every rank, if the arguments differ between ranks.
        HvdkitError: on every rank, if a logger cannot be opened on the first rank.

    Example:
        with hvd.Monitor([ConsoleLogger(), JSONLLogger("run/metrics.jsonl")]) as monitor:
            for x, y in monitor.batches(loader):
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                monitor.step({"loss": loss}, samples=len(x))
    """

    def __init__(
        self,
        loggers: Sequence[Logger] | None = None,
        *,
        every: int = 10,
        grad_norm: bool = False,
        process_set: mpi_ops.ProcessSet = mpi_ops.global_process_set,
    ) -> None:
        if not mpi_ops.is_initialized():
            raise UsageError("Horovod is not initialised: call hvd.init() before this")
        check_process_set(process_set)
        check_member(process_set)
        framework = _Torch(process_set)
        super().__init__(TorchCollectives(process_set), framework, loggers, every)
        if grad_norm:
            hook = functools.partial(_compute_norm, weakref.ref(self))
            for optimizer in framework.optimizers():
                optimizer.register_step_pre_hook(hook)


def _compute_norm(
    reference: "weakref.ref[Monitor]", optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    """Hook before the plain optimizer's step. The gradients are reduced already."""
    monitor = reference()
    if (
        monitor is None
        or not monitor.reports_after(1)
        or not isinstance(optimizer, WrappedOptimizer)
    ):
        return
    if optimizer.grad_norm is None:
        # Not those of `param_groups`, which are shares now if the optimizer is sharded.
        parameters = [each.parameter for each in optimizer.reducer.gradients.records.values()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        optimizer.grad_norm = norm_of(gradients) if gradients else None


def scalar(value: Any) -> Any:
    """Return a value of the user as a float, or as a tensor without dimensions.

    Raises:
        UsageError: it is not a number.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(
                f"a metric is a tensor of shape {list(value.shape)} and dtype {value.dtype}: "
                f"expected one real number. Pass its mean(), for instance"
            )
        # A copy, because the script may change the tensor later.
        return value.detach().clone().reshape(())
    return as_float(value)


def numbers(values: Sequence[Any]) -> list[float]:
    """Return results of `scalar` as floats, with one copy from each device."""
    found = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
    by_device: dict[torch.device, list[int]] = {}
    for k, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(k)
    for places in by_device.values():
        together = torch.stack([values[k].to(torch.float32) for k in places])
        for k, number in zip(places, together.tolist(), strict=True):
            found[k] = number
    return found


def totals() -> dict[str, float]:
    """Return the counters of the gradient synchronizers."""
    return {
        metrics.PAYLOAD: float(counters.payload_bytes),
        metrics.OVERFLOWS: float(counters.overflows),
    }


def memory() -> dict[str, float]:
    """Return the bytes of tensors on this rank's GPU; empty if this process uses no GPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    return {
        metrics.ALLOCATED: float(torch.cuda.memory_allocated()),
        metrics.PEAK_ALLOCATED: float(torch.cuda.max_memory_allocated()),
    }


def gpu() -> str | None:
    """Return the UUID of this rank's GPU.

    None if this process uses no GPU, or if PyTorch is too old to report the UUID.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


class _Torch:
    """`hvdkit.monitor.framework.Framework` for PyTorch."""

    name = f"torch {torch.__version__}"
    scalar = staticmethod(scalar)
    numbers = staticmethod(numbers)
    gpu = staticmethod(gpu)

    def __init__(self, process_set: mpi_ops.ProcessSet) -> None:
        self._process_set = process_set
        self._times = coordinator_of(process_set).times

    def optimizers(self) -> list[WrappedOptimizer]:
        """Return the optimizers of these ranks."""
        return [each for each in wrapped_optimizers() if each.process_set is self._process_set]

    def section_seconds(self) -> Mapping[str, float]:
        return self._times.totals()

    def forward_began(self) -> float:
        return self._times.forward_began

    def pause(self) -> None:
        self._times.stop()

    def resume(self) -> None:
        self._times.start()

    def totals(self) -> Mapping[str, float]:
        skipped = sum(each.hvdkit_skipped_steps for each in self.optimizers())
        return {**totals(), metrics.SKIPPED: float(skipped)}

    def gauges(self) -> Mapping[str, float]:
        values = memory()
        optimizers = self.optimizers()
        if optimizers:
            values[metrics.LR] = float(optimizers[0].param_groups[0]["lr"])
        norms = [each.grad_norm for each in optimizers if each.grad_norm is not None]
        for each in optimizers:
            each.grad_norm = None
        if norms:
            # Optimizers that were clipped together share the tensor.
            distinct = list({id(norm): norm for norm in norms}.values())
            values[metrics.GRAD_NORM] = sum(n**2 for n in numbers(distinct)) ** 0.5
        scale = loss_scale(optimizers)
        if scale is not None:
            values[metrics.LOSS_SCALE] = scale
        return values
