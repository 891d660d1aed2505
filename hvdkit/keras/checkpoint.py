"""`hvd.callbacks.Checkpoint`: save and resume `fit`."""

import logging
import os
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import keras

# What Keras's own callbacks print with.
from keras.src.utils import io_utils

from hvdkit.checkpoint.items import Plain, data_item, kept_in
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.signals import STOP_SIGNALS
from hvdkit.checkpoint.state import RankItem, StatefulItem, Tree
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.data import samplers_read
from hvdkit.keras.items import (
    CallbackStates,
    OwnVariables,
    metric_variables,
    parts_of,
    rank_parts_of,
)
from hvdkit.keras.models import finalize
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras.resuming import Beginning, begin_next_epoch
from hvdkit.keras.training import FollowsFit

log = logging.getLogger("hvdkit.keras")

#: Folder or URL -> the manager that this process has last opened on it.
_open: WeakValueDictionary[str, Manager] = WeakValueDictionary()


class Checkpoint(FollowsFit):
    """Saves `fit`, also within epochs, and resumes at the last checkpoint.

    Every rank has one in its callbacks. Wherever it is in the list, it comes last.

        sampler = hvd.ResumableSampler(len(labels), batch_size=32, seed=1)
        data = sampler.dataset().map(lambda i: (tf.gather(images, i), tf.gather(labels, i)))
        model.fit(
            data,
            epochs=30,
            callbacks=[hvd.callbacks.Checkpoint(folder, every_steps=1000, data=sampler)],
        )

    A checkpoint has the weights, the optimizer state with its counters and loss scale, the scales
    of the wire formats and the position in the data. It has the state of metrics in the current
    epoch, and of other callbacks: EarlyStopping, ReduceLROnPlateau, ModelCheckpoint, the history,
    and any callback with `state_dict()` and `load_state_dict()`. For each rank it has the random
    states of Python, NumPy, the framework and Keras's layers. A run that was killed and resumed
    ends with the same bytes as an undisturbed run.

    On SIGTERM, SIGINT or SIGUSR1, all ranks save after the current batch and end with status 75.
    Within an accumulation window, a due checkpoint is saved at the end of the window.

    If `fit` resumes with another number of ranks, metrics are those of the rest of the epoch.

    Attributes:
        metadata: your own plain values in the checkpoint. A resume updates them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_epochs: int | None = 1,
        keep_last: int | None = 3,
        keep_best: KeepBest | Sequence[KeepBest] = (),
        keep_every: int | None = None,
        data: Any = None,
        metadata: MutableMapping[str, Any] | None = None,
        resume: bool = True,
        asynchronous: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        stop_signals: Sequence[int] = STOP_SIGNALS,
        verbose: int = 0,
    ) -> None:
        """
        Args:
            folder: a local or shared folder, or a URL that fsspec knows, such as `s3://bucket/run`.
                Only the first rank reads and writes it.
            every_steps: save after this many batches, also within an epoch.
            every_minutes: save after this many minutes, by the first rank's clock.
            every_epochs: save after this many epochs. The end of the last epoch is always saved.
            keep_last: the number of newest checkpoints to keep; None: all.
            keep_best: the best checkpoints to keep as well, by the logs of an epoch, such
                as `hvd.KeepBest("val_loss")`.
            keep_every: keep checkpoints whose number of batches is a multiple of this as well.
            data: the `ResumableSampler` of the data. Without one, a resumed epoch reads and skips
                the batches that were trained: exact if the order is the same.
            metadata: plain values; see `hvdkit.checkpoint.state`. Every save reads them, and a
                resume updates them.
            resume: resume at the newest good checkpoint in `folder`, if there is one. False: begin
                a new run beside the existing steps.
            asynchronous: write in the background while training continues.
            storage_options: for fsspec's file system, such as `{"endpoint_url": …}`; for URLs only.
            stop_signals: signals at which to save and end the job.
            verbose: 1: the first rank prints where it resumes.

        Raises:
            UsageError: `every_epochs` is invalid, or `data` is not a `ResumableSampler`.
        """
        super().__init__()
        if every_epochs is not None and (not isinstance(every_epochs, int) or every_epochs < 1):
            raise UsageError(f"every_epochs is {every_epochs!r}: expected a whole number >= 1")
        self._store = Store(
            folder,
            keep_last=keep_last,
            keep_best=keep_best,
            keep_every=keep_every,
            storage_options=storage_options,
        )
        self._every_epochs = every_epochs
        if data is not None:
            data_item(data)
        self._data = data
        self._resume = resume
        self._overwrite = not resume
        self._verbose = verbose
        self._settings: dict[str, Any] = {
            "every_steps": every_steps,
            "every_minutes": every_minutes,
            "asynchronous": asynchronous,
            "stop_signals": stop_signals,
        }
        self.metadata = {} if metadata is None else metadata
        self._place = _Place()
        self._metrics = _Metrics()
        self._rank_parts: dict[str, RankItem] = {}
        self._beginning: Beginning | None = None
        self._manager: Manager | None = None
        self._distribution: Any = None

    @property
    def step(self) -> int:
        """The number of batches that each rank has trained."""
        return self._place.step

    def fit_begins(self, callbacks: Sequence[Any]) -> None:
        """Restore the newest checkpoint, if there is one. A collective.

        Raises:
            UsageError: on all ranks: the model is not built, or the checkpoint does not fit.
            CheckpointError: on all ranks: none of the checkpoints is good.
        """
        model = self.model
        if not model.built:
            raise UsageError(
                "hvd.callbacks.Checkpoint needs a model that has been built before fit: give it an "
                "Input, or call it on a batch of data"
            )
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        place = self._place
        place.callbacks = [callback for callback in callbacks if callback is not self]
        place.epoch_steps = self.params.get("steps")
        place.fit += 1
        if self._data is not None and place.epoch_steps not in (None, self._data.batches_per_epoch):
            raise UsageError(
                f"an epoch of fit has {place.epoch_steps} steps, and the ResumableSampler has "
                f"{self._data.batches_per_epoch} batches: omit steps_per_epoch, or give the "
                f"sampler fewer samples"
            )
        self._open(model)
        assert self._manager is not None
        if self._resume:
            restored = self._manager.restore()
            # A second `fit` continues from what is in memory.
            self._resume = False
            if restored is not None:
                finalize(model)
                self._go_on()
                if self._verbose and backend.hvd.rank() == 0:
                    io_utils.print_msg(
                        f"resumed after step {self.step}, in epoch {self._place.epoch + 1}"
                    )

    def _open(self, model: Any) -> None:
        left_open = _open.get(self._store.location)
        if left_open is not None:
            # That of a `fit` which an exception has ended, which nobody has told it.
            left_open.abandon()
        # The manager must not hold on to this callback, which ends it when nobody needs it.
        place, metadata = self._place, self.metadata
        self._distribution = distribution = distribution_of(model.optimizer)
        self._metrics.model = model
        collectives = distribution.collectives if distribution else backend.collectives()
        self._rank_parts = rank_parts_of(model)
        parts: dict[str, StatefulItem] = parts_of(model) | {
            "progress": place,
            "callbacks": CallbackStates(lambda: place.callbacks),
            "metadata": kept_in(metadata),
        }
        if self._data is not None:
            parts["data"] = self._data
        self._manager = Manager(
            self._store,
            collectives,
            parts,
            rank_parts={
                **self._rank_parts,
                "metrics": self._metrics,
                "epoch_began": Plain(lambda: place.epoch_began, place.take_epoch_began),
            },
            alike=("data", "progress"),
            versions={"keras": keras.__version__, backend.NAME: backend.framework_version()},
            window_open=lambda: place.at_end or bool(distribution and distribution.window_open),
            # A second `fit` continues the run of the first.
            run=None if self._manager is None else self._manager.run,
            overwrite=self._overwrite,
            **self._settings,
        )
        weakref.finalize(self, self._manager.abandon)
        _open[self._store.location] = self._manager

    def _go_on(self) -> None:
        """Let `fit` begin at the position of the checkpoint."""
        place = self._place
        if self._data is not None and place.batches and place.epoch_steps:
            place.batches = max(place.epoch_steps - self._data.batches_left, 0)
        if place.epoch >= self.params["epochs"] and not place.stopped and not place.batches:
            log.warning(
                "fit has nothing to do: the checkpoint in %s has %d epochs, and epochs=%d. Another "
                "fit of this script needs a folder of its own",
                *(self._store.location, place.epoch, self.params["epochs"]),
            )
        # `fit` looks at it once its callbacks have begun.
        self.model._initial_epoch = self.params["epochs"] if place.stopped else place.epoch
        if not place.batches or place.stopped:
            return
        own = {name: part.save() for name, part in self._rank_parts.items()}
        metrics, began = self._metrics.taken, place.epoch_began

        def prepare(epoch: Any) -> None:
            backend.build_metrics(self.model, epoch)
            self._metrics.put_back(metrics)

        def before() -> None:
            if self._data is None and began is not None:
                self._rank_parts["random"].restore(began)

        def after() -> None:
            # Beginning to iterate draws random numbers, which the run that was killed has drawn
            # before it saved.
            for name, content in own.items():
                self._rank_parts[name].restore(content)

        self._beginning = Beginning(
            place.batches, self._data is None, prepare=prepare, before=before, after=after
        )

    def epoch_begins(self, epoch: int) -> None:
        """Begin at the position of the checkpoint."""
        self.model._initial_epoch = None
        beginning, self._beginning = self._beginning, None
        begin_next_epoch(beginning)
        place = self._place
        if beginning is None:
            place.epoch, place.batches = epoch, 0
            if self._data is None:
                # What data of `fit`'s own are shuffled with.
                place.epoch_began = self._rank_parts["random"].save()

    def batch_ends(self, batch: int) -> None:
        """Save if a checkpoint is due. A collective."""
        place = self._place
        done = batch + 1
        if place.epoch_steps is not None:
            # The last of several steps in one execution may be cut short.
            done = min(done, place.epoch_steps)
        new = done - place.batches
        place.batches = done
        place.step += new
        if self._data is not None:
            self._data.advance(new)
        elif samplers_read():
            raise UsageError(
                "the data of fit come from a ResumableSampler: give hvd.callbacks.Checkpoint "
                "data=sampler, so that they go on where they were"
            )
        self._metrics.count = True
        # The one to come is not trained, where all ranks have agreed to stop.
        place.at_end = done == place.epoch_steps or bool(self.model.stop_training)
        self._maybe_save()

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save if a checkpoint is due. A collective."""
        assert self._manager is not None
        place = self._place
        if self._data is not None:
            self._data.end_epoch()
        # Where nobody knew it, the first epoch has told.
        place.epoch_steps = place.epoch_steps or place.batches
        place.epoch, place.batches = epoch + 1, 0
        place.at_end = False
        place.stopped = bool(self.model.stop_training)
        place.epoch_began = None
        self._metrics.count = False
        metrics = _numbers(logs)
        wanted = place.stopped or place.epoch == self.params["epochs"]
        if self._every_epochs is not None:
            wanted = wanted or place.epoch % self._every_epochs == 0
        if self._maybe_save(metrics) or not wanted:
            return
        if self._distribution is not None and self._distribution.window_open:
            # With several ranks `fit` has ended it.
            log.warning(
                "epoch %d ends in an accumulation window, and is saved with the next batch that is "
                "due after it: let accumulation_steps divide the batches of an epoch",
                epoch + 1,
            )
            return
        self._manager.save(place.step, place.epoch, metrics)

    def _maybe_save(self, metrics: dict[str, float] | None = None) -> bool:
        assert self._manager is not None
        try:
            return self._manager.maybe_save(self.step, self._place.epoch, metrics)
        except SystemExit:
            # All ranks leave `fit` here.
            self._manager.close()
            raise

    def fit_ends(self) -> None:
        """Wait until everything is on the disk. A collective."""
        assert self._manager is not None
        begin_next_epoch(None)
        self.model._initial_epoch = None
        self._manager.close()


@dataclass
class _Place:
    """A `StatefulItem`: the position of the training.

    Attributes:
        step: batches that each rank has trained.
        fit: how many times `fit` was called with this callback.
        epoch: the epoch that it is in, or that comes next.
        batches: of that epoch that are done.
        epoch_steps: batches of an epoch, where that is known.
        stopped: whether `stop_training` has ended it.
        at_end: after an epoch's last batch; its end is near, where it is saved with its metrics.
        epoch_began: the random numbers when the epoch began, for data that are read again.
        callbacks: the others.
    """

    step: int = 0
    fit: int = 0
    epoch: int = 0
    batches: int = 0
    epoch_steps: int | None = None
    stopped: bool = False
    at_end: bool = False
    epoch_began: Tree = None
    callbacks: Sequence[Any] = ()

    def save(self) -> Tree:
        """Return the position, which is the same on all ranks."""
        return {
            "step": self.step,
            "fit": self.fit,
            "epoch": self.epoch,
            "batches": self.batches,
            "epoch_steps": self.epoch_steps,
            "stopped": self.stopped,
        }

    def plan_restore(self, tree: Tree) -> Tree:
        """Check that the call of `fit` is the same.

        Raises:
            UsageError: the checkpoint was saved in another one.
        """
        # Earlier versions did not save it.
        saved = tree.get("fit", self.fit)
        if saved != self.fit:
            raise UsageError(
                f"the checkpoint was saved in call {saved} of fit with this callback, and this is "
                f"call {self.fit}. Use another callback and another folder for each call of fit"
            )
        return tree

    def restore(self, tree: Tree) -> None:
        """Restore the position."""
        self.step, self.epoch, self.batches = tree["step"], tree["epoch"], tree["batches"]
        self.stopped = tree["stopped"]
        before, now = tree["epoch_steps"], self.epoch_steps
        if self.batches and before and now and before != now:
            # Another number of ranks: as far in the epoch as it was.
            self.batches = self.batches * now // before

    def take_epoch_began(self, tree: Tree) -> None:
        """Return the position, for a checkpoint."""
        self.epoch_began = tree


class _Metrics:
    """A `RankItem`: the state of this rank's metrics since the epoch began.

    Attributes:
        count: whether they have counted anything that is still needed.
        taken: what a checkpoint had, until there are metrics to put it into.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.count = False
        self.taken: Tree = None

    def _variables(self) -> OwnVariables:
        return OwnVariables(lambda: metric_variables(self.model))

    def save(self) -> Tree:
        """Return the state; None between two epochs, because `fit` resets metrics then."""
        return self._variables().save() if self.count else None

    def restore(self, tree: Tree) -> None:
        """Keep the state until `fit` has reset the metrics."""
        self.taken = tree

    def put_back(self, tree: Tree) -> None:
        """Restore the state of the metrics."""
        if tree is not None:
            self._variables().restore(tree)
            self.count = True


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in logs.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found
