"""`hvd.callbacks.Checkpoint`: save and resume `fit`."""

import logging
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import keras

# Keras's own callbacks print with `io_utils`.
from keras.src.utils import io_utils

from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.agreement.process_sets import check_one_model
from hvdkit.checkpoint.items import Plain, data_item, kept_in
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.replaced_state import end_position, keep_position, take_position
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.signals import STOP_SIGNALS
from hvdkit.checkpoint.state import RankItem, StatefulItem, Tree
from hvdkit.checkpoint.step_boundary import window_boundary
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.callback_states import CallbackStates
from hvdkit.keras.data import check_loaders_of, samplers_read
from hvdkit.keras.elastic import UpdateEpochStateCallback
from hvdkit.keras.fit.collective_callbacks import LastCallback
from hvdkit.keras.fit.epoch_begin import EpochBegin
from hvdkit.keras.fit.resuming import EpochSize, ResumedEpoch, set_next_epoch
from hvdkit.keras.further_optimizers import build_for_training
from hvdkit.keras.items import (
    OwnVariables,
    items_of,
    metric_variables,
    rank_items_of,
)
from hvdkit.keras.models import (
    distributions_of,
    finalize,
    fit_optimizers,
    is_built,
    main_optimizer,
    reduced_over,
)
from hvdkit.keras.optimizer import distribution_of
from hvdkit.keras_variables.optimizer_slots import optimizer_variables
from hvdkit.runtime.elastic_start import ElasticStart

log = logging.getLogger("hvdkit.keras")

#: The managers that this process has opened.
_managers: WeakSet[Manager] = WeakSet()


class Checkpoint(LastCallback):
    """Save the state of `fit`, also within epochs, and resume at the newest checkpoint.

    Pass a `Checkpoint` to `fit` on every rank. `fit` calls it after all other callbacks.

        sampler = hvd.ResumableSampler(len(labels), batch_size=32, seed=1)
        data = sampler.dataset().map(lambda i: (tf.gather(images, i), tf.gather(labels, i)))
        model.fit(
            data,
            epochs=30,
            callbacks=[hvd.callbacks.Checkpoint(folder, every_steps=1000, data=sampler)],
        )

    A checkpoint contains:

    - the weights, and the optimizer state with its counters and loss scale, also of optimizers that
      are attributes of the model, as in a GAN;
    - the scales of the wire formats, and the position in the data;
    - the state of metrics in the current epoch;
    - the state of other callbacks: EarlyStopping, ReduceLROnPlateau, ModelCheckpoint, the history,
      and all callbacks with `state_dict()` and `load_state_dict()`;
    - for each rank, the random states of Python, NumPy, the framework and Keras's layers.

    A run that was killed and resumed ends bit-identical to an uninterrupted run.

    On SIGTERM, SIGINT or SIGUSR1, all ranks save after the current batch and end with status 75.
    Within an accumulation window, a due checkpoint is saved at the end of the window.

    Each save first compares the trained variables and the optimizer's variables between the ranks.
    If they differ, nothing is saved, and all ranks raise an error (see `on_mismatch` of
    `hvd.DistributedOptimizer`).

    If `fit` resumes with another number of ranks, the metrics of the resumed epoch cover only its
    remaining batches.

    In an elastic job, each commit contains the position of this callback on the first rank. After a
    restart, `fit` continues from the commit, also if a checkpoint is newer. Only if there is no
    commit since `fit` began, `fit` resumes at the newest checkpoint. With an
    `UpdateEpochStateCallback`, the epochs of the checkpoints are those of `state.epoch`.
    """

    needs_one_model = True
    keeps_callbacks = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_steps_in_memory: int | None = None,
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
            every_steps: save after this many batches, also within an epoch. None: the number of
                batches does not matter.
            every_minutes: save after this many minutes, by the first rank's clock. None: the time
                does not matter.
            every_steps_in_memory: keep the newest step in the memory of each host after this many
                batches. A job of `hvdkit run --restarts N` resumes from it after a failure. None:
                keep steps on disk only.
            every_epochs: save after this many epochs. None: the number of epochs does not matter.
                The end of the last epoch is always saved.
            keep_last: the number of newest checkpoints to keep; None: all.
            keep_best: also keep the best checkpoints by a value in the logs of an epoch, such as
                `hvd.KeepBest("val_loss")`.
            keep_every: also keep each checkpoint whose number of trained batches is a multiple of
                this number. None: no such checkpoints.
            data: the `ResumableSampler` of the data. None: a resumed epoch reads the trained
                batches again and skips them. The resume is then exact only if the data have the
                same order in each run.
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
            check_loaders_of(data)
        self._data = data
        self._resume = resume
        self._overwrite = not resume
        self._verbose = verbose
        self._settings: dict[str, Any] = {
            "every_steps": every_steps,
            "every_minutes": every_minutes,
            "every_steps_in_memory": every_steps_in_memory,
            "asynchronous": asynchronous,
            "stop_signals": stop_signals,
        }
        self._metadata = {} if metadata is None else metadata
        self._progress = _Progress()
        self._begin = EpochBegin()
        self._metrics = _Metrics()
        self._rank_items: dict[str, RankItem] = {}
        self._resumed: ResumedEpoch | None = None
        self._manager: Manager | None = None
        self._distributions: Sequence[Any] = ()
        self._elastic = ElasticStart.read() is not None
        # Whether the newest run in the folder is the run of this job.
        self._in_run = False
        # The epochs that ended before this `fit`, which counts from 0 again.
        self._earlier_epochs = 0
        self._update: UpdateEpochStateCallback | None = None
        # The position in the data, for commits.
        self._data_position: Tree = None

    @property
    def metadata(self) -> MutableMapping[str, Any]:
        """Your own values in the checkpoint: the dict that was given. Change its items."""
        return self._metadata

    @property
    def step(self) -> int:
        """The number of batches that each rank has trained."""
        return self._progress.step

    def fit_begins(self, callbacks: Sequence[Any]) -> None:
        """Restore the newest checkpoint, if there is one. A collective.

        If a commit of an elastic job has restored the state, keep it, and continue from there.

        Raises:
            UsageError: on every rank, if the model does not match the checkpoint. Also if the model
                is not built, or `data` does not fit; if so on some ranks only, the other ranks
                raise RankMismatchError.
            CheckpointError: on every rank, if all checkpoints are damaged.
        """
        model = self.model
        progress = self._progress
        progress.callbacks = [callback for callback in callbacks if callback is not self]
        progress.epoch_steps = self.params.get("steps")
        progress.fit += 1
        updates = [each for each in callbacks if isinstance(each, UpdateEpochStateCallback)]
        self._update = updates[0] if updates else None
        self._count_earlier_epochs()
        # The commit has the positions of the first rank, whose folder may have another name.
        name = backend.hvd.broadcast_object(self._store.location) if self._elastic else ""
        committed = take_position(name)

        def prepare() -> tuple[None, Sequence[str]]:
            self._check_fit(model)
            if committed is not None:
                self._restore_position(committed)
            return None, ()

        distribution = distribution_of(main_optimizer(model))
        collectives = distribution.collectives if distribution else backend.collectives()
        prepare_on_all_ranks(collectives, prepare, "the fit to save")
        self._open(model)
        assert self._manager is not None
        # The restore and the first batch, with the compilation of the graph, may take minutes.
        self._manager.record_signals()
        resumes = committed is not None
        if committed is not None:
            if self._resume or self._in_run:
                self._manager.continue_at(self.step)
        elif self._resume:
            try:
                resumes = self._in_run = self._manager.restore() is not None
            except BaseException:
                # The script may go on without this callback: signals must end it.
                self._manager.abandon()
                raise
        # A second `fit` continues with the state in memory.
        self._resume = False
        if self._elastic:
            self._keep_data_position()
            keep_position(self._store.location, self)
        if not resumes:
            self._begin.epoch_ends(model, progress.callbacks)
        else:
            finalize(model)
            self._resume_fit()
            if self._verbose and backend.hvd.rank() == 0:
                io_utils.print_msg(
                    f"resumed after step {self.step}, in epoch {self._progress.epoch + 1}"
                )

    def _count_earlier_epochs(self) -> None:
        self._earlier_epochs = 0 if self._update is None else self._update.initial_epoch

    def position(self) -> Tree:
        """Return the position of the training, for a commit of an elastic job."""
        return {
            "progress": self._progress.save(),
            "in_run": self._in_run,
            "callbacks": self._callback_states().save(),
            "metadata": dict(self.metadata),
            "data": self._data_position,
        }

    def _callback_states(self) -> CallbackStates:
        progress, begin = self._progress, self._begin
        return CallbackStates(lambda: [*progress.callbacks, begin])

    def _keep_data_position(self) -> None:
        """Keep the position in the data. `save` raises later, when `fit` reads the next epoch."""
        if self._elastic and self._data is not None:
            self._data_position = self._data.save()

    def _restore_position(self, position: Tree) -> None:
        """Restore a result of `position`.

        Raises:
            UsageError: the commit was made in another call of `fit`, or with other data.
        """
        progress, data = self._progress, position["data"]
        progress.restore(progress.plan_restore(position["progress"]))
        self._in_run = position["in_run"]
        self._callback_states().restore(position["callbacks"])
        self.metadata.update(position["metadata"])
        if self._data is not None and data is not None:
            self._data.restore(self._data.plan_restore(data))

    def _check_fit(self, model: Any) -> None:
        """Check that this `fit` can be saved, and build the optimizer.

        Raises:
            UsageError: the model is not built, its optimizers have different process sets, or
                `data` does not fit.
        """
        if not is_built(model):
            raise UsageError(
                "the model is not built: hvd.callbacks.Checkpoint needs a built model before fit. "
                "Give the model an Input, or call it on a batch of data"
            )
        build_for_training(model, model.optimizer)
        found = reduced_over(fit_optimizers(model))
        ranks = next(iter(found.values()), range(backend.hvd.size()))
        check_one_model(found, ranks)
        steps = self._progress.epoch_steps
        if self._data is not None and steps is None:
            raise UsageError(
                f"the number of batches of fit's data is unknown, as after filter() or "
                f"from_generator(): the ResumableSampler counts {self._data.batches_per_epoch} "
                f"batches in an epoch. Do not filter the sampler's dataset: give the sampler only "
                f"the samples to train. If the dataset has all of the sampler's batches, call "
                f"dataset.apply(tf.data.experimental.assert_cardinality(sampler.batches_per_epoch))"
            )
        if self._data is not None and steps != self._data.batches_per_epoch:
            raise UsageError(
                f"an epoch of fit has {steps} steps, and the ResumableSampler has "
                f"{self._data.batches_per_epoch} batches: omit steps_per_epoch, or give the "
                f"sampler fewer samples"
            )

    def _open(self, model: Any) -> None:
        # Keras does not tell callbacks that an exception has ended `fit`.
        for left_open in list(_managers):
            left_open.abandon()
        _managers.clear()
        # The manager must not refer to this callback, whose finalizer closes the manager.
        progress, metadata = self._progress, self.metadata
        self._distributions = own = distributions_of(model)
        distribution = distribution_of(main_optimizer(model))
        self._metrics.model = model
        collectives = distribution.collectives if distribution else backend.collectives()
        self._rank_items = rank_items_of(model)
        items: dict[str, StatefulItem] = items_of(model) | {
            "progress": progress,
            "callbacks": self._callback_states(),
            "metadata": kept_in(metadata),
        }
        if self._data is not None:
            items["data"] = self._data
        self._manager = Manager(
            self._store,
            collectives,
            items,
            rank_parts={
                **self._rank_items,
                "metrics": self._metrics,
                "epoch_began": Plain(lambda: progress.epoch_began, progress.set_epoch_began),
            },
            alike=("data", "progress"),
            versions={"keras": keras.__version__, backend.NAME: backend.framework_version()},
            sum_order=backend.hvd.runtime.host_collectives.sum_order,
            boundary=window_boundary(lambda: own),
            cannot_save_now=lambda: progress.at_end,
            replicas=lambda: [d.replicas if d.check_parameters else None for d in own],
            # A second `fit` continues the run of the first.
            run=None if self._manager is None else self._manager.run,
            overwrite=self._overwrite,
            subjects=[
                *model.weights,
                *(v for each in fit_optimizers(model).values() for v in optimizer_variables(each)),
            ],
            **self._settings,
        )
        weakref.finalize(self, self._manager.abandon)
        _managers.add(self._manager)

    def _resume_fit(self) -> None:
        """Make `fit` begin at the position of the checkpoint."""
        progress = self._progress
        # Decided before `batches` changes. With more ranks than before, the remaining samples may
        # round up to as many batches as the whole epoch has. Then `batches` becomes 0, although a
        # part of the epoch is trained.
        in_epoch = progress.batches > 0
        if in_epoch and self._data is not None:
            progress.batches = self._data.batches_per_epoch - self._data.batches_left
            if not self._data.batches_left:
                # With more ranks than before, `drop_last` leaves out all remaining samples.
                self._data.end_epoch()
                progress.epoch, progress.batches = progress.epoch + 1, 0
                progress.epoch_began, self._metrics.in_epoch = None, False
                in_epoch = False
        elif in_epoch:
            progress.rescale()
            if progress.batches == progress.epoch_steps:
                # A script has committed after the last batch. Keras has no epochs without batches.
                progress.epoch, progress.batches = progress.epoch + 1, 0
            in_epoch = progress.batches > 0
        epochs = self._epochs
        if progress.stopped:
            log.warning(
                "fit trains nothing: the run that saved the checkpoint in %s ended after epoch %d, "
                "because a callback set stop_training, as EarlyStopping does. To train more, write "
                "the weights to a file with hvdkit checkpoint export, load them, and use another "
                "folder. A callback for a time limit should not set stop_training: to save and "
                "resume later, send SIGUSR1 to the job",
                *(self._store.location, progress.epoch),
            )
        elif progress.epoch >= epochs and not in_epoch:
            log.warning(
                "fit has no epochs left: the checkpoint in %s has %d epochs, and epochs=%d. To "
                "train more, increase epochs. Another call of fit needs another folder",
                *(self._store.location, progress.epoch, epochs),
            )
        # `fit` reads `_initial_epoch` after `on_train_begin`.
        begin = epochs if progress.stopped else progress.epoch
        self.model._initial_epoch = max(begin - self._earlier_epochs, 0)
        read = progress.read if self._data is None else None
        if not in_epoch or progress.stopped:
            self._begin.epoch_ends(self.model, progress.callbacks)
            if read is not None and begin < epochs:
                self._resumed = ResumedEpoch(
                    *(0, read), prepare=lambda _: None, before=lambda: None, keep=self._keep_own
                )
            return
        self._begin.resume(self.model, progress.callbacks)
        own = self._keep_own()
        metrics, began = self._metrics.restored, progress.epoch_began

        def prepare(epoch: Any) -> None:
            # A model without `call` has only metrics of its own, which exist already.
            if self.model.built:
                backend.build_metrics(self.model, epoch)
            self._metrics.apply(metrics)

        def before() -> None:
            if self._data is None and began is not None:
                self._rank_items["random"].restore(began)

        # The interrupted run has created its iterator before its save.
        self._resumed = ResumedEpoch(
            progress.batches, read, prepare=prepare, before=before, keep=lambda: own
        )

    def _keep_own(self) -> Callable[[], None]:
        """Return a function that restores the state of this rank as it is now.

        Creating an iterator draws random numbers, and so may reading batches.
        """
        own = {name: item.save() for name, item in self._rank_items.items()}

        def restore() -> None:
            for name, content in own.items():
                self._rank_items[name].restore(content)

        return restore

    @property
    def _epochs(self) -> int:
        """The number of epochs at the end of this `fit`, with those before it."""
        return self._earlier_epochs + int(self.params["epochs"])

    def epoch_begins(self, epoch: int) -> None:
        """Begin at the position of the checkpoint."""
        # This callback knows from the first epoch on whether `fit` counts earlier epochs.
        self._count_earlier_epochs()
        self.model._initial_epoch = None
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_next_epoch(resumed)
        progress = self._progress
        self._begin.epoch_begins(self.model, progress.callbacks)
        if resumed is None or not resumed.batches:
            progress.epoch, progress.batches = self._earlier_epochs + epoch, 0
            if self._data is None:
                # `fit` shuffles arrays with these states.
                progress.epoch_began = self._rank_items["random"].save()

    def batches_trained(self, batches: range) -> None:
        """Count the batches."""
        self._progress.batches = batches.stop
        self._progress.step += len(batches)
        if self._data is not None:
            self._data.advance(len(batches))
            self._keep_data_position()

    def batches_end(self, batches: range) -> None:  # noqa: ARG002
        """Save if a checkpoint is due. A collective."""
        progress = self._progress
        if self._data is None and samplers_read():
            raise UsageError(
                "the data of fit come from a ResumableSampler, whose position is not saved: pass "
                "data=sampler to hvd.callbacks.Checkpoint; for loader = hvd.shard(...), pass "
                "data=loader.sampler"
            )
        self._metrics.in_epoch = True
        # If a callback has set `stop_training`, this was the last batch of the epoch.
        at_last = progress.batches == progress.epoch_steps
        progress.at_end = at_last or bool(self.model.stop_training)
        self._maybe_save()

    def epoch_trained(self, epoch: int) -> None:
        """Count the epoch."""
        progress = self._progress
        if self._data is not None:
            self._data.end_epoch()
            self._keep_data_position()
        # The first epoch determines an unknown number of batches.
        progress.epoch_steps = progress.epoch_steps or progress.batches
        progress.epoch, progress.batches = self._earlier_epochs + epoch + 1, 0

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save if a checkpoint is due. A collective."""
        assert self._manager is not None
        progress = self._progress
        progress.at_end = False
        progress.stopped = bool(self.model.stop_training)
        progress.epoch_began = None
        self._metrics.in_epoch = False
        self._begin.epoch_ends(self.model, progress.callbacks)
        metrics = _numbers(logs)
        wanted = progress.stopped or progress.epoch == self._epochs
        if self._every_epochs is not None:
            wanted = wanted or progress.epoch % self._every_epochs == 0
        if self._maybe_save(metrics) or not wanted:
            return
        if any(each.window_passes for each in self._distributions):
            # On several ranks `fit` has closed the window already.
            log.warning(
                "epoch %d ends inside an accumulation window, so no checkpoint is saved until a "
                "save is due after the window. To save at the end of each epoch, choose "
                "accumulation_steps that divide its number of batches.",
                epoch + 1,
            )
            return
        self._manager.save(progress.step, progress.epoch, metrics)
        self._in_run = True

    def _maybe_save(self, metrics: dict[str, float] | None = None) -> bool:
        assert self._manager is not None
        try:
            saved = self._manager.maybe_save(self.step, self._progress.epoch, metrics)
            self._in_run |= saved
            return saved
        except SystemExit:
            # All ranks stop here.
            self._manager.close()
            raise

    def fit_ends(self) -> None:
        """Wait until the last checkpoint is on the disk. A collective."""
        assert self._manager is not None
        set_next_epoch(None)
        self.model._initial_epoch = None
        self._manager.close()
        if self._elastic:
            end_position(self._store.location)


@dataclass
class _Progress:
    """A `StatefulItem`: the position of the training.

    Attributes:
        step: the number of batches that each rank has trained.
        fit: the number of calls of `fit` with this callback.
        epoch: the current epoch, or the next one between two epochs.
        batches: the number of batches of this epoch that are trained.
        epoch_steps: batches of an epoch; None if unknown.
        saved_size: the size of an epoch in the job that saved the restored checkpoint.
        stopped: whether `stop_training` has ended the training.
        at_end: whether the last batch of the epoch has been trained, but the metrics of the epoch
            are not known yet. A due save waits for these metrics.
        epoch_began: the random states at the beginning of the epoch. A resume without a sampler
            needs them to read the same data again. None with a sampler, or between two epochs.
        callbacks: the callbacks of `fit`, without the `Checkpoint`.
    """

    step: int = 0
    fit: int = 0
    epoch: int = 0
    batches: int = 0
    epoch_steps: int | None = None
    saved_size: EpochSize | None = None
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
            "ranks": backend.hvd.size(),
            "stopped": self.stopped,
        }

    def plan_restore(self, tree: Tree) -> Tree:
        """Check that the checkpoint was saved in the same call of `fit`.

        Raises:
            UsageError: the checkpoint was saved in another call.
        """
        # Earlier versions did not save the number of the call.
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
        # Checkpoints of earlier versions lack the number of ranks.
        self.saved_size = EpochSize(tree["epoch_steps"], tree.get("ranks", backend.hvd.size()))

    @property
    def read(self) -> int:
        """The number of batches that have been read, in batches of the current number of ranks."""
        ranks = backend.hvd.size()
        return self.step * (self.saved_size.ranks if self.saved_size else ranks) // ranks

    def rescale(self) -> None:
        """Keep the same fraction of the epoch if the size of an epoch has changed."""
        if self.saved_size is not None:
            size = EpochSize(self.epoch_steps, backend.hvd.size())
            self.batches = size.resumed_after(self.batches, self.saved_size)

    def set_epoch_began(self, tree: Tree) -> None:
        """Restore the random states at the beginning of the epoch."""
        self.epoch_began = tree


class _Metrics:
    """A `RankItem`: the state of this rank's metrics since the epoch began.

    Attributes:
        in_epoch: whether batches of the current epoch have been trained.
        restored: the state in the checkpoint, until the metrics exist.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.in_epoch = False
        self.restored: Tree = None

    def _variables(self) -> OwnVariables:
        return OwnVariables(lambda: metric_variables(self.model))

    def save(self) -> Tree:
        """Return the state; None between two epochs, because `fit` resets metrics then."""
        return self._variables().save() if self.in_epoch else None

    def restore(self, tree: Tree) -> None:
        """Keep the state until `fit` has reset the metrics."""
        self.restored = tree

    def apply(self, tree: Tree) -> None:
        """Restore the state of the metrics."""
        if tree is not None:
            self._variables().restore(tree)
            self.in_epoch = True


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in logs.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue
    return found
