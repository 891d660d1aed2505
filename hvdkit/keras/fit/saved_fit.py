"""One call of `fit` whose state is saved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import keras

from hvdkit.agreement.collectives import Collectives
from hvdkit.checkpoint.items import Plain
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.state import RankItem, StatefulItem
from hvdkit.checkpoint.step_boundary import window_boundary
from hvdkit.checkpoint.store import Store
from hvdkit.keras import backend
from hvdkit.keras.elastic import UpdateEpochStateCallback
from hvdkit.keras.fit.progress import EpochMetrics, Progress
from hvdkit.keras.items import items_of, rank_items_of
from hvdkit.keras.models import distributions_of, fit_optimizers
from hvdkit.keras_variables.optimizer_slots import optimizer_variables

#: The managers that this process has opened.
_managers: WeakSet[Manager] = WeakSet()


@dataclass(frozen=True)
class SavedFit:
    """One call of `fit`.

    Attributes:
        callbacks: the callbacks of `fit`, without the `Checkpoint`.
        manager: saves and restores.
        distributions: of the model's optimizers.
        rank_items: the state of this rank, except the metrics.
        metrics: the metrics of this rank.
        update: counts the epochs of an elastic state; None if there is none.
    """

    callbacks: Sequence[Any]
    manager: Manager
    distributions: Sequence[Any]
    rank_items: Mapping[str, RankItem]
    metrics: EpochMetrics
    update: UpdateEpochStateCallback | None

    @property
    def earlier_epochs(self) -> int:
        """The epochs that ended before this `fit`, if `fit` counts from 0 again.

        Known from the first epoch on.
        """
        return 0 if self.update is None else self.update.initial_epoch

    def keep_own(self) -> Callable[[], None]:
        """Return a function that restores the state of this rank as it is now.

        Creating an iterator draws random numbers, and so may reading batches.
        """
        own = {name: item.save() for name, item in self.rank_items.items()}

        def restore() -> None:
            for name, content in own.items():
                self.rank_items[name].restore(content)

        return restore


def open_fit(
    model: Any,
    callbacks: Sequence[Any],
    progress: Progress,
    items: Mapping[str, StatefulItem],
    store: Store,
    collectives: Collectives,
    **settings: Any,
) -> SavedFit:
    """Open the manager of a `fit`. Close those that earlier calls of `fit` have left open.

    Args:
        model: a built and compiled model.
        callbacks: the callbacks of `fit`, without the `Checkpoint`.
        progress: the position in this `fit`.
        items: name of a part -> its item, beside those of the model.
        store: where to save.
        collectives: of the ranks that train the model.
        settings: further arguments of `Manager`.
    """
    # Keras does not tell callbacks that an exception has ended `fit`.
    for left_open in list(_managers):
        left_open.abandon()
    _managers.clear()
    own = distributions_of(model)
    rank_items = rank_items_of(model)
    metrics = EpochMetrics(model, progress)

    def ends_epoch() -> bool:
        """Return whether the metrics of the epoch are computed next. A due save waits."""
        # If a callback has set `stop_training`, this was the last batch of the epoch.
        batches = progress.position.batches
        return batches > 0 and bool(batches == progress.epoch_steps or model.stop_training)

    # The manager must not refer to the `Checkpoint`, whose finalizer closes the manager.
    manager = Manager(
        store,
        collectives,
        {**items_of(model), **items},
        rank_parts={
            **rank_items,
            "metrics": metrics,
            "epoch_began": Plain(lambda: progress.epoch_began, progress.restore_epoch_began),
        },
        alike=("data", "progress"),
        versions={"keras": keras.__version__, backend.NAME: backend.framework_version()},
        sum_order=backend.hvd.runtime.host_collectives.sum_order,
        boundary=window_boundary(lambda: own),
        cannot_save_now=ends_epoch,
        replicas=lambda: [d.replicas if d.check_parameters else None for d in own],
        subjects=[
            *model.weights,
            *(v for each in fit_optimizers(model).values() for v in optimizer_variables(each)),
        ],
        **settings,
    )
    _managers.add(manager)
    updates = [each for each in callbacks if isinstance(each, UpdateEpochStateCallback)]
    update = updates[0] if updates else None
    return SavedFit(callbacks, manager, own, rank_items, metrics, update)
