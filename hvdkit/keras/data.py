"""`hvd.ResumableSampler` for Keras, and the samplers whose epochs `fit` counts."""

from typing import Any
from weakref import WeakSet

from hvdkit.keras import backend

_samplers: WeakSet[Any] = WeakSet()
_saved: WeakSet[Any] = WeakSet()


class ResumableSampler(backend.hvd.ResumableSampler):
    """The backend's `ResumableSampler`; `fit` counts its epochs.

    Use it in a `DataLoader` on PyTorch, and with its `dataset()` on TensorFlow. A
    `hvd.callbacks.Checkpoint` with `data=sampler` counts its batches.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _samplers.add(self)


def forget_reads() -> None:
    """Ignore earlier reads, for example of one batch, so that they do not count as an epoch."""
    for sampler in samplers_read():
        sampler.uncounted = False


def samplers_read() -> list[ResumableSampler]:
    """Return the samplers with samples that were read and not counted."""
    return [sampler for sampler in _samplers if sampler.uncounted]


def any_samplers() -> bool:
    """Return whether any sampler exists."""
    return len(_samplers) > 0


def check_loaders_of(sampler: Any) -> None:
    """Make `fit` check a `DataLoader` with this sampler, whose position a checkpoint keeps."""
    _saved.add(sampler)


def check_data(adapter: Any) -> None:
    """Check the data of a `fit` whose sampler was given to `check_loaders_of`.

    Args:
        adapter: Keras's `DataAdapter`.

    Raises:
        UsageError: a resume with this `DataLoader` would lose samples.
    """
    if backend.NAME != "torch" or not _saved:
        return
    from torch.utils.data import DataLoader

    from hvdkit.torch.sampling import check_loader, sampler_of

    # Keras's adapter of a DataLoader has no public attribute for it.
    loader = getattr(adapter, "_dataloader", None)
    if not isinstance(loader, DataLoader):
        return
    sampler = sampler_of(loader)
    if any(sampler is saved for saved in _saved):
        check_loader(loader, sampler)
