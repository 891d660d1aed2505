"""Horovod's elastic training for Keras models, on whatever framework Keras runs."""

from typing import Any

import keras
from horovod.common.elastic import ObjectState

from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.functions import broadcast_model

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

#: Decorator for an elastic training function; the first argument is the state to keep.
run = backend.hvd.elastic.run


class KerasState(ObjectState):
    """A Keras model, its optimizer, and any picklable objects.

    `commit` and `save` copy them to host memory, `restore` brings them back to that, and `sync`
    gives every rank what rank 0 has. The states of random seeds are kept, but not sent.

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

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """
        Args:
            model: built.
            optimizer: by default the one that the model is compiled with. It is built here where
                it is not, so that old and new ranks have the same variables.
            kwargs: objects to keep; they become attributes.

        Raises:
            UsageError: the model is not built.
        """
        if not model.built:
            raise UsageError(
                "the model is not built: give it an Input, or call it on a batch, before KerasState"
            )
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._keep()
        super().__init__(
            bcast_object=backend.hvd.broadcast_object, get_rank=backend.hvd.rank, **kwargs
        )

    def save(self) -> None:
        """Copy everything to host memory."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Bring everything back to where it was at the last `save`."""
        for variable, value in self._kept:
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every rank what rank 0 has. A collective."""
        broadcast_model(self.model, root_rank=0, optimizer=self.optimizer)
        self._keep()
        super().sync()

    def _keep(self) -> None:
        of_optimizer = [] if self.optimizer is None else self.optimizer.variables
        # Copies: on the CPU an array may share the memory of the variable.
        self._kept = [
            (variable, keras.ops.convert_to_numpy(variable).copy())
            for variable in [*self.model.variables, *of_optimizer]
        ]


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state every so many batches, and at the end of every epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        """
        Args:
            state: what to commit.
            batches_per_commit: batches from one commit to the next.
        """
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        # Old and new ranks begin to count here.
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.commit()

    def commit(self) -> None:
        """Keep the state, and let ranks that have come or gone take effect."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps the number of the batch in `state.batch`, and 0 there at the end of an epoch.

    After a reset, the epoch begins at its first batch again: how long it is `fit` knows from its
    data, and no longer from its callbacks as in Keras 2. To go on in the middle, give `fit` data
    from which `state.batch` batches have been skipped.
    """

    def __init__(self, state: Any) -> None:
        """
        Args:
            state: has an attribute `batch`.
        """
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps in `state.epoch` how many epochs are done, those before a reset counted."""

    def __init__(self, state: Any) -> None:
        """
        Args:
            state: has an attribute `epoch`.
        """
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        # fit counts from 0 again after a reset. The epoch that ends here is done.
        self.state.epoch = self.initial_epoch + epoch + 1
