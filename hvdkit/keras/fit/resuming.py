"""Resume `fit` in the middle of an epoch, where a checkpoint was saved.

Keras has no hook for this: `fit` takes the steps of an epoch from an `EpochIterator`, which always
begins at 0. Importing hvdkit.keras wraps two methods of that class. `hvd.callbacks.Checkpoint` and
`hvd.elastic.UpdateBatchStateCallback` call `set_next_epoch` for an epoch to resume; the epochs that
follow are unchanged. Each `EpochIterator` also checks its data (`hvdkit.keras.data.check_data`).
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator

from hvdkit.keras.data import check_data

_numbers = itertools.count()
_NUMBER = "_hvdkit_number"


@dataclass(frozen=True)
class EpochSize:
    """The size of an epoch of `fit`.

    Attributes:
        steps: batches of the epoch on each rank; None if unknown.
        ranks: the number of ranks.
    """

    steps: int | None
    ranks: int

    def resumed_after(self, batches: int, before: "EpochSize") -> int:
        """Return how many batches of this epoch to skip, after a restart with another size.

        The result is the same fraction of the epoch, rounded down. If the epochs seem to have more
        samples than before, the last batches of this epoch may be smaller than the others, or the
        epochs before have dropped a remainder. The result is then less. If a number of batches is
        unknown, the result is a smaller fraction after a decrease of the number of ranks.

        If rank r of n reads the samples r, r + n, r + 2n, … in this order, the trained samples are
        the first ones of the epoch: samples may be repeated, but not lost. If the shares are
        contiguous, or each rank shuffles its share, another number of ranks loses samples of this
        epoch, and repeats others.

        Args:
            batches: trained batches of an epoch of the size `before`.
            before: the size before the restart.
        """
        if self == before:
            return batches
        if self.steps is None or before.steps is None:
            return min(batches, batches * before.ranks // self.ranks)
        may_have_more = self.steps * self.ranks > before.steps * before.ranks
        return batches * (self.steps - may_have_more) // (before.steps + may_have_more)


@dataclass(frozen=True)
class ResumedEpoch:
    """An epoch of `fit` that begins after its first batches.

    Attributes:
        batches: batches of the epoch that are done.
        read: batches that `fit` has read since it first began. The data begin at their first batch,
            so that the batches before the next one must be read and discarded. None: the data begin
            at the next batch.
        prepare: called first, with the `EpochIterator`.
        before: called before the `on_epoch_begin` of the data.
        keep: called before the first batch is read. Returns a function that is called before the
            first batch that will be trained is read.
    """

    batches: int
    read: int | None
    prepare: Callable[[Any], None]
    before: Callable[[], None]
    keep: Callable[[], Callable[[], None]]

    def skipped(self, epoch: Any) -> int:
        """Return how many batches to read and discard.

        With `steps_per_epoch`, an epoch of Keras continues in the data where the last epoch ended.
        """
        if self.read is None:
            return 0
        if epoch.steps_per_epoch and epoch._num_batches:
            return int(self.read % epoch._num_batches)
        return self.batches

    def steps(self, epoch: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield like `EpochIterator._enumerate_iterator`, from batch `batches` on."""
        skipped = self.skipped(epoch)
        self.prepare(epoch)
        self.before()
        # This may shuffle: in a hook of the user's `PyDataset`, or in a thread of Keras.
        epoch.data_adapter.on_epoch_begin()
        restore = self.keep()
        steps = epoch.steps_per_execution
        total = epoch.steps_per_epoch or epoch._num_batches
        data = epoch._get_iterator()
        if self.read is None and total is not None and hasattr(data, "take"):
            # The `tf.data.Dataset` of a sampler asserts the number of batches of a whole epoch. An
            # execution of several steps reads until the end of the data, where this would raise.
            data = data.take(total - self.batches)
        epoch._current_iterator = iter(data)
        for _ in itertools.islice(epoch._current_iterator, skipped):
            pass
        restore()
        step = self.batches
        epoch._steps_seen = step if self.read is None else skipped
        while total is None or step < total:
            if epoch._num_batches and epoch._steps_seen >= epoch._num_batches:
                break
            epoch._steps_seen += steps
            yield step, step + steps - 1, epoch._current_iterator
            step += steps
        if epoch._num_batches and epoch._steps_seen >= epoch._num_batches:
            epoch._current_iterator = iter(epoch._get_iterator())
            epoch._steps_seen = 0
        epoch.data_adapter.on_epoch_end()


#: The epoch to resume, and its number. An `EpochIterator` that was made later has a larger number.
#: None: the next epoch begins at its first batch.
_next: tuple[ResumedEpoch, int] | None = None


def set_next_epoch(resumed: ResumedEpoch | None) -> None:
    """Set where the next epoch of `fit` begins; None: at its first batch."""
    global _next
    _next = None if resumed is None else (resumed, next(_numbers))


def wrap_epochs() -> None:
    """Wrap `EpochIterator`, unless that has been done."""
    if hasattr(EpochIterator._enumerate_iterator, "__wrapped__"):
        return
    init, enumerate_iterator = EpochIterator.__init__, EpochIterator._enumerate_iterator

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        check_data(self.data_adapter)
        setattr(self, _NUMBER, next(_numbers))

    @functools.wraps(enumerate_iterator)
    def _enumerate_iterator(self: Any) -> Any:
        global _next
        # An iterator made after `set_next_epoch` belongs to an `evaluate` in a callback.
        if _next is None or getattr(self, _NUMBER) > _next[1]:
            return enumerate_iterator(self)
        (resumed, _), _next = _next, None
        if not resumed.batches and not resumed.skipped(self):
            return enumerate_iterator(self)
        return resumed.steps(self)

    EpochIterator.__init__ = __init__
    EpochIterator._enumerate_iterator = _enumerate_iterator
