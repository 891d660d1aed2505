"""Divide the remaining samples of an epoch among the current ranks."""

import copy
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

from horovod.torch.elastic import sampler as horovod_sampler

from hvdkit.errors import UsageError

__all__ = ["ElasticSampler"]


class ElasticSampler(horovod_sampler.ElasticSampler):
    """Horovod's `ElasticSampler`: shard an epoch over the ranks, which may change during it.

    Keep the sampler in the state, call `record_batch` after each batch, and `set_epoch` at the end
    of each epoch. After a change of the ranks, the new ranks share the samples that are in no
    committed batch. Do not call `set_epoch` at the beginning of an epoch: after a restart, this
    would repeat the samples that the epoch has already trained.

    Every rank gets as many samples as the others. For this, up to `size - 1` samples are repeated
    at the end of an epoch: the first samples of the epoch. A restart with the same number of ranks
    therefore repeats the same samples. Horovod's class repeats the first remaining samples, and
    fails if fewer samples are left than ranks.

    Args:
        dataset: the data set; its length must not change.
        shuffle: draw a new order for every epoch.
        seed: the seed of the orders, the same on every rank.

    Raises:
        UsageError: an iteration begins after the last sample of the epoch was recorded, because
            `set_epoch` was not called.
    """

    # Whether an iteration without samples has begun.
    _was_empty = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call this at the end of the epoch before it."""
        super().set_epoch(epoch)
        self._was_empty = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a `state_dict`."""
        super().load_state_dict(state_dict)
        self._was_empty = False

    def __iter__(self) -> Iterator[int]:
        if self.processed_num and not self._at(self.processed_num).remaining_indices:
            # One empty iteration is right: after a restart at the end of an epoch.
            if self.remaining_indices or self._was_empty:
                raise UsageError(
                    f"all samples of epoch {self.epoch} were recorded ({self.processed_num} with "
                    f"record_batch, of {len(self.dataset)}), and another iteration over the "
                    f"ElasticSampler has begun: after a restart, it would have no samples. Call "
                    f"sampler.set_epoch(epoch + 1) at the end of each epoch"
                )
            self._was_empty = True
        repeated = cycle(self._epoch()) if self.total_size > len(self.remaining_indices) else ()
        samples = islice(chain(self.remaining_indices, repeated), self.total_size)
        self.indices = list(samples)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def _epoch(self) -> Sequence[int]:
        """Return all samples of the epoch in their order. A subclass may have its own `reset`."""
        return self._at(0).remaining_indices

    def _at(self, processed: int) -> "ElasticSampler":
        """Return a copy of this sampler at another position in the epoch."""
        other = copy.copy(self)
        other.processed_num = processed
        other.reset()
        return other
