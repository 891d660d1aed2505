"""Shard an epoch over ranks, resumable at any batch.

An epoch is an order of all samples, drawn from the seed and the epoch's number: the same on every
rank. Of the samples that are left when a job starts or resumes, rank r of n takes every n-th one,
beginning with the r-th. After some batches, the ranks together have consumed a prefix of the order.
So one number is the position of the job, and any number of ranks can resume from it.
"""

import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.errors import UsageError

_log = logging.getLogger("hvdkit.data")


def epoch_order(count: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return all sample numbers in the order of an epoch: int64 of shape [count].

    Args:
        count: of the samples.
        seed: of the run, 0 or more.
        epoch: from 0 on; each has another order.
        shuffle: otherwise the order is 0, 1, 2, ...
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    # NumPy keeps the stream of a bit generator stable across versions, but not `permutation`: so
    # sort by random keys. The sort is stable for equal keys.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


#: Reorders the samples of an epoch: `order(numbers, epoch)`, see `Epochs`.
Order = Callable[[np.ndarray, int], Any]


@dataclass(frozen=True)
class Share:
    """One rank's share of the rest of an epoch.

    Every rank has the same number of batches. Without `drop_last` each sample goes to exactly one
    rank, and the last batches may have different sizes. A rank that would have a batch less than
    others gets one sample from the beginning of the epoch.

    Attributes:
        count: samples of an epoch.
        begin: samples that all ranks together had consumed when the job started or resumed.
        rank: index of this rank.
        ranks: number of ranks.
        batch_size: samples per batch on each rank.
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
        """Samples that are left for all ranks together."""
        return self.count - self.begin

    @property
    def batches(self) -> int:
        """Return the number of batches, which is the same on every rank."""
        if self.drop_last:
            return self.left // (self.ranks * self.batch_size)
        largest = -(-self.left // self.ranks)
        return -(-largest // self.batch_size)

    @property
    def tail(self) -> str:
        """Describe what happens to samples that do not fill a batch on every rank; "" if none."""
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
            return f"{repeated} of {self.count} samples are given to a second rank at the end"
        return f"the last batches share {odd} samples"

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
            # The same sample at whichever position the job resumed.
            places = np.append(places, self.rank % self.count)
        return places

    def split(self, order: np.ndarray) -> Iterator[np.ndarray]:
        """Yield this rank's batches of sample numbers.

        Args:
            order: of the epoch, as `epoch_order` gives it.
        """
        mine = order[self.places()]
        for first in range(0, len(mine), self.batch_size):
            yield mine[first : first + self.batch_size]

    def after(self, batches: int) -> int:
        """Return how many samples all ranks together have consumed after `batches` of each."""
        return min(self.begin + batches * self.ranks * self.batch_size, self.count)


@dataclass
class Position:
    """The position of all ranks together in the data, as a checkpoint keeps it.

    Attributes:
        epoch: its number, from 0 on.
        consumed: samples of the epoch that are done.
    """

    epoch: int = 0
    consumed: int = 0


class Epochs:
    """Base class of the samplers: the position of a job in its data.

    A `hvdkit.checkpoint.state.StatefulItem`: a checkpoint keeps the epoch and the samples consumed.

    Args:
        count: of the samples; they are called 0 to count - 1.
        batch_size: samples per batch on each rank.
        shuffle: draw a new order for every epoch; otherwise 0, 1, 2, ...
        seed: of these orders, 0 or more; the same on every rank.
        drop_last: leave out the samples that do not fill a batch on every rank.
        rank: index of this rank.
        ranks: number of ranks.
        how_to_count: advice on how to count batches, for the error.
        order: called with the drawn order of an epoch (int64) and the epoch; returns the same
            numbers in the order to use. The result must be the same on all ranks and in all jobs.

    Attributes:
        batch_size: as given.
        drop_last: as given.
        uncounted: whether samples were read, and no batch was counted since.

    Raises:
        UsageError: an argument is invalid, or no rank would have a batch.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        rank: int,
        ranks: int,
        how_to_count: str,
        order: Order | None = None,
    ) -> None:
        if order is not None and not callable(order):
            raise UsageError(
                f"order is {order!r:.40}: expected a function of the samples' numbers and the epoch"
            )
        self._order = order
        self._checksum: tuple[int, int] | None = None
        self._count = _whole("the number of samples", count, 1)
        self.batch_size = _whole("batch_size", batch_size, 1)
        self._seed = _whole("seed", seed, 0)
        self._shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self._rank, self._ranks = rank, ranks
        self._how_to_count = how_to_count
        self.uncounted = False
        whole = self._share(0)
        if not whole.batches:
            raise UsageError(
                f"{count} samples do not make a batch of {batch_size} on each of {ranks} ranks: "
                f"expected more data, a smaller batch_size, or drop_last=False"
            )
        if whole.tail and rank == 0:
            _log.info("in every epoch %s", whole.tail)
        self._go_to(Position())

    def _share(self, begin: int) -> Share:
        return Share(self._count, begin, self._rank, self._ranks, self.batch_size, self.drop_last)

    def _go_to(self, position: Position) -> None:
        # One assignment, because a thread that reads ahead may read it at any time.
        self._now = (position.epoch, self._share(position.consumed), 0)
        self._iterated = False

    @property
    def epoch(self) -> int:
        """Number of the current epoch, or of the next one between two epochs; from 0 on."""
        return self._now[0]

    @property
    def position(self) -> Position:
        """Position of all ranks together."""
        epoch, share, batches = self._now
        return Position(epoch, share.after(batches))

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of a whole epoch, the same on every rank."""
        return self._share(0).batches

    @property
    def batches_left(self) -> int:
        """The number of remaining batches of this epoch, the same on every rank."""
        _, share, batches = self._now
        return share.batches - batches

    def left(self) -> tuple[int, np.ndarray]:
        """Return the epoch, and the numbers of its remaining samples on this rank."""
        epoch, share, batches = self._now
        order = self._order_of(epoch)
        return epoch, order[share.places()][batches * self.batch_size :]

    def _order_of(self, epoch: int) -> np.ndarray:
        drawn = epoch_order(self._count, self._seed, epoch, self._shuffle)
        if self._order is None:
            return drawn
        order = np.asarray(self._order(drawn, epoch))
        whole = np.issubdtype(order.dtype, np.integer)
        if not whole or not np.array_equal(np.sort(order, axis=None), np.arange(self._count)):
            raise UsageError(
                f"order() returned {order.size} numbers of {order.dtype} for epoch {epoch}: "
                f"expected each of 0 to {self._count - 1} once"
            )
        order = order.astype(np.int64)
        self._checksum = (epoch, zlib.crc32(order.tobytes()))
        return order

    def _checksum_of(self, epoch: int) -> int | None:
        """Return a checksum of an epoch's order; None without a function `order`."""
        if self._order is None:
            return None
        if self._checksum is None or self._checksum[0] != epoch:
            self._order_of(epoch)
        assert self._checksum is not None
        return self._checksum[1]

    def begin_iteration(self) -> bool:
        """Prepare a loop over the rest of the epoch. If a loop has left this epoch, begin the next.

        Returns:
            Whether batches are left. If not, the job was restored at the end of the epoch, and the
            next epoch has begun now.
        """
        if self._iterated:
            if self._rank == 0 and self.batches_left:
                epoch, left, all_batches = self.epoch, self.batches_left, self.batches_per_epoch
                _log.info("epoch %d: %d of %d batches were left out", epoch, left, all_batches)
            self.end_epoch()
        if not self.batches_left:
            self.end_epoch()
            return False
        self._iterated = True
        return True

    def count(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this epoch and count them; then begin the next epoch.

        Raises:
            UsageError: the batches end before the epoch.
        """
        epoch = self.epoch
        while self.batches_left and self.epoch == epoch:
            try:
                batch = next(batches)
            except StopIteration:
                raise UsageError(
                    f"the data ended {self.batches_left} batches before the epoch: expected those "
                    f"of this ResumableSampler, in batches of {self.batch_size}"
                ) from None
            self.advance()
            yield batch
        if self.epoch == epoch:
            self.end_epoch()

    def advance(self, batches: int = 1) -> None:
        """Count batches that are done on every rank. `batches()` and Keras's `fit` call this."""
        epoch, share, done = self._now
        self._now = (epoch, share, min(done + batches, share.batches))
        self.uncounted = False

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.set_epoch(self.epoch + 1)
        self.uncounted = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or continue the current one where a loop has left it."""
        if epoch != self.epoch:
            self._go_to(Position(_whole("epoch", epoch, 0)))
        self._iterated = False

    def save(self) -> dict[str, Any]:
        """Return the position and the identity of the data, for a checkpoint.

        Raises:
            UsageError: the data were read, and no batch was counted.
        """
        if self.uncounted:
            raise UsageError(
                f"the data of the ResumableSampler were read, and no batch was counted: "
                f"{self._how_to_count}"
            )
        position = self.position
        return {
            **self._identity(),
            "epoch": position.epoch,
            "consumed": position.consumed,
            "order": self._checksum_of(position.epoch),
        }

    def _identity(self) -> dict[str, Any]:
        return {"samples": self._count, "shuffle": self._shuffle, "seed": self._seed}

    def plan_restore(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Check that a checkpoint was saved with the same data in the same order.

        Raises:
            UsageError: the data or their order differ.
        """
        for name, value in self._identity().items():
            if tree[name] != value:
                raise UsageError(
                    f"the checkpoint was saved with data of {name} {tree[name]}, and this "
                    f"ResumableSampler has {name} {value}: expected the same"
                )
        # Steps of earlier versions have no checksum.
        if tree.get("order") != self._checksum_of(tree["epoch"]):
            raise UsageError(
                f"the checkpoint was saved with another order of the samples in epoch "
                f"{tree['epoch']}: give the ResumableSampler the function order= that it had, and "
                f"let it return the same for the same epoch"
            )
        return tree

    def restore(self, tree: dict[str, Any]) -> None:
        """Resume at the position of the checkpoint."""
        self._go_to(Position(tree["epoch"], tree["consumed"]))
        self.uncounted = False


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UsageError(f"{name} is {value!r}: expected a whole number, at least {least}")
    return int(value)
