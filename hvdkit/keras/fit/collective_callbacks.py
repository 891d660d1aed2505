"""Base classes of hvdkit's callbacks of `fit`, whose hooks are collectives, and `local_fit`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

from hvdkit.keras import backend

_local: ContextVar[bool] = ContextVar("hvdkit_local_fit", default=False)


@contextmanager
def local_fit() -> Iterator[None]:
    """Return a context in which `fit` trains on this rank only, without collectives.

    In this context, `MetricAverageCallback` and `BroadcastGlobalVariablesCallback` do nothing. With
    other callbacks of hvdkit that need all ranks, such as `Checkpoint`, and with a
    `DistributedOptimizer`, `fit` raises `UsageError`.

    Example:
        if hvd.rank() == 0:
            with hvd.local_fit():
                teacher.fit(data)
    """
    token = _local.set(True)
    try:
        yield
    finally:
        _local.reset(token)


def in_local_fit() -> bool:
    """Return whether the code runs in `local_fit`."""
    return _local.get()


def is_alone() -> bool:
    """Return whether the code runs in `local_fit`, in a job of several ranks."""
    hvd = backend.hvd
    return bool(_local.get() and hvd.is_initialized() and hvd.size() > 1)


class CollectiveCallback(keras.callbacks.Callback):
    """Base of callbacks whose hooks are collectives.

    In `local_fit` the other ranks do not call the hooks, so a collective would wait forever.

    Attributes:
        omitted_in_local_fit: whether the hooks do nothing in `local_fit`, see `alone`. Otherwise
            `fit` raises an error there (`_LocalList`).
    """

    omitted_in_local_fit = False

    @property
    def alone(self) -> bool:
        """Whether the code runs in `local_fit`, in a job of several ranks."""
        return is_alone()


class ReducesMetrics(CollectiveCallback):
    """Base of callbacks that request metrics over all ranks, with any optimizer.

    Attributes:
        coordinated: whether `fit` reduces the metrics, so the callback must not.
    """

    omitted_in_local_fit = True
    coordinated = False


class LastCallback(CollectiveCallback):
    """Base of callbacks that run after all other callbacks and after the ranks' coordination.

    Use the methods below, such as `batches_end`, for actions that may raise. Keras may call its
    standard hooks, such as `on_train_batch_end`, in a thread and lose their exceptions.

    Attributes:
        needs_one_model: whether all ranks must train the same model.
        commits: whether the callback commits an elastic state. It then runs after the other
            `LastCallback`s, so that the commit contains the position of a `Checkpoint`.
        keeps_callbacks: whether commits contain the states of the other callbacks because of this
            callback.
    """

    needs_one_model = False
    commits = False
    keeps_callbacks = False

    def fit_begins(self, callbacks: Sequence[Any]) -> None:
        """Called after `on_train_begin` of the other callbacks."""

    def epoch_begins(self, epoch: int) -> None:
        """Called before the first batch of epoch `epoch` is read."""

    def batch_is_read(self) -> None:
        """Called before a batch, before the coordination waits for other ranks."""

    def batches_trained(self, batches: range) -> None:
        """Called after `batches` have been trained, before the hooks of other callbacks.

        Only for counting. A commit of an elastic job, in another callback, then contains the count.

        Args:
            batches: as for `batches_end`.
        """

    def epoch_trained(self, epoch: int) -> None:
        """Called after validation, before the hooks of other callbacks. Only for counting."""

    def batches_end(self, batches: range) -> None:
        """Called after `batches` have been trained.

        Args:
            batches: the numbers of batches of the epoch (zero-based); several with
                `steps_per_execution`.
        """

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Called after validation. `stop_training` is the same on every rank."""

    def fit_ends(self) -> None:
        """Called after `on_train_end` of the other callbacks."""
