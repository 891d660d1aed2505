"""PyTorch's gradients and buckets on simulated ranks. Only the collectives are simulated."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdkit.torch.reduction.backend import TorchBackend
from tests.simulated.ranks import InFlight


def ring_sum(buffers: Sequence[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """Return the sum as in a ring, times `factor`: part k starts at rank k, every hop rounds."""
    stack = torch.stack([*buffers])
    count, elements = stack.shape
    columns = torch.arange(elements)
    start = columns * count // max(elements, 1)
    total = stack[start, columns]
    for hop in range(1, count):
        total = total + stack[(start + hop) % count, columns]
    return total if factor == 1.0 else total * factor


class SimulatedBackend(TorchBackend):
    """A backend whose collectives are those of simulated ranks.

    Attributes:
        diary: the names of the collectives, in order.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.diary: list[str] = []

    def _begin(self, value: Any, name: str, finish: Callable[..., Any]) -> InFlight:
        collectives: Any = self._collectives
        self.diary.append(name)
        return collectives.group.begin(collectives.rank, name, value, finish)

    def sum(self, buffer, name, factor):
        return self._begin(buffer, name, functools.partial(_sum_in_place, factor))

    def gather(self, rows, name):
        return self._begin(rows, name, _gather)

    def wait(self, handle):
        collectives: Any = self._collectives
        return collectives.group.wait(handle)


@torch.no_grad()
def _sum_in_place(factor: float, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    total = ring_sum(buffers, factor)
    for buffer in buffers:
        buffer.copy_(total)
    return buffers


@torch.no_grad()
def _gather(all_rows: list[Any]) -> list[Any]:
    indices, values = (torch.cat(parts) for parts in zip(*all_rows, strict=True))
    return [(indices.clone(), values.clone()) for _ in all_rows]
