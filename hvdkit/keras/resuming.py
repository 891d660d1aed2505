"""Resume `fit` in the middle of an epoch, where a checkpoint was saved.

Keras has no hook for this: `fit` takes the steps of an epoch from an `EpochIterator`, which always
begins at 0. Importing hvdkit.keras wraps two methods of that class. Other epochs are unchanged.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator

_numbers = itertools.count()
_NUMBER = "_hvdkit_number"


@dataclass(frozen=True)
class Beginning:
    """The batch at which the next epoch of `fit` begins.

    Attributes:
        batches: batches of the epoch that are done.
        skips: whether the data begin at the start of the epoch, so that the done batches must be
            read and discarded. Otherwise the data begin at the next batch.
        prepare: called first, with the `EpochIterator`.
        before: called before the first batch is read.
        after: called before the first batch that will be trained is read.
    """

    batches: int
    skips: bool
    prepare: Callable[[Any], None]
    before: Callable[[], None]
    after: Callable[[], None]

    def steps(self, epoch: Any) -> Iterator[tuple[int, int, Any]]:
        """Yield like `EpochIterator._enumerate_iterator`, from batch `batches` on."""
        self.prepare(epoch)
        epoch.data_adapter.on_epoch_begin()
        steps = epoch.steps_per_execution
        total = epoch.steps_per_epoch or epoch._num_batches
        self.before()
        epoch._current_iterator = iter(epoch._get_iterator())
        if self.skips:
            for _ in itertools.islice(epoch._current_iterator, self.batches):
                pass
        self.after()
        step = epoch._steps_seen = self.batches
        while total is None or step < total:
            epoch._steps_seen += steps
            yield step, step + steps - 1, epoch._current_iterator
            step += steps
        if epoch._num_batches and epoch._steps_seen >= epoch._num_batches:
            epoch._current_iterator = iter(epoch._get_iterator())
            epoch._steps_seen = 0
        epoch.data_adapter.on_epoch_end()


#: The next beginning, and its number among all `EpochIterator`s and beginnings.
_next: tuple[Beginning, int] | None = None


def begin_next_epoch(beginning: Beginning | None) -> None:
    """Set where the next epoch of `fit` begins; None: at its first batch."""
    global _next
    _next = None if beginning is None else (beginning, next(_numbers))


def wrap_epochs() -> None:
    """Wrap `EpochIterator`, unless that has been done."""
    if hasattr(EpochIterator._enumerate_iterator, "__wrapped__"):
        return
    init, enumerate_iterator = EpochIterator.__init__, EpochIterator._enumerate_iterator

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        setattr(self, _NUMBER, next(_numbers))

    @functools.wraps(enumerate_iterator)
    def _enumerate_iterator(self: Any) -> Any:
        global _next
        # A younger iterator belongs to an `evaluate` that a callback calls first.
        if _next is None or getattr(self, _NUMBER) > _next[1]:
            return enumerate_iterator(self)
        (beginning, _), _next = _next, None
        return beginning.steps(self)

    EpochIterator.__init__ = __init__
    EpochIterator._enumerate_iterator = _enumerate_iterator
