"""Wrap Keras's callback lists, to coordinate `model.fit` and `model.evaluate` between ranks.

`fit` and `evaluate` make a `keras.callbacks.CallbackList` in each call, and call their callbacks
through it. Importing hvdkit.keras wraps `CallbackList.set_model`, which then changes the class of
the list:

- to `_CoordinatedList` in a job of several ranks. On a single rank, only if `accumulation_steps` is
  used, to close accumulation windows.
- to `_ListWithLastCallbacks` if there is a `LastCallback` or a `ResumableSampler`, also on a single
  rank.

A `fit` in a job of several ranks begins with one small collective, because it is possible that only
one rank needs coordination, for example for a callback that reduces metrics. If no rank needs
coordination, Keras's own `fit` runs. `local_fit` omits the collective.

A list of an uncompiled model belongs to a hand-written loop, maybe of one rank. It is coordinated
only if a callback or an optimizer of this model needs it.

A coordinated list does the following, in this order (see `coordination` and `joint_fit`):

- Raise an error if ranks have different numbers of steps or epochs, or different callbacks of
  hvdkit that need all ranks.
- Drop callbacks that write files or a progress bar on all ranks but the first (see
  `hvdkit.keras.fit.writers`). Broadcast the state that `BackupAndRestore` restores on the first
  rank.
- Raise an error if adapted layers, such as vocabularies, differ between ranks.
- Raise an error if ranks begin at different epochs.
- Before each batch, raise an error if the data of some ranks have ended.
- After the first batch, compare the values of variables between ranks. Every few batches, compare
  the trained variables, the optimizer's variables, and the times that the ranks need.
- After the first epoch, compare the variables that no wrapped optimizer trains, and those that
  layers change in `call`, and warn if they differ.
- With a `TerminateOnNaN`, set the loss of a batch to NaN on every rank if the loss is not finite on
  one rank.
- If a callback stops training on one rank, stop on every rank. If a user's callback has a hook for
  batches, all ranks stop after the same batch; otherwise they stop at the end of the epoch.
- Before validation, or at the end of an epoch without validation, close an accumulation window and
  average the moving statistics of `BatchNormalization`.
- Reduce metrics over all ranks, including metrics of validation, before any callback reads them.

A list with last callbacks calls each `LastCallback` after all other callbacks, and counts the
epochs of every `ResumableSampler`.

An `evaluate` outside of `fit` is not coordinated, because scripts call it on rank 0 only. To reduce
its metrics, pass a `MetricAverageCallback` to it on every rank.
"""

import functools
from typing import Any

import keras
from keras.callbacks import CallbackList

from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.data import any_samplers, forget_reads, restore_epochs, samplers_read
from hvdkit.keras.fit.collective_callbacks import (
    CollectiveCallback,
    LastCallback,
    ReducesMetrics,
    in_local_fit,
    is_alone,
)
from hvdkit.keras.fit.coordination import Coordination
from hvdkit.keras.fit.executions import CountsBatches
from hvdkit.keras.fit.joint_fit import JointFit
from hvdkit.keras.fit.trial import TrialCallback
from hvdkit.keras.fit.writers import with_files, without_files
from hvdkit.keras.models import adapt, distributions_of
from hvdkit.training.trial import TrialPlan

# Callbacks that change weights or the learning rate.
_CHANGING: tuple[type, ...] = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


def _changes_model(callback: Any) -> bool:
    """Return whether a callback is one of Keras that changes the model or its optimizer."""
    if isinstance(callback, keras.callbacks.EarlyStopping):
        return bool(callback.restore_best_weights)
    return isinstance(callback, _CHANGING)


class _CoordinatedList(CountsBatches):
    """Mixin for the class of a `CallbackList` that coordinates several ranks."""

    callbacks: list[Any]
    _coordination: Coordination
    _own_class: type
    _restores = False
    # None outside of `fit`.
    _fit: JointFit | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self._coordination.enter(self.params or {}, self._restores):
            has_last = isinstance(self, _ListWithLastCallbacks)
            self.__class__ = (
                _mixed(_ListWithLastCallbacks, self._own_class) if has_last else self._own_class
            )
            self._own_class.on_train_begin(self, logs)  # type: ignore[attr-defined]
            return
        self._drop_writers()
        super().on_train_begin(logs)  # type: ignore[misc]
        self._fit = self._coordination.begin(self.callbacks, self._restores)
        self._fit.comparisons.compare_layers()
        if not isinstance(self, _ListWithLastCallbacks):
            self._coordination.compare_initial_epochs()

    @property
    def _running(self) -> JointFit:
        if self._fit is None:
            raise UsageError(
                "a loop of the script calls hooks of its CallbackList before on_train_begin: call "
                "on_train_begin first, on every rank"
            )
        return self._fit

    def _drop_writers(self) -> None:
        """Drop callbacks that write files or a progress bar, except on the first rank."""
        coordination = self._coordination
        if coordination.group.is_first:
            return
        self._progbar = None
        warns = backend.hvd.rank() == coordination.group.ranks[1]
        self.callbacks = without_files(self.callbacks, warns)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._running.begin_batch()
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        fit, comparisons = self._running, self._running.comparisons
        fit.end_batch(self.executed(batch))
        comparisons.note_logs(logs)
        broken = False
        if fit.agreed.checks_loss:
            logs, broken = fit.check_loss(logs)
        super().on_train_batch_end(batch, logs)  # type: ignore[misc]
        comparisons.compare_values(self.callbacks)
        comparisons.compare_replicas(len(self.executed(batch)))
        if fit.agreed.stops_at_batches or broken:
            if self._async_train:  # type: ignore[attr-defined]
                self._flush_futures()  # type: ignore[attr-defined]
            fit.synchronize_stop()
        else:
            fit.defer_stop()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._fit is not None:
            self._fit.end_training_batches()
        super().on_test_begin(logs)  # type: ignore[misc]

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # The logs change in place, because `evaluate` returns them.
        logs = {} if logs is None else logs
        if self._fit is not None:
            self._fit.end_validation(logs)
        elif any(isinstance(callback, ReducesMetrics) for callback in self.callbacks):
            self._coordination.reduce_evaluation(logs)
        super().on_test_end(logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # The logs change in place, because `fit` passes them to on_train_end.
        logs = {} if logs is None else logs
        fit = self._running
        fit.end_epoch(logs)
        fit.comparisons.compare_unreduced(self.callbacks)
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]
        fit.synchronize_stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        fit, self._fit = self._running, None
        fit.end()
        # Before the hook of `BackupAndRestore`, which deletes its files.
        fit.comparisons.compare_at_end()
        super().on_train_end(logs)  # type: ignore[misc]
        if fit.agreed.changes_at_end:
            fit.comparisons.compare_at_end(self.callbacks)


class _LocalList:
    """Mixin for the class of a `CallbackList` in `local_fit`, in a job of several ranks."""

    callbacks: list[Any]
    model: Any

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin, after a check that nothing in this `fit` needs the other ranks.

        Raises:
            UsageError: a callback or the optimizer needs them.
        """
        for callback in self.callbacks:
            if isinstance(callback, CollectiveCallback) and not callback.omitted_in_local_fit:
                raise UsageError(
                    f"{type(callback).__name__} needs all ranks, but fit trains on this rank only, "
                    f"in hvd.local_fit(): omit the callback there"
                )
        reducing = [d for d in distributions_of(self.model) if not d.collectives.single_rank]
        if reducing:
            raise UsageError(
                f"fit trains on this rank only, in hvd.local_fit(), but the model is compiled with "
                f"a hvd.DistributedOptimizer over {len(reducing[0].collectives.ranks)} ranks: "
                f"compile the model with a plain optimizer there"
            )
        super().on_train_begin(logs)  # type: ignore[misc]


class _ListWithLastCallbacks(CountsBatches):
    """Mixin for the class of a `CallbackList` that calls each `LastCallback` after the others."""

    callbacks: list[Any]
    _last: list[LastCallback]

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)  # type: ignore[misc]
        # On PyTorch, Keras has read a batch to build the metrics.
        forget_reads()
        restore_epochs()
        for callback in self._last:
            callback.fit_begins(self.callbacks)
        # A `Checkpoint` may have resumed at another epoch.
        if isinstance(self, _CoordinatedList):
            self._coordination.compare_initial_epochs()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)  # type: ignore[misc]
        forget_reads()
        for callback in self._last:
            callback.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        for callback in self._last:
            callback.batch_is_read()
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        batches = self.executed(batch)
        for callback in self._last:
            callback.batches_trained(batches)
        super().on_train_batch_end(batch, logs)  # type: ignore[misc]
        for callback in self._last:
            callback.batches_end(batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        for callback in self._last:
            callback.epoch_trained(epoch)
        # A `Checkpoint` counts the batches of its sampler. Count the epochs of other samplers,
        # because each epoch has a new order. A callback may commit an elastic state after this.
        for sampler in samplers_read():
            sampler.end_epoch()
        super().on_epoch_end(epoch, logs)  # type: ignore[misc]
        for callback in self._last:
            callback.epoch_ends(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)  # type: ignore[misc]
        for callback in self._last:
            callback.fit_ends()


@functools.cache
def _mixed(mixin: type, cls: Any) -> type:
    """Return the class `cls` with a mixin."""
    return type(f"{mixin.__name__}{cls.__name__}", (mixin, cls), {})


_trial: LastCallback | None = None


def _add_trial(callback_list: Any) -> None:
    """Add the callback that counts all batches of this process in a trial of `hvdkit tune`."""
    global _trial
    if (requested := TrialPlan.requested()) is None or not backend.hvd.is_initialized():
        return
    if in_local_fit():
        return  # the ranks end a trial together

    _trial = _trial or TrialCallback(requested)
    callback_list.callbacks.append(_trial)


def _call_last(callback_list: Any) -> None:
    """Add `_ListWithLastCallbacks` if there is a `LastCallback` or a sampler."""
    last = [c for c in callback_list.callbacks if isinstance(c, LastCallback)]
    callback_list._last = sorted(last, key=lambda callback: callback.commits)
    if not callback_list._last and not any_samplers():
        return
    if callback_list._last:
        # Otherwise Keras may call the other callbacks later, in a thread.
        callback_list._async_train = False
    kind: Any = type(callback_list)
    callback_list.__class__ = _mixed(_ListWithLastCallbacks, kind)


def _coordinate(callback_list: Any, model: Any) -> None:
    """Add `_CoordinatedList` in a job of several ranks, or for accumulation windows."""
    if not backend.hvd.is_initialized():
        return
    kind: Any = type(callback_list)
    if in_local_fit():
        if is_alone():
            callback_list.__class__ = _mixed(_LocalList, kind)
        return
    requesting = [c for c in callback_list.callbacks if isinstance(c, ReducesMetrics)]
    needs_one_model = any(
        isinstance(c, LastCallback) and c.needs_one_model for c in callback_list.callbacks
    )
    collective = [
        type(c).__name__
        for c in callback_list.callbacks
        if isinstance(c, CollectiveCallback) and not isinstance(c, ReducesMetrics)
    ]
    changing = [type(c).__name__ for c in callback_list.callbacks if _changes_model(c)]
    coordination = Coordination(model, bool(requesting), needs_one_model, collective, changing)
    if not (model.compiled or coordination.in_use or needs_one_model):
        return
    if coordination.group.single_rank and not coordination.has_windows:
        return
    for callback in requesting:
        callback.coordinated = True
    if coordination.in_use:
        adapt(model)
    callback_list._restores = any(
        isinstance(c, keras.callbacks.BackupAndRestore) for c in callback_list.callbacks
    )
    callback_list._coordination = coordination
    callback_list._own_class = kind
    callback_list.__class__ = _mixed(_CoordinatedList, kind)
    if coordination.in_use:
        # Before the callbacks' `set_model`, in which some callbacks open files.
        callback_list._drop_writers()


def wrap_callback_lists() -> None:
    """Wrap `CallbackList.set_model`, unless that has been done."""
    original = CallbackList.set_model
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def set_model(self: Any, model: Any) -> None:
        if model is not None and not isinstance(self, _MIXINS):
            with_files(self.callbacks)
            _add_trial(self)
            _coordinate(self, model)
            _call_last(self)
        original(self, model)

    CallbackList.set_model = set_model


_MIXINS = (_CoordinatedList, _ListWithLastCallbacks, _LocalList)
