"""`hvd.ResumableSampler` for Keras, and the samplers whose epochs `fit` counts."""

from typing import Any
from weakref import WeakSet

from hvdkit.keras import backend

_samplers: WeakSet[Any] = WeakSet()


class ResumableSampler(backend.hvd.ResumableSampler):
    """The backend's `ResumableSampler`; `fit` counts its epochs.

    Use it in a `DataLoader` on PyTorch, and with its `dataset()` on TensorFlow. A
    `hvd.callbacks.Checkpoint` with `data=sampler` counts its batches.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _samplers.add(self)


def forget_reads() -> None:
    """Do not count earlier reads as an epoch, such as a look at a batch or an aborted loop."""
    for sampler in samplers_read():
        sampler.uncounted = False


def samplers_read() -> list[ResumableSampler]:
    """Return the samplers with samples that were read and not counted."""
    return [sampler for sampler in _samplers if sampler.uncounted]


def any_samplers() -> bool:
    """Return whether any sampler exists."""
    return len(_samplers) > 0
