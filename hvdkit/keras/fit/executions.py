"""The batches that Keras trains in one execution.

With `steps_per_execution`, Keras trains several batches in one execution, and calls the hooks for
batches once. The number that Keras passes to `on_train_batch_end` is that of a full execution, also
if the last execution of an epoch has fewer batches.

If the number of batches in an epoch is unknown, the last execution counts as a full one.
"""

from collections.abc import Mapping
from typing import Any


def trained_batches(batch: int, params: Mapping[str, Any] | None) -> int:
    """Return the number of batches of the epoch that are trained.

    Args:
        batch: the number that Keras passes to `on_train_batch_end`.
        params: the parameters of the callbacks: `steps` in an epoch, None if unknown.
    """
    steps = (params or {}).get("steps")
    return batch + 1 if steps is None else min(batch + 1, int(steps))


class CountsBatches:
    """Mixin for the class of a `CallbackList` that counts the batches of each execution."""

    params: dict[str, Any]
    # None in a loop of a user that does not call `on_train_batch_begin`.
    _first_batch: int | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._first_batch = batch
        super().on_train_batch_begin(batch, logs)  # type: ignore[misc]

    def executed(self, batch: int) -> range:
        """Return the batches of the epoch (zero-based) that were executed together.

        Args:
            batch: the number that Keras passes to `on_train_batch_end`.
        """
        first = batch if self._first_batch is None else self._first_batch
        # A loop of a user may count the batches of several epochs.
        return range(first, max(trained_batches(batch, self.params), first + 1))
