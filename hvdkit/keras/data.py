"""Samplers whose epochs `fit` counts."""

from typing import Any
from weakref import WeakSet

from hvdkit.keras import backend

_samplers: WeakSet[Any] = WeakSet()


class ResumableSampler(backend.hvd.ResumableSampler):
    """The framework's, whose epochs `fit` counts.

    On PyTorch for a `DataLoader`, on TensorFlow for what `dataset()` gives. Batches are counted by
    the `hvd.callbacks.Checkpoint` that has it as `data`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _samplers.add(self)


def forget_reads() -> None:
    """What was read until now, to look at a batch or by a loop that was broken off, is no epoch."""
    for sampler in samplers_read():
        sampler.uncounted = False


def samplers_read() -> list[ResumableSampler]:
    """The samplers whose samples somebody reads, and nobody counts."""
    return [sampler for sampler in _samplers if sampler.uncounted]


def any_samplers() -> bool:
    """Whether there are samplers at all."""
    return len(_samplers) > 0
