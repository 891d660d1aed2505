"""Horovod's elastic training for Keras models, for every backend of Keras."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
from horovod.common import elastic as horovod_elastic
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvdkit.agreement.rank_errors import raise_on_all_ranks
from hvdkit.checkpoint.items import Variables, named
from hvdkit.checkpoint.state import StatefulItem
from hvdkit.checkpoint.step_boundary import StepBoundary, window_boundary
from hvdkit.elastic.state import CommittedState
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.fit.collective_callbacks import LastCallback
from hvdkit.keras.fit.comparisons import reducing_over
from hvdkit.keras.fit.epoch_begin import Copies
from hvdkit.keras.fit.executions import trained_batches
from hvdkit.keras.fit.learning_rates import learning_rates, set_learning_rates
from hvdkit.keras.fit.resuming import EpochSize, ResumedEpoch, set_next_epoch
from hvdkit.keras.fit.statistics import StatisticsAverage
from hvdkit.keras.further_optimizers import (
    OptimizerStates,
    build_for_training,
    further_optimizers,
)
from hvdkit.keras.model_state import loss_variables, variables_of, weights_of
from hvdkit.keras.models import distributions_of, is_built, reduced_over
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras_variables.loss_scaling import check_compiled, outermost
from hvdkit.keras_variables.optimizer_slots import optimizer_variables

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

log = logging.getLogger("hvdkit.keras")

#: The attribute of a state with the `EpochSize` that `state.batch` belongs to.
_EPOCH_SIZE = "_hvdkit_epoch_size"

#: Decorates an elastic training function, whose first argument is the elastic state.
run = backend.hvd.elastic.run

#: Elastic state of picklable objects.
ObjectState = backend.hvd.elastic.ObjectState


class KerasState(CommittedState, horovod_elastic.ObjectState):
    """Elastic state of a Keras model, its optimizers, and any picklable objects.

    Optimizers that are attributes of the model, as in a GAN, and optimizers of nested models are
    part of the state.

    `commit` and `save` copy the state to host memory, `restore` restores that copy, and `sync`
    broadcasts the state of rank 0. The state does not contain random seeds and the states of
    stateful RNN layers: a rank that starts again has the seeds that the script makes.

    The state contains the scales of `compression="fp16"`. A commit does not contain accumulated
    gradients: see `commit`.

    Example:
        @hvd.elastic.run
        def train(state):
            model.fit(
                data,
                epochs=10 - state.epoch,
                callbacks=[
                    hvd.elastic.UpdateEpochStateCallback(state),
                    hvd.elastic.CommitStateCallback(state, 100),
                ],
            )

        train(hvd.elastic.KerasState(model, epoch=0))
    """

    _interrupt = HostsUpdatedInterrupt

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """
        Args:
            model: a built model.
            optimizer: default: the optimizer of `model.compile`, also if this one is a
                `LossScaleOptimizer` around the given one. It is built here if necessary, so that
                old and new ranks have the same variables, unless the whole model is frozen.
            kwargs: picklable objects, and `hvd.ResumableSampler`s; they become attributes. Objects
                are replaced by copies at a start, samplers get the position.

        Raises:
            UsageError: the model is not built, or an object must not be replaced by a copy, such as
                an optimizer or a variable.
        """
        if not is_built(model):
            raise UsageError(
                "the model is not built: add an Input or call the model on a batch before "
                "KerasState"
            )
        self.model = model
        self.optimizer = outermost(model, optimizer)
        build_for_training(model, self.optimizer)
        super().__init__(
            bcast_object=backend.hvd.broadcast_object, get_rank=backend.hvd.rank, **kwargs
        )

    def save(self) -> None:
        """Copy everything to host memory, except accumulated gradients.

        Raises:
            UsageError: the model was compiled again after the state was made.
        """
        check_compiled(self.model, self.optimizer)
        super().save()

    def _collectives(self) -> Any:
        return backend.collectives()

    def _reduced_over(self) -> Mapping[str, Sequence[int]]:
        return reduced_over(self._named())

    def _originals(self) -> Iterable[Any]:
        variables = [v for each in self._optimizers() for v in optimizer_variables(each)]
        kept = [self.model, *self.model.layers, *self._optimizers()]
        return [*super()._originals(), *kept, *variables_of(self.model), *variables]

    def _advice(self, value: Any) -> str:
        return super()._advice(value) or backend.copy_advice(value)

    def _model_items(self) -> Mapping[str, StatefulItem]:
        return {
            "model": Variables(
                lambda: named([*weights_of(self.model), *loss_variables(self.model)]),
                *("the model", backend.tensor_of),
            ),
            "optimizers": OptimizerStates(self.model, self._named),
            **backend.tape_items(),
        }

    def _further(self) -> dict[str, Any]:
        """Return the model's other optimizers, by name."""
        found = further_optimizers(self.model)
        return {name: each for name, each in found.items() if each is not self.optimizer}

    def _named(self) -> dict[str, Any]:
        """Return all optimizers, by name."""
        main = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return main | self._further()

    def _optimizers(self) -> list[Any]:
        return list(self._named().values())

    def _distributions(self) -> list[Any]:
        return [d for each in self._optimizers() if (d := distribution_of(each)) is not None]

    def _make_boundary(self) -> StepBoundary:
        return window_boundary(self._distributions)

    def _discard_gradients(self) -> None:
        for distribution in self._distributions():
            distribution.discard()


class _UpdateCallback(keras.callbacks.Callback):
    """A callback that keeps the progress of `fit` in a state.

    Keras calls callbacks in the order of their list, so a `CommitStateCallback` may run before this
    callback. `CommitStateCallback` therefore calls all `_UpdateCallback`s of its state before it
    commits. The commit then counts the batch that has just updated the weights.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        others = [each for each in _updates_of(self.state) if type(each) is not type(self)]
        self.state._updates = [*others, self]

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.state._updates = [each for each in _updates_of(self.state) if each is not self]


def _updates_of(state: Any) -> list[_UpdateCallback]:
    updates: list[_UpdateCallback] = getattr(state, "_updates", [])
    return updates


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check that the callbacks of `fit` fit together with commits. A collective.

    Only some ranks may have such a callback.

    Raises:
        UsageError: on every rank, if a rank has a `BackupAndRestore`, or a `SwapEMAWeights` whose
            state is not in the commits.
    """
    kept = any(isinstance(each, LastCallback) and each.keeps_callbacks for each in callbacks)
    problem = ""
    for each in callbacks:
        if isinstance(each, keras.callbacks.BackupAndRestore):
            problem = (
                "BackupAndRestore: it would restore the end of an epoch, and the commit a later "
                "batch; omit it. To also keep the training on a disk, use hvd.callbacks.Checkpoint"
            )
        elif getattr(each, "swap_on_epoch", False) and not kept:
            problem = (
                "SwapEMAWeights(swap_on_epoch=True): at the end of an epoch, a commit has the "
                "averages as weights, and after a restart the callback would not exchange them; "
                "pass hvd.callbacks.Checkpoint to the same fit, which keeps the callback's state"
            )
    raise_on_all_ranks(
        backend.collectives(),
        UsageError(problem) if problem else None,
        "CommitStateCallback cannot be used beside a callback of fit",
        "hvdkit.keras.commits",
        UsageError,
    )


class CommitStateCallback(LastCallback):
    """Commit the state after every `batches_per_commit` batches and at the end of each epoch.

    At the end of an epoch, all other callbacks run first, also the `History` of Keras. So the
    commit contains their states of this epoch, if there is a `hvd.callbacks.Checkpoint`.

    Within an accumulation window, a due commit is made at the end of the window.

    After the last batch of an epoch, only the end of the epoch is committed: after validation. A
    commit between them would leave an epoch without batches, which Keras cannot train.
    """

    commits = True

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        """
        Args:
            state: the elastic state.
            batches_per_commit: batches between two commits.
        """
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def fit_begins(self, callbacks: Sequence[Any]) -> None:
        """Check the callbacks. A collective.

        Raises:
            UsageError: on every rank, see `_check_callbacks`.
        """
        if isinstance(self.state, CommittedState):
            _check_callbacks(callbacks)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        # Old and new ranks start counting here.
        self.batches_remaining = self.batches_per_commit

    def batches_trained(self, batches: range) -> None:
        """Count the batches."""
        self.batches_remaining -= len(batches)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = (self.params or {}).get("steps")
        if self.batches_remaining > 0 or (steps is not None and batch + 1 >= steps):
            return
        # Equal on all ranks, so that all of them commit.
        must_wait = getattr(self.state, "_must_wait", None)
        if must_wait is None or not must_wait():
            for update in _updates_of(self.state):
                update.on_train_batch_end(batch, logs)
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:  # noqa: ARG002
        """Commit. A collective."""
        self.commit()
        self.batches_remaining = self.batches_per_commit

    def commit(self) -> None:
        """Commit the state. If the hosts have changed, the ranks end here and start again.

        A commit has the variables of rank 0, so the moving statistics of `BatchNormalization` are
        averaged before, as at the end of an epoch. Otherwise a restart within the epoch would lose
        those of the other ranks.
        """
        if isinstance(self.state, KerasState):
            _average_statistics(self.state.model)
        self.state.commit()


def _average_statistics(model: Any) -> None:
    """Average the moving statistics over all ranks that train one model. A collective."""
    group, found = backend.collectives(), distributions_of(model)
    if group.single_rank:
        return
    average = StatisticsAverage(model, group, lambda v: any(d.is_local(v) for d in found))
    tapes = backend.tapes_reduce(model.trainable_weights, group.process_set)
    average.average(bool(reducing_over(group, found)) or tapes)


class UpdateBatchStateCallback(_UpdateCallback):
    """Keep the number of trained batches of the epoch in `state.batch`; 0 after the epoch.

    If `state.batch` is not 0 when `fit` begins, the first epoch begins after these batches: they
    are read and discarded. Each batch is therefore trained once, if the data have the same order at
    each start. Ranks that share the data count the batches of their own share. If a restart changes
    the number of batches of an epoch, as with another number of ranks, `state.batch` becomes the
    same fraction of the epoch, rounded down. Some samples of this epoch may be repeated. With
    another number of ranks, samples are also lost if the ranks read contiguous parts of the data,
    or if each rank shuffles its share.
    """

    def __init__(self, state: Any) -> None:
        """
        Args:
            state: has an attribute `batch`.
        """
        super().__init__(state)
        self._resumed: ResumedEpoch | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._rescale()
        batches = self.state.batch
        self._resumed = None
        if batches > 0:
            undo = _undoing(self.model)
            self._resumed = ResumedEpoch(batches, batches, undo, _nothing, lambda: _nothing)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_next_epoch(resumed)

    def _rescale(self) -> None:
        """Keep the same fraction of the epoch if the size of an epoch has changed.

        The state contains the size, so that it is the same on all ranks, also on new ones.
        """
        state, steps = self.state, (self.params or {}).get("steps")
        size, saved = EpochSize(steps, backend.hvd.size()), getattr(state, _EPOCH_SIZE, None)
        if saved is not None:
            state.batch = size.resumed_after(state.batch, saved)
        elif steps and state.batch >= steps:
            if backend.hvd.rank() == 0:
                log.warning(
                    "state.batch is %d, but an epoch of fit has only %d batches. The first epoch "
                    "begins at its first batch. Begin with state.batch = 0",
                    *(state.batch, steps),
                )
            state.batch = 0
        if isinstance(state, CommittedState):
            state.keep(_EPOCH_SIZE, size)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.state.batch = trained_batches(batch, self.params)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.state.batch = 0


def _undoing(model: Any) -> Callable[[Any], None]:
    """Return a function that undoes changes of variables in `on_epoch_begin` of a resumed epoch.

    The commit contains the changes that the same callback made when the epoch first began.
    """
    rates, copies = learning_rates(model), Copies(model)

    def undo(_: Any) -> None:
        copies.restore()
        set_learning_rates(model, rates)

    return undo


def _nothing() -> None:
    pass


class UpdateEpochStateCallback(_UpdateCallback):
    """Keep the number of completed epochs in `state.epoch`, including epochs before a reset.

    `fit` may count from 0, with `epochs=10 - state.epoch`, or from `initial_epoch=state.epoch`.

    Attributes:
        initial_epoch: the completed epochs that `fit` does not count.
    """

    def __init__(self, state: Any) -> None:
        """
        Args:
            state: has an attribute `epoch`.
        """
        super().__init__(state)
        self.initial_epoch = state.epoch
        self._begins = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.initial_epoch = self.state.epoch
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        # A callback that resumes `fit` sets `_initial_epoch`: then `fit` has counted from 0.
        resumed = getattr(self.model, "_initial_epoch", None)
        if self._begins and not resumed and epoch == self.initial_epoch:
            self.initial_epoch = 0
        self._begins = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        # The epoch that ends here is completed.
        self.state.epoch = self.initial_epoch + epoch + 1
