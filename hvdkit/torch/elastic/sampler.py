"""Divide the remaining samples of an epoch among the current ranks."""

import copy
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice

from horovod.torch.elastic import sampler as horovod_sampler

__all__ = ["ElasticSampler"]


class ElasticSampler(horovod_sampler.ElasticSampler):
    """Horovod's `ElasticSampler`: shard an epoch over the ranks, which may change during it.

    Keep the sampler in the state, call `record_batch` after each batch, and `set_epoch` at the end
    of each epoch. After a change of the ranks, the new ranks share the samples that are in no
    committed batch.

    Every rank gets as many samples as the others. For this, up to `size - 1` samples are repeated
    at the end of an epoch: the first samples of the epoch. A restart with the same number of ranks
    therefore repeats the same samples. Horovod's class repeats the first remaining samples, and
    fails if fewer samples are left than ranks.

    Args:
        dataset: the data set; its length must not change.
        shuffle: draw a new order for every epoch.
        seed: the seed of the orders, the same on every rank.
    """

    def __iter__(self) -> Iterator[int]:
        repeated = cycle(self._epoch()) if self.total_size > len(self.remaining_indices) else ()
        samples = islice(chain(self.remaining_indices, repeated), self.total_size)
        self.indices = list(samples)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def _epoch(self) -> Sequence[int]:
        """Return all samples of the epoch in their order. A subclass may have its own `reset`."""
        epoch = copy.copy(self)
        epoch.processed_num = 0
        epoch.reset()
        return epoch.remaining_indices
