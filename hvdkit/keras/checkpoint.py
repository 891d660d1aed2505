"""`hvd.callbacks.Checkpoint`: save and resume `fit`."""

import logging
import os
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

# Keras's own callbacks print with `io_utils`.
from keras.src.utils import io_utils

from hvdkit.agreement.consistency import prepare_on_all_ranks
from hvdkit.agreement.process_sets import check_one_model
from hvdkit.checkpoint.items import data_item, kept_in
from hvdkit.checkpoint.replaced_state import end_position, keep_position, take_position
from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.signals import STOP_SIGNALS
from hvdkit.checkpoint.state import StatefulItem, Tree
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.callback_states import CallbackStates
from hvdkit.keras.data import check_loaders_of, check_steps, samplers_read
from hvdkit.keras.fit.collective_callbacks import LastCallback
from hvdkit.keras.fit.epoch_begin import EpochBegin
from hvdkit.keras.fit.metrics import numbers_of
from hvdkit.keras.fit.progress import Progress, warn_without_epochs
from hvdkit.keras.fit.resuming import ResumedEpoch, set_next_epoch
from hvdkit.keras.fit.saved_fit import SavedFit, open_fit
from hvdkit.keras.further_optimizers import build_for_training
from hvdkit.keras.models import (
    finalize,
    fit_optimizers,
    is_built,
    main_optimizer,
    reduced_over,
)
from hvdkit.keras.optimizer import distribution_of
from hvdkit.runtime.elastic_start import ElasticStart

log = logging.getLogger("hvdkit.keras")


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
        self._verbose = verbose
        self._settings: dict[str, Any] = {
            "every_steps": every_steps,
            "every_minutes": every_minutes,
            "every_steps_in_memory": every_steps_in_memory,
            "asynchronous": asynchronous,
            "stop_signals": stop_signals,
            "overwrite": not resume,
        }
        self._metadata = {} if metadata is None else metadata
        self._progress = Progress()
        self._begin = EpochBegin()
        self._elastic = ElasticStart.read() is not None
        #: None before the first `fit`.
        self._fit: SavedFit | None = None
        self._resumed: ResumedEpoch | None = None
        # Whether the newest run in the folder is the run of this job.
        self._in_run = False
        # The position in the data, for commits.
        self._data_position: Tree = None

    @property
    def metadata(self) -> MutableMapping[str, Any]:
        """Your own values in the checkpoint: the dict that was given. Change its items."""
        return self._metadata

    @property
    def step(self) -> int:
        """The number of batches that each rank has trained."""
        return self._progress.position.step

    def fit_begins(self, callbacks: Sequence[Any]) -> None:
        """Restore the newest checkpoint, if there is one. A collective.

        If a commit of an elastic job has restored the state, keep it, and continue from there.

        Raises:
            UsageError: on every rank, if the model does not match the checkpoint. Also if the model
                is not built, or `data` does not fit; if so on some ranks only, the other ranks
                raise RankMismatchError.
            CheckpointError: on every rank, if all checkpoints are damaged.
        """
        model, before = self.model, self._progress
        others = [callback for callback in callbacks if callback is not self]
        self._progress = Progress(before.fit + 1, self.params.get("steps"), before.position)
        # The commit has the positions of the first rank, whose folder may have another name.
        name = backend.hvd.broadcast_object(self._store.location) if self._elastic else ""
        committed = take_position(name)

        def prepare() -> tuple[None, Sequence[str]]:
            self._check_fit(model)
            if committed is not None:
                self._restore_position(committed, others)
            return None, ()

        distribution = distribution_of(main_optimizer(model))
        collectives = distribution.collectives if distribution else backend.collectives()
        prepare_on_all_ranks(collectives, prepare, "the fit to save")
        items: dict[str, StatefulItem] = {
            "progress": self._progress,
            "callbacks": self._callback_states(others),
            "metadata": kept_in(self.metadata),
        }
        if self._data is not None:
            items["data"] = self._data
        fit = open_fit(
            *(model, others, self._progress, items, self._store, collectives),
            # A second `fit` continues the run of the first.
            run=None if self._fit is None else self._fit.manager.run,
            **self._settings,
        )
        weakref.finalize(self, fit.manager.abandon)
        # The restore and the first batch, with the compilation of the graph, may take minutes.
        fit.manager.record_signals()
        resumes = committed is not None
        # A second `fit` continues with the state in memory.
        may_resume = self._resume and self._fit is None
        if committed is not None:
            if may_resume or self._in_run:
                fit.manager.continue_at(self.step)
        elif may_resume:
            try:
                resumes = self._in_run = fit.manager.restore() is not None
            except BaseException:
                # The script may go on without this callback: signals must end it.
                fit.manager.abandon()
                raise
        self._fit = fit
        if self._elastic:
            self._keep_data_position()
            keep_position(self._store.location, self)
        if not resumes:
            self._begin.epoch_ends(model, others)
        else:
            finalize(model)
            self._resume_fit(fit)
            if self._verbose and backend.hvd.rank() == 0:
                io_utils.print_msg(
                    f"resumed after step {self.step}, in epoch {self._progress.position.epoch + 1}"
                )

    @property
    def _running(self) -> SavedFit:
        assert self._fit is not None
        return self._fit

    def position(self) -> Tree:
        """Return the position of the training, for a commit of an elastic job."""
        return {
            "progress": self._progress.save(),
            "in_run": self._in_run,
            "callbacks": self._callback_states(self._running.callbacks).save(),
            "metadata": dict(self.metadata),
            "data": self._data_position,
        }

    def _callback_states(self, callbacks: Sequence[Any]) -> CallbackStates:
        kept = [*callbacks, self._begin]
        return CallbackStates(lambda: kept)

    def _keep_data_position(self) -> None:
        """Keep the position in the data. `save` raises later, when `fit` reads the next epoch."""
        if self._elastic and self._data is not None:
            self._data_position = self._data.save()

    def _restore_position(self, position: Tree, callbacks: Sequence[Any]) -> None:
        """Restore a result of `position`.

        Raises:
            UsageError: the commit was made in another call of `fit`, or with other data.
        """
        progress, data = self._progress, position["data"]
        progress.restore(progress.plan_restore(position["progress"]))
        self._in_run = position["in_run"]
        self._callback_states(callbacks).restore(position["callbacks"])
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
        if self._data is not None:
            check_steps(self._data, self._progress.epoch_steps)

    def _resume_fit(self, fit: SavedFit) -> None:
        """Make `fit` begin at the position of the checkpoint."""
        progress, epochs, model = self._progress, self._epochs, self.model
        position, in_epoch = progress.position.resumed(self._data, progress.epoch_steps)
        progress.position = position
        if position.stopped or not in_epoch:
            warn_without_epochs(position, epochs, self._store.location)
        # `fit` reads `_initial_epoch` after `on_train_begin`.
        begin = epochs if position.stopped else position.epoch
        model._initial_epoch = max(begin - fit.earlier_epochs, 0)
        read = position.read if self._data is None else None
        if not in_epoch or position.stopped:
            progress.epoch_began = None
            self._begin.epoch_ends(model, fit.callbacks)
            if read is not None and begin < epochs:
                self._resumed = ResumedEpoch(
                    *(0, read), prepare=lambda _: None, before=lambda: None, keep=fit.keep_own
                )
            return
        self._begin.resume(model, fit.callbacks)
        own, began = fit.keep_own(), progress.epoch_began

        def prepare(epoch: Any) -> None:
            # A model without `call` has only metrics of its own, which exist already.
            if model.built:
                backend.build_metrics(model, epoch)
            fit.metrics.apply()

        def before() -> None:
            if self._data is None and began is not None:
                fit.rank_items["random"].restore(began)

        # The interrupted run has created its iterator before its save.
        self._resumed = ResumedEpoch(
            position.batches, read, prepare=prepare, before=before, keep=lambda: own
        )

    @property
    def _epochs(self) -> int:
        """The number of epochs at the end of this `fit`, with those before it."""
        return self._running.earlier_epochs + int(self.params["epochs"])

    def epoch_begins(self, epoch: int) -> None:
        """Begin at the position of the checkpoint."""
        fit, progress = self._running, self._progress
        self.model._initial_epoch = None
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            set_next_epoch(resumed)
        self._begin.epoch_begins(self.model, fit.callbacks)
        if resumed is None or not resumed.batches:
            progress.position = progress.position.before(fit.earlier_epochs + epoch)
            if self._data is None:
                # `fit` shuffles arrays with these states.
                progress.epoch_began = fit.rank_items["random"].save()

    def batches_trained(self, batches: range) -> None:
        """Count the batches."""
        self._progress.position = self._progress.position.after(batches)
        if self._data is not None:
            self._data.advance(len(batches))
            self._keep_data_position()

    def batches_end(self, batches: range) -> None:  # noqa: ARG002
        """Save if a checkpoint is due. A collective."""
        if self._data is None and samplers_read():
            raise UsageError(
                "the data of fit come from a ResumableSampler, whose position is not saved: pass "
                "data=sampler to hvd.callbacks.Checkpoint; for loader = hvd.shard(...), pass "
                "data=loader.sampler"
            )
        self._maybe_save()

    def epoch_trained(self, epoch: int) -> None:
        """Count the epoch."""
        progress = self._progress
        if self._data is not None:
            self._data.end_epoch()
            self._keep_data_position()
        # The first epoch determines an unknown number of batches.
        progress.epoch_steps = progress.epoch_steps or progress.position.batches
        progress.position = progress.position.before(self._running.earlier_epochs + epoch + 1)

    def epoch_ends(self, epoch: int, logs: dict[str, Any]) -> None:
        """Save if a checkpoint is due. A collective."""
        fit, progress = self._running, self._progress
        position = replace(progress.position, stopped=bool(self.model.stop_training))
        progress.position, progress.epoch_began = position, None
        self._begin.epoch_ends(self.model, fit.callbacks)
        metrics = numbers_of(logs)
        wanted = position.stopped or position.epoch == self._epochs
        if self._every_epochs is not None:
            wanted = wanted or position.epoch % self._every_epochs == 0
        if self._maybe_save(metrics) or not wanted:
            return
        if any(each.window_passes for each in fit.distributions):
            # On several ranks `fit` has closed the window already.
            log.warning(
                "epoch %d ends inside an accumulation window, so no checkpoint is saved until a "
                "save is due after the window. To save at the end of each epoch, choose "
                "accumulation_steps that divide its number of batches.",
                epoch + 1,
            )
            return
        fit.manager.save(position.step, position.epoch, metrics)
        self._in_run = True

    def _maybe_save(self, metrics: dict[str, float] | None = None) -> bool:
        manager = self._running.manager
        try:
            saved = manager.maybe_save(self.step, self._progress.position.epoch, metrics)
            self._in_run |= saved
            return saved
        except SystemExit:
            # All ranks stop here.
            manager.close()
            raise

    def fit_ends(self) -> None:
        """Wait until the last checkpoint is on the disk. A collective."""
        set_next_epoch(None)
        self.model._initial_epoch = None
        self._running.manager.close()
        if self._elastic:
            end_position(self._store.location)
