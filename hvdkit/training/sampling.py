"""Shard an epoch over ranks, resumable at any batch.

An epoch is an order of all samples. The order is drawn from the seed and the number of the epoch,
so it is the same on every rank. When a job starts or resumes, rank r of n takes samples r, r + n,
r + 2n, ... of the remaining samples. After any number of batches, all ranks together have consumed
the first samples of the order. The number of these samples is the position of the job. A job with
any number of ranks can resume from it. The samplers of the adapters are subclasses of `Epochs`.
"""

import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hvdkit.errors import UsageError
from hvdkit.training.share import Share, epoch_order

_log = logging.getLogger("hvdkit.data")


#: Reorders the samples of an epoch: `order(numbers, epoch)`, see `Epochs`.
Order = Callable[[np.ndarray, int], Any]


@dataclass
class Position:
    """The position of all ranks together in the data, as it is stored in a checkpoint.

    Attributes:
        epoch: the number of the epoch, from 0.
        consumed: the number of samples of the epoch that all ranks together have consumed.
    """

    epoch: int = 0
    consumed: int = 0


class Batches(Iterator[Any]):
    """The iterator that `batches()` of a sampler returns: the batches of one loop.

    Its length is the number of batches of the loop, which does not change during the loop.

    Args:
        sampler: the sampler, which has the position.
        read: called when the loop begins; returns an iterator over the batches to count.
    """

    def __init__(self, sampler: "Epochs", read: Callable[[], Iterator[Any]]) -> None:
        self._sampler = sampler
        self._read = read
        self._length: int | None = None
        self._counted: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches of this loop: after a resume, of the rest of the epoch."""
        return self._sampler.next_length if self._length is None else self._length

    def __next__(self) -> Any:
        """Return the next batch, and count it. The first call begins the loop."""
        sampler = self._sampler
        try:
            if self._counted is None:
                if sampler.begin_iteration():
                    self._length = sampler.batches_left
                    self._counted = sampler.count(self._read())
                else:
                    self._length = 0
                    self._counted = iter(())
            return next(self._counted)
        except (StopIteration, UsageError):
            raise
        except BaseException:
            # Reading failed. The next call, or the next loop, reads from the same position again.
            self._counted = None
            sampler.cancel_iteration()
            raise


class _Loop:
    """A loop over the batches of an epoch.

    Attributes:
        problem: the error that the next `next()` raises, if another loop or a restore has changed
            the position; otherwise "".
    """

    def __init__(self) -> None:
        self.problem = ""


class _Now(NamedTuple):
    """The position of a job, and how this rank reads from it.

    Attributes:
        epoch: the number of the epoch.
        share: this rank's share of the epoch.
        batches: the batches of the share that were counted.
        iterated: whether a loop over the epoch has begun.
    """

    epoch: int
    share: Share
    batches: int = 0
    iterated: bool = False


class Epochs:
    """Base class of the samplers: the position of a job in its data.

    A `hvdkit.checkpoint.state.StatefulItem`: a checkpoint holds the epoch and the number of samples
    consumed.

    Args:
        count: the number of samples, which are numbered 0 to count - 1.
        batch_size: the number of samples per batch on each rank.
        shuffle: draw a new order for every epoch. Otherwise the order is 0, 1, 2, ...
        seed: the seed of these orders, 0 or more; the same on every rank.
        drop_last: leave out the samples that do not fill a batch on every rank.
        rank: the index of this rank.
        ranks: the number of ranks.
        how_to_count: text that tells the user how to count batches, for an error.
        order: called with the drawn order of an epoch (int64) and the epoch; returns the same
            numbers in the order to use. The result must be the same on all ranks and in all jobs.

    Attributes:
        samples: the number of samples of an epoch.
        batch_size: as given.
        drop_last: as given.
        uncounted: whether samples were read, and no batch was counted after that.

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
                f"order is {order!r:.40}: expected a function, called as order(numbers, epoch)"
            )
        self._order = order
        # Epoch -> the checksum of its order.
        self._checksums: dict[int, int] = {}
        self._loop: _Loop | None = None
        self.samples = _whole("the number of samples", count, 1)
        self.batch_size = _whole("batch_size", batch_size, 1)
        self._seed = _whole("seed", seed, 0)
        self._shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self._place = rank, ranks
        self._how_to_count = how_to_count
        self.uncounted = False
        whole = self._share(0)
        if whole.tail and rank == 0:
            _log.info("in every epoch %s", whole.tail)
        # Always a single assignment, because a thread that reads ahead may read it at any time.
        self._now = _Now(0, whole)

    def _current_place(self) -> tuple[int, int]:
        """Return the index of this rank and the number of ranks, as they are now."""
        return self._place

    def _follow_ranks(self) -> None:
        """Divide the rest of the epoch again if the number of ranks or this rank has changed.

        In an elastic job of Horovod's launcher, Horovod starts again in the same process.
        """
        epoch, share, _, iterated = self._now
        if self._current_place() != (share.rank, share.ranks):
            self._now = _Now(epoch, self._share(self.position.consumed), 0, iterated)

    def _share(self, begin: int) -> Share:
        """Return the share of this rank in the rest of an epoch.

        Raises:
            UsageError: no rank would have a batch.
        """
        rank, ranks = self._current_place()
        whole = Share(self.samples, 0, rank, ranks, self.batch_size, self.drop_last)
        if not whole.batches:
            raise UsageError(
                f"{self.samples} samples do not make a batch of {self.batch_size} on each of "
                f"{ranks} ranks: expected more data, a smaller batch_size, or drop_last=False"
            )
        return replace(whole, begin=begin)

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0. Between two epochs, that of the next one."""
        return self._now.epoch

    @property
    def position(self) -> Position:
        """The position of all ranks together."""
        epoch, share, batches, _ = self._now
        return Position(epoch, share.after(batches))

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of a whole epoch, the same on every rank."""
        return self._share(0).batches

    @property
    def batches_left(self) -> int:
        """The number of remaining batches of this epoch, the same on every rank."""
        return self._now.share.batches - self._now.batches

    @property
    def next_length(self) -> int:
        """The number of batches of the next loop over `batches()`."""
        return self.batches_per_epoch if self._now.iterated else self.batches_left

    def left(self) -> tuple[int, np.ndarray]:
        """Return the epoch, and the numbers of its remaining samples on this rank."""
        self._follow_ranks()
        epoch, share, batches, _ = self._now
        order = self._order_of(epoch)
        return epoch, order[share.places()][batches * self.batch_size :]

    def _order_of(self, epoch: int) -> np.ndarray:
        drawn = epoch_order(self.samples, self._seed, epoch, self._shuffle)
        if self._order is None:
            return drawn
        order = np.asarray(self._order(drawn, epoch))
        whole = np.issubdtype(order.dtype, np.integer) and order.shape == (self.samples,)
        if not whole or not np.array_equal(np.sort(order), np.arange(self.samples)):
            raise UsageError(
                f"order() returned {order.size} values of dtype {order.dtype} for epoch {epoch}, "
                f"in an array of shape {order.shape}: expected each integer from 0 to "
                f"{self.samples - 1} once, in an array of shape {(self.samples,)}"
            )
        order = order.astype(np.int64)
        self._checksums[epoch] = zlib.crc32(order.tobytes())
        return order

    def _checksum_of(self, epoch: int) -> int | None:
        """Return a checksum of an epoch's order; None without a function `order`."""
        if self._order is None:
            return None
        if epoch not in self._checksums:
            self._order_of(epoch)
        return self._checksums[epoch]

    def begin_iteration(self) -> bool:
        """Prepare a loop over the rest of the epoch.

        If an earlier loop over this epoch ended early, begin the next epoch. If an earlier loop's
        iterator is used again, it raises UsageError.

        Returns:
            Whether batches are left. If none are left, the job was restored at the end of an epoch,
            and this call has begun the next epoch.
        """
        self._follow_ranks()
        self._end_loop(
            f"another loop over batches() began before this loop over epoch {self.epoch} was at "
            f"its end: expected one loop at a time. To read several batches per step, call next() "
            f"several times on one iterator"
        )
        if self._now.iterated:
            if self._now.share.rank == 0 and self.batches_left:
                epoch, left, all_batches = self.epoch, self.batches_left, self.batches_per_epoch
                _log.info("epoch %d: %d of %d batches were left out", epoch, left, all_batches)
            self.end_epoch()
        if not self.batches_left:
            self.end_epoch()
            return False
        self._now = self._now._replace(iterated=True)
        self._loop = _Loop()
        return True

    def cancel_iteration(self) -> None:
        """Let the next loop begin at the position of the current one, as after an error."""
        self._end_loop()
        self._now = self._now._replace(iterated=False)

    def _end_loop(self, problem: str = "") -> None:
        """End the current loop, if any. If `problem` is not empty, its next `next()` raises it."""
        if self._loop is not None:
            self._loop.problem = problem
            self._loop = None

    def count(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of this epoch and count them; then begin the next epoch.

        Call it after `begin_iteration`.

        Raises:
            UsageError: the batches end before the epoch; or another loop has begun, or the sampler
                was restored, before this loop ended.
        """
        loop = self._loop
        assert loop is not None, "begin_iteration() begins a loop"
        while self._loop is loop and self.batches_left:
            try:
                batch = next(batches)
            except StopIteration:
                raise UsageError(
                    f"the data ended {self.batches_left} batches before the end of the epoch. "
                    f"Expected all batches of this ResumableSampler, with batch_size "
                    f"{self.batch_size}. Use a DataLoader or Dataset made from this sampler."
                ) from None
            self.advance()
            yield batch
        if loop.problem:
            raise UsageError(loop.problem)
        if self._loop is loop:
            self.end_epoch()

    def advance(self, batches: int = 1) -> None:
        """Count batches that are done on every rank. `batches()` and Keras's `fit` call this."""
        now = self._now
        self._now = now._replace(batches=min(now.batches + batches, now.share.batches))
        self.uncounted = False

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.set_epoch(self.epoch + 1)
        self.uncounted = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or continue the current one where a loop has left it."""
        if epoch != self.epoch:
            self._now = _Now(_whole("epoch", epoch, 0), self._share(0))
            self._end_loop()
        self._now = self._now._replace(iterated=False)

    def save(self) -> dict[str, Any]:
        """Return the position and the identity of the data, for a checkpoint.

        Raises:
            UsageError: samples were read, and no batch was counted after that.
        """
        if self.uncounted:
            raise UsageError(
                f"samples of the ResumableSampler were read, but no batch was counted after that: "
                f"{self._how_to_count}"
            )
        return self._saved()

    def committed(self) -> dict[str, Any]:
        """Return the same as `save`, for a commit of an elastic state.

        Raises:
            UsageError: samples were read, and no batch was counted after that.
        """
        return self.save()

    def _saved(self) -> dict[str, Any]:
        position = self.position
        # Between two epochs, do not call `order` for the next one: there may be none.
        checked = position.epoch if position.consumed else max(position.epoch - 1, 0)
        return {
            **self._identity(),
            "epoch": position.epoch,
            "consumed": position.consumed,
            "order": self._checksum_of(checked),
            "order_epoch": checked,
        }

    def _identity(self) -> dict[str, Any]:
        return {"samples": self.samples, "shuffle": self._shuffle, "seed": self._seed}

    def plan_restore(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Check that a checkpoint was saved with the same data in the same order.

        Raises:
            UsageError: the data or their order differ.
        """
        for name, value in self._identity().items():
            if tree[name] != value:
                raise UsageError(
                    f"the checkpoint was saved by a ResumableSampler with {name} {tree[name]}, but "
                    f"this one has {name} {value}: expected the same"
                )
        # Checkpoints of earlier versions have no checksum, or always that of the current epoch.
        checked = tree.get("order_epoch", tree["epoch"])
        if tree.get("order") != self._checksum_of(checked):
            raise UsageError(
                f"the checkpoint was saved with another order of the samples in epoch "
                f"{checked}. Pass the same function as order= to the ResumableSampler. It "
                f"must return the same order for the same epoch."
            )
        return tree

    def restore(self, tree: dict[str, Any]) -> None:
        """Resume at the position of the checkpoint. Iterators made before raise UsageError."""
        self._end_loop(
            "the sampler was restored in this loop over batches(), which reads the data from "
            "another position: begin a new loop over batches() after restore()"
        )
        self._now = _Now(tree["epoch"], self._share(tree["consumed"]))
        self.uncounted = False


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UsageError(f"{name} is {value!r:.80}: expected a whole number, at least {least}")
    return int(value)
