"""A rank whose passes sleep for a given time instead of computing.

The ranks need no cores for their passes, so a job can have more ranks than cores, and each pass
still takes the given time. The reduction is real. `benchmarks.rehearsal` starts these
ranks.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from hvdkit.bench.step.torch_rank import Framework
from hvdkit.bench.worker import Workload


def build(spec: Mapping[str, Any]) -> Workload:
    """Return the work of this rank.

    Args:
        spec: the settings of `torch_rank.Framework`, and `elements` (the number of elements of each
            layer), `forward` and `backward` (the seconds of the passes).
    """
    return TimedSteps(spec)


class _SleepingLayer(torch.autograd.Function):
    """A layer that sleeps, and whose gradient is 1."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward: float, backward: float
    ) -> torch.Tensor:
        """Sleep for `forward` seconds."""
        ctx.backward_seconds, ctx.shape = backward, weight.shape
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Sleep, and return the gradients."""
        time.sleep(ctx.backward_seconds)
        return grad, torch.ones(ctx.shape), None, None


class TimedSteps:
    """A `worker.Workload`: steps of sleeping layers."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        framework = Framework(spec)
        self._framework = framework
        elements = spec["elements"]
        module = torch.nn.ParameterList(torch.zeros(count) for count in elements)
        self._parameters = list(module)
        self._forward = spec["forward"] / len(elements)
        self._backward = spec["backward"] / len(elements)
        self._wrapped = framework.wrap(module, torch.optim.SGD(self._parameters, lr=0.0))

    def facts(self) -> dict[str, Any]:
        """Return the number and the bytes of the gradients."""
        size = sum(p.numel() * p.element_size() for p in self._parameters)
        return {"parameters": len(self._parameters), "bytes": size}

    def answer(self, command: str, message: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Make a step, and return its seconds without those of the update."""
        began = time.perf_counter()
        x = torch.ones(1, requires_grad=True)
        for weight in self._parameters:
            x = _SleepingLayer.apply(x, weight, self._forward, self._backward)
        self._wrapped.backward(x.sum(), True)
        seconds = time.perf_counter() - began
        # The update is not timed: it computes, and ranks that share cores slow each other down.
        with self._wrapped.updating():
            self._wrapped.optimizer.step()
        self._wrapped.optimizer.zero_grad()
        return {"seconds": seconds}

    def close(self) -> None:
        """Leave the job."""
        self._framework.close()
