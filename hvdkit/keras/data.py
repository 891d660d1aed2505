"""Each rank's share of the data, for what is under Keras."""

from typing import Any, NoReturn
from weakref import WeakSet

from hvdkit.errors import UsageError
from hvdkit.keras import backend

__all__ = ["ResumableSampler", "shard"]


def _no_shard(dataset: Any, *args: Any, **options: Any) -> NoReturn:  # noqa: ARG001
    """Not on this backend.

    Raises:
        UsageError: always; the message says what to use.
    """
    raise UsageError(
        "hvd.shard shares out tf.data datasets, and Keras runs on PyTorch: give fit a "
        "torch.utils.data.DataLoader with a DistributedSampler(num_replicas=hvd.size(), "
        "rank=hvd.rank(), drop_last=True), or this rank's rows of an array"
    )


shard: Any = backend.hvd.shard if backend.NAME == "tensorflow" else _no_shard


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
