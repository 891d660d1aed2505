"""The order of an epoch, and the share of one rank."""

from dataclasses import dataclass

import numpy as np

from hvdkit.errors import UsageError


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return all sample numbers in the order of an epoch: int64 of shape [count].

    Args:
        count: the number of samples.
        seed: the seed of the run, 0 or more.
        epoch: the number of the epoch, from 0. Each epoch has its own order.
        shuffle: draw a random order. Otherwise the order is 0, 1, 2, ...
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    # Sort by random keys, because NumPy may change `permutation` in a new version, but not the
    # numbers of a bit generator. The sort is stable for equal keys.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


@dataclass(frozen=True)
class Share:
    """One rank's share of the rest of an epoch.

    Every rank has the same number of batches. Without `drop_last` each sample goes to exactly one
    rank, and the last batches may have different sizes. A rank with one batch less than the others
    gets one more batch: a single sample from the beginning of the epoch.

    Attributes:
        count: the number of samples of an epoch.
        begin: the number of samples that all ranks together had consumed when the job started or
            resumed.
        rank: the index of this rank.
        ranks: the number of ranks.
        batch_size: the number of samples per batch on each rank.
        drop_last: leave out samples that do not fill a batch on every rank.

    Raises:
        UsageError: a number is out of range.
    """

    count: int
    begin: int
    rank: int
    ranks: int
    batch_size: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"the data have {self.count} samples: expected at least 1")
        if self.batch_size < 1:
            raise UsageError(f"batch_size is {self.batch_size}: expected at least 1")
        if not 0 <= self.rank < self.ranks:
            raise UsageError(f"rank {self.rank} of {self.ranks}: expected 0 to {self.ranks - 1}")
        if not 0 <= self.begin <= self.count:
            raise UsageError(
                f"{self.begin} of {self.count} samples were consumed: expected 0 to {self.count}"
            )

    @property
    def left(self) -> int:
        """The number of samples that are left for all ranks together."""
        return self.count - self.begin

    @property
    def batches(self) -> int:
        """The number of batches, the same on every rank."""
        if self.drop_last:
            return self.left // (self.ranks * self.batch_size)
        largest = -(-self.left // self.ranks)
        return -(-largest // self.batch_size)

    @property
    def tail(self) -> str:
        """A text about the samples that do not fill a batch on every rank; "" if there are none."""
        odd = self.left % (self.ranks * self.batch_size)
        if not odd:
            return ""
        if self.drop_last:
            return f"the last {odd} of {self.count} samples are left out"
        repeated = sum(
            Share(self.count, self.begin, r, self.ranks, self.batch_size)._repeats
            for r in range(self.ranks)
        )
        if repeated:
            return f"{repeated} of {self.count} samples are repeated on another rank at the end"
        return f"the last batches are smaller: all ranks together get {odd} samples"

    @property
    def _own(self) -> int:
        return (self.left - self.rank + self.ranks - 1) // self.ranks

    @property
    def _repeats(self) -> bool:
        return not self.drop_last and -(-self._own // self.batch_size) < self.batches

    def places(self) -> np.ndarray:
        """Return this rank's samples, as indices into the order of the epoch."""
        if self.drop_last:
            end = self.begin + self.batches * self.ranks * self.batch_size
            return np.arange(self.begin + self.rank, end, self.ranks)
        places = np.arange(self.begin + self.rank, self.count, self.ranks)
        if self._repeats:
            # This sample does not depend on the position at which the job resumed.
            places = np.append(places, self.rank % self.count)
        return places

    def after(self, batches: int) -> int:
        """Return how many samples all ranks have consumed together after `batches` batches each."""
        return min(self.begin + batches * self.ranks * self.batch_size, self.count)
