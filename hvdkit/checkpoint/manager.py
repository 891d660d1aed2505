"""Save and restore the state of a job: `Manager`, on which the checkpointers of all adapters build.

All ranks call each method, and only the first rank uses the storage. All ranks return the same
result, or all of them raise, whichever rank had the error. Facts that only one rank knows (the
clock, a signal, a failed write) are communicated before a decision depends on them.
"""

import logging
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import hvdkit
from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.replicas import ReplicaCheck
from hvdkit.checkpoint import calls, memory
from hvdkit.checkpoint.background import BackgroundWriter
from hvdkit.checkpoint.calls import StepWord
from hvdkit.checkpoint.checkpointers import Checkpointers, end_process, stopped
from hvdkit.checkpoint.coordination import call_on_first, compare, exchange
from hvdkit.checkpoint.host_memory import HostMemory
from hvdkit.checkpoint.manifest import check_part_name
from hvdkit.checkpoint.memory import Allocate
from hvdkit.checkpoint.replaced_state import follow
from hvdkit.checkpoint.restoring import NOTHING_RESTORED, Restoring, wanted_parts
from hvdkit.checkpoint.retention import KeepBest, Mode
from hvdkit.checkpoint.saved_steps import Restored, SavedStep, best_of, described
from hvdkit.checkpoint.saving import Prepared, Saving, check_arguments
from hvdkit.checkpoint.schedule import Schedule
from hvdkit.checkpoint.signals import STOP_SIGNALS, StopSignals
from hvdkit.checkpoint.snapshot import SnapshotMemory
from hvdkit.checkpoint.state import RankItem, StatefulItem, is_divided
from hvdkit.checkpoint.step_boundary import LACKS_WINDOW, StepBoundary, misplaced
from hvdkit.checkpoint.step_files import EncodedPart, Snapshot
from hvdkit.checkpoint.storage import check_number
from hvdkit.checkpoint.store import StepSearch, Store
from hvdkit.errors import UsageError
from hvdkit.runtime.counters import counters

_log = logging.getLogger("hvdkit.checkpoint")


class Manager:
    """Save and restore a job's state. A context manager.

    Every rank creates a manager, with the same arguments.

    Args:
        store: the storage. Only the first rank uses it.
        collectives: of the ranks of the job.
        parts: name of a part -> its item, whose state is the same on all ranks. The first rank's
            state is saved, and restored on all ranks, in this order. For a `DividedItem`, every
            rank's parts are saved.
        rank_parts: name of a part -> its item, which has its own state on each rank. These items
            are restored after `parts`, in this order, and only in a job with the same number of
            ranks. With another number of ranks, a `RequiredRankItem` makes `restore` fail, unless
            `strict` is False.
        alike: names of parts that have no tensors. Each save checks that the content of these
            parts is equal on all ranks.
        of_this_size: names of parts that are only restored in a job with the same number of ranks.
        versions: package name -> version, such as the framework's.
        sum_order: returns a text that describes the order in which gradients are added, see
            `HostCollectives.sum_order`. The text is saved, and a restore warns if it differs.
        every_steps: `maybe_save` saves at the first call at or after each multiple of this number.
        every_minutes: `maybe_save` saves after this many minutes, by the first rank's clock.
        every_steps_in_memory: `maybe_save` keeps the state in the memory of each host, at the first
            call at or after each multiple of this number. Not with divided tensors.
        asynchronous: write while training continues. Otherwise `save` returns after the write.
        overwrite: for a folder that has steps, of which none was restored. True: begin a new run
            there. False: `save` raises an error.
        run: the `run` of an earlier manager of this process, which this manager continues. None:
            continue the run of the restored step, or begin a new run.
        stop_signals: signals that make `maybe_save` save and stop the job; see `StopSignals`.
        boundary: the places of this rank between the steps of its optimizers. `maybe_save` only
            saves at a boundary.
        note_save: called with the step of each save. None: log a warning if this rank is not at a
            boundary.
        cannot_save_now: returns whether `maybe_save` must not save now for another reason. This
            must not last.
        replicas: returns a `ReplicaCheck` for each optimizer, in the same order on all ranks; None
            for an optimizer whose replicas are not compared. Each save runs these checks.
        allocate: allocates the first rank's memory for its copy of the state.
        subjects: the models and optimizers that are saved, and objects in them, see
            `Checkpointers`.

    Attributes:
        location: the path or URL of the storage.
        subjects: the ids of the given subjects.
        restores: whether `restore` was called.

    Raises:
        UsageError: an argument is invalid; or an open checkpointer of this process saves other
            models.
    """

    def __init__(
        self,
        store: Store,
        collectives: Collectives,
        parts: Mapping[str, StatefulItem],
        *,
        rank_parts: Mapping[str, RankItem] | None = None,
        alike: Collection[str] = ("data",),
        of_this_size: Collection[str] = ("reduction",),
        versions: Mapping[str, str] | None = None,
        sum_order: Callable[[], str] = str,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_steps_in_memory: int | None = None,
        asynchronous: bool = True,
        overwrite: bool = False,
        run: int | None = None,
        stop_signals: Sequence[int] = STOP_SIGNALS,
        boundary: StepBoundary | None = None,
        note_save: Callable[[int], None] | None = None,
        cannot_save_now: Callable[[], bool] = lambda: False,
        replicas: Callable[[], Sequence[ReplicaCheck | None]] = tuple,
        allocate: Allocate = memory.allocate,
        subjects: Iterable[object] = (),
    ) -> None:
        self.location = store.location
        self.subjects = frozenset(map(id, subjects))
        self.restores = False
        self._schedule = Schedule(every_steps, every_minutes)
        for name in (*parts, *(rank_parts or {})):
            check_part_name(name)
        if every_steps_in_memory and any(map(is_divided, parts.values())):
            raise UsageError(
                f"every_steps_in_memory is {every_steps_in_memory}, and tensors are divided among "
                f"the ranks (sharded=, or DTensors): the memory of a host keeps whole states only. "
                f"Omit every_steps_in_memory"
            )
        self._store = store
        self._collectives = collectives
        self._parts = dict(parts)
        self._rank_parts = dict(rank_parts or {})
        self._alike = set(alike)
        self._of_this_size = set(of_this_size)
        self._versions = {
            "hvdkit": hvdkit.__version__,
            "python": platform.python_version(),
            **(versions or {}),
        }
        self._sum_order = sum_order
        self._checkpointers = Checkpointers.of(collectives.rank)
        self._signals = StopSignals(stop_signals, self._checkpointers.request)
        self._boundary = boundary or StepBoundary()
        # Not a bound method of this object: a cycle would keep it open until a garbage collection.
        self._note_save = note_save
        self._cannot_save_now = cannot_save_now
        self._replicas = replicas
        self._closed = False
        self._half_restored = False
        self._unknown_metrics: set[str] = set()
        self._host_memory = HostMemory(collectives, store.location, every_steps_in_memory, allocate)
        # Used on the first rank only. None: each save waits for its write, and makes no copy.
        self._memory = SnapshotMemory(allocate) if asynchronous else None
        self._writer = BackgroundWriter(store, overwrite, run)
        # The newest step that this manager has saved or restored.
        self._step: int | None = None
        self._checkpointers.add(self)
        follow(self)

    @property
    def run(self) -> int | None:
        """The current run, on the first rank; None before the first save."""
        return self._writer.run

    @property
    def _first(self) -> bool:
        return self._collectives.is_first

    @counters.timing_checkpoint
    def save(
        self,
        step: int,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Save the state as it is now. A collective.

        Compare parameters and optimizer state between the ranks, unless they were compared since
        the last optimizer step. Copy the state and return; a thread writes the copy. If the
        previous write is still running, wait for it first. With `wait`, or without `asynchronous`,
        make no copy, and return after the write.

        A checkpoint has no gradients, so call this method after the steps of all optimizers. If a
        step uses gradients that were there before the save, a warning says so.

        Args:
            step: the number of steps trained, the same on all ranks.
            epoch: the epoch of the step, for display only.
            metrics: values by name, for `keep_best` and for display. The first rank's values are
                saved. A second save of the same step replaces the first save. If the tensors are
                equal in both, the metrics that are not given again are kept.
            wait: return after everything is on the disk.

        Raises:
            UsageError: on all ranks: a rank has a state that cannot be saved, or gave another
                step; or the folder has steps of an earlier run, and none was restored.
            RankMismatchError: on all ranks: parameters or optimizer state differ between ranks, so
                the step was not saved (see `check_interval` and `on_mismatch` of
                `hvd.DistributedOptimizer`).
            CheckpointError: on all ranks: this write or the previous one failed.
        """
        self._begin("save")
        wait = bool(wait) or self._memory is None
        consequence = f"step {step} was not saved"
        # The thread uses the previous copy until it is written.
        self._finish("save", consequence)
        saving = Saving(
            *(self._collectives, self._parts, self._rank_parts, self._alike),
            replicas=self._replicas,
            memory=None if wait else self._memory,
            consequence=consequence,
        )
        prepared: Prepared | None = None
        problem: Exception | None = None
        try:
            values = check_arguments(step, epoch, metrics or {})
            self._expect_whole_state()
            if self._first:
                self._writer.open()
            prepared = saving.prepare(int(step))
        except Exception as error:
            problem = error
        content, ranks = saving.run(prepared, problem)
        self._schedule.record_save(int(step))
        (self._note_save or self._warn_of_window)(int(step))
        self._step = int(step)
        if self._first:
            snapshot = self._snapshot(step, epoch, values, content, ranks)
            self._warn_of_missing(values)
        try:
            if self._first:
                self._writer.begin(snapshot)
            if wait:
                self._finish("save")
        except BaseException:
            # The state is read in place, and the caller may change it after this error.
            if self._first:
                snapshot.withdrawn.set()
            raise

    def _snapshot(
        self,
        step: int,
        epoch: int | None,
        metrics: Mapping[str, float],
        parts: Mapping[str, EncodedPart],
        ranks: Sequence[bytes],
    ) -> Snapshot:
        return Snapshot(
            step=int(step),
            epoch=None if epoch is None else int(epoch),
            metrics=metrics,
            versions=self._versions,
            parts=parts,
            ranks=ranks,
            sum_order=self._sum_order(),
        )

    def _keep(self, step: int, epoch: int | None, metrics: Mapping[str, float] | None) -> None:
        """Keep the state as it is now in the memory of each host. A collective.

        Copy the state and return; a thread of each host writes the copy. The replicas are not
        compared. A failed write is only logged, and the step before stays in memory.

        Args:
            step: see `save`.
            epoch: see `save`.
            metrics: see `save`.

        Raises:
            UsageError, CheckpointError: on all ranks: see `save`.
        """
        self._host_memory.begin(step)
        saving = Saving(
            *(self._collectives, self._parts, self._rank_parts, self._alike),
            replicas=tuple,
            memory=self._host_memory.memory,
            consequence=f"step {step} was not kept in memory",
            writes=self._host_memory.writes,
        )
        prepared: Prepared | None = None
        problem: Exception | None = None
        note: Mapping[str, Any] = {}
        try:
            note = {"metrics": check_arguments(step, epoch, metrics or {}), "run": self.run}
            prepared = saving.prepare(int(step))
        except Exception as error:
            problem = error
        content, ranks, note = saving.run_everywhere(
            prepared, problem, note, self._host_memory.others_write
        )
        if self._host_memory.writes:
            snapshot = self._snapshot(step, epoch, note["metrics"], content, ranks)
            self._host_memory.write(snapshot, note["run"])

    def _warn_of_window(self, step: int) -> None:
        if self._first and self._boundary.place() is not None:
            _log.warning(LACKS_WINDOW, step)

    def _warn_of_missing(self, metrics: Mapping[str, float]) -> None:
        """Warn once for each metric of `keep_best` that is missing in a step's metrics."""
        missing = set(self._store.retention.missing(metrics)) if metrics else set()
        for name in sorted(missing - self._unknown_metrics):
            _log.warning(
                "keep_best ranks steps by the metric %r, but save() got only %s: keep_best does "
                "not keep this step",
                *(name, ", ".join(sorted(metrics))),
            )
        self._unknown_metrics.update(missing)

    @counters.timing_checkpoint
    def maybe_save(
        self,
        step: int,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Save if a save is due. If the job was asked to stop, save and stop. A collective.

        Call it after every step, or after every pass. It costs one allreduce of 24 bytes.

        If no save is due, but `every_steps_in_memory` is: keep the state in the memory of each
        host. If a host still writes the step before, a later call does this.

        A checkpoint has no gradients. So this method does not save between a backward pass and the
        next step or `zero_grad()`, or in an accumulation window. If any rank is there, a later call
        saves.

        Returns:
            Whether the state was saved on disk.

        Raises:
            Stopped: on all ranks: a rank got a stop signal, and the state is on the disk. The
                process exits with status 75 (`RESUMABLE`).
            UsageError: see `save`; also if the step is lower than in an earlier call, for example
                because the loop counts the batches of each epoch from 0. Only after a restart of
                an elastic job, the first step may be lower, see `state_replaced`. Also if the calls
                always come between a pass and its step, so that none could save.
            RankMismatchError: see `save`.
            CheckpointError: see `save`; also if no save is due, but an earlier write has failed.
        """
        self._check_open()
        self._expect_whole_state()
        self.record_signals()
        if self._first:
            # If the folder cannot be written, report this now, and not only at the first save.
            self._writer.try_to_open()
        ranks = len(self._collectives.ranks)
        waits, never = self._boundary.ask()
        wrong = self._schedule.error_at(step) or (misplaced(step) if never else None)
        first = 0
        if self._first:
            first += calls.LATE * self._schedule.is_late()
            first += calls.FAILED * self._writer.failed
        agreed = StepWord(
            due=int(wrong is None and self._schedule.is_due(step)),
            stops=int(bool(self._checkpointers.request.asked) and not self._is_archive),
            waiting=int(waits),
            blocked=int(bool(self._cannot_save_now())),
            first=first,
            wrong=int(wrong is not None),
            keeps=int(wrong is None and self._host_memory.ready(step, self._step)),
        ).sum(self._collectives)
        if agreed.present < ranks:
            # Some ranks have called `join`, and take part in reductions only.
            return False
        if any(agreed.calls):
            calls.exchange_in_call(self._collectives, "maybe_save")
        if agreed.wrong:
            exchange(self._collectives, {}, wrong)
        self._schedule.see(step)
        if not agreed.waiting:
            self._boundary.reach()
        if agreed.first & calls.FAILED:
            self.wait()
        if agreed.due not in (0, ranks):
            told = exchange(self._collectives, {"step": int(step)})
            compare(self._collectives, [each["step"] for each in told], "the step")
        if agreed.blocked or agreed.waiting:
            return False
        if agreed.stops:
            self.save_and_stop(step, epoch, metrics)
        if agreed.due or agreed.first & calls.LATE:
            self.save(step, epoch, metrics)
            return True
        if agreed.keeps == ranks:
            self._keep(step, epoch, metrics)
        return False

    @property
    def _is_archive(self) -> bool:
        return self._checkpointers.is_archive(self)

    def _all(self, answer: bool) -> bool:
        """Return whether the answer is yes on all ranks, which are in `close`. A collective."""
        told = calls.exchange_in_call(self._collectives, "close", {"yes": answer})
        return all(each["yes"] for each in told)

    def save_and_stop(
        self,
        step: int,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save, and end the job with the exit status of a resumable job. A collective.

        Raises:
            Stopped: on all ranks, once the state is on the disk.
            UsageError, CheckpointError: see `save`.
        """
        self.save(step, epoch, metrics, wait=True)
        raise stopped(self._checkpointers.request, self._step, self._first)

    def record_signals(self) -> None:
        """Record stop signals from now on, for the next `maybe_save`. Not a collective.

        `maybe_save` and `with` do so too. Without this call, a signal before the first `maybe_save`
        ends the process.
        """
        self._check_open()
        self._signals.install()

    def request_stop(self, reason: str = "request_stop()") -> None:
        """Make the next `maybe_save` save and stop, as a stop signal does. Not a collective.

        Args:
            reason: the reason, for the log. It must not be empty.
        """
        self._checkpointers.request.asked = reason

    def restore(
        self,
        step: int | None = None,
        run: int | None = None,
        *,
        strict: bool = True,
        only: Collection[str] | None = None,
    ) -> Restored | None:
        """Restore the newest good step of the newest run. A collective.

        A step is good if its files are complete and match their hashes. Without `step`, `run` and
        `only`, the newest step may be one in the memory of a host.

        Args:
            step: restore this step only. If newer steps exist, they stay, and the next save begins
                a new run from this step.
            run: restore from this run instead of the newest.
            strict: True: all state must fit. False: restore the state that fits. A warning names
                the rest, for example a scheduler that was added, or a layer whose shape differs.
            only: restore only these items, given by the names of the checkpointer's arguments,
                such as `("model",)`. The next save begins a new run. None: restore all items.

        Returns:
            The restored step. None if there is no checkpoint; then nothing was changed.

        Raises:
            UsageError: on all ranks: the state does not fit, or there is no such `step`.
            CheckpointError: on all ranks: no step is good, or the folder cannot be read.

        Tensors are verified while they are read. If a step is found to be damaged after some of its
        tensors were restored, the next older step is restored over it. If that fails, the error
        says that the state is half restored; after any other error nothing has changed.
        """
        self._begin("restore")
        self._finish("restore", NOTHING_RESTORED)
        message: dict[str, Any] = {}
        memory: Mapping[str, Any] | None = None
        problem: Exception | None = None
        try:
            for name, value in (("step", step), ("run", run)):
                if value is not None:
                    check_number(name, value)
            parts = wanted_parts(only, {*self._parts, *self._rank_parts})
            message = {
                subject: "the newest" if wanted is None else str(wanted)
                for subject, wanted in (("step", step), ("run", run))
            } | {"strict": str(strict), "only": str(sorted(parts))}
            newest = step is None and run is None and only is None
            memory = self._host_memory.described() if newest else None
        except Exception as error:
            problem = error
        asked = exchange(self._collectives, message | {"memory": memory}, problem)
        for subject in message:
            compare(
                self._collectives,
                [each[subject] for each in asked],
                f"the argument {subject!r} of restore()",
            )
        if self._first and step is None and self._is_archive:
            _log.warning(
                "%s is restored, but is an archive beside another open checkpointer. After a stop "
                "signal, only the other one saves. If its training has ended, close() it. To "
                "continue an archive, call continue_at(step) instead of restore()",
                self.location,
            )
        self.restores = True
        restoring = Restoring(
            *(self._collectives, self._parts, self._rank_parts, self._of_this_size),
            wanted=parts,
            strict=strict,
            sum_order=self._sum_order(),
        )
        try:
            search: StepSearch | None = self._host_memory.search(
                self._store.search(step, run) if self._first else None,
                [each["memory"] for each in asked],
                whole=not strict,
            )
            found = restoring.run(search)
        finally:
            self._half_restored |= restoring.half_restored
        if found is None:
            return None
        self._half_restored = False
        # A restore with `only` begins another training, which counts its own steps.
        self._step = found.step if only is None else None
        self._schedule.record_restore(self._step)
        self._boundary.reach()
        if only is not None:
            self._writer.begin_run()
        elif self._host_memory.note_restored(found, search):
            self._writer.continue_run(found.run)
        elif self._first:
            self._writer.restored(found)
        return Restored(found.step, found.epoch, found.metrics, found.world_size)

    def continue_at(self, step: int) -> None:
        """Continue the newest run at a step, without a restore. A collective.

        For an archive, after the other checkpointer has restored the state. Also for a caller that
        has restored the state from a commit of an elastic job. If the folder has newer steps, they
        stay as after `state_replaced`.

        Args:
            step: the number of steps that were trained, 0 if nothing was restored.

        Raises:
            UsageError: on all ranks: the step is not valid, or ranks give different ones.
            CheckpointError: on all ranks: the folder cannot be read.
        """
        self._begin("restore")
        calls.check_step(self._collectives, step, "the step to continue at")
        call_on_first(self._collectives, self._writer.continue_newest)
        self._schedule.record_restore(step)
        self._step = step
        self._boundary.reach()

    def state_replaced(self) -> None:
        """Accept a step before that of the newest checkpoint. Not a collective.

        `hvd.elastic.run` calls this on all ranks after it has restored a commit. The commit may be
        older than the restored checkpoint. The commit counts nevertheless: a script of Horovod's
        elastic API expects the state of the last commit on all ranks, and the state may have
        objects that the checkpoint lacks, such as counters or the position in the data.

        So the next `maybe_save` or `save` may have a lower step, and the schedule continues from
        that step. The newer checkpoints stay in the folder. Until the first new save, a restart
        without a commit restores the newest of them. Afterwards, a restart restores the new save.
        A save of the same step replaces the step, and retention deletes the others in time.
        """
        self._schedule.allow_lower()
        self._boundary.reach()

    def steps(self) -> list[SavedStep]:
        """List the complete steps of the newest run, oldest first. A collective.

        Wait for the current write, so that its step is in the list.

        Raises:
            CheckpointError: on all ranks: a write failed, or the folder cannot be read.
        """
        self._begin("steps")
        self._finish("steps")
        listed = call_on_first(self._collectives, lambda: described(self._store))
        return [SavedStep(**fields) for fields in listed]

    def latest(self) -> int | None:
        """Return the step that was saved last; None if there is none. A collective.

        Raises:
            CheckpointError: see `steps`.
        """
        steps = self.steps()
        return steps[-1].step if steps else None

    def best(self, metric: str, mode: Mode | None = None) -> int | None:
        """Return the step with the best value of a metric. A collective.

        Args:
            metric: its name, as given to `save`.
            mode: "min" or "max"; optional if the name implies it, see `KeepBest`.

        Returns:
            The step; the newest one if several have the best value. None if there are no steps, or
            the metric was NaN in all.

        Raises:
            UsageError: the name does not imply the mode; or there are steps, and none has the
                metric.
            CheckpointError: see `steps`.
        """
        wanted = KeepBest(metric, mode)
        return best_of(self.steps(), wanted)

    def delete(self, step: int) -> None:
        """Delete a step of the newest run. A collective.

        Raises:
            UsageError: on all ranks: there is no such step, or ranks give different ones.
            CheckpointError: on all ranks: another process writes to the folder, or the step could
                not be deleted.
        """
        self._begin("delete")
        self._finish("delete")
        calls.check_step(self._collectives, step, "the step to delete")
        call_on_first(self._collectives, lambda: self._writer.delete(step))

    def wait(self) -> None:
        """Wait until everything is on the disk. A collective.

        Raises:
            CheckpointError: on all ranks: a write failed.
        """
        self._begin("wait")
        self._finish("wait")

    def _begin(self, call: str) -> None:
        """Begin a call other than `maybe_save`. A collective.

        Raises:
            UsageError: the manager is closed on this rank; or see `calls.begin`.
        """
        self._check_open()
        calls.begin(self._collectives, call)

    def _expect_whole_state(self) -> None:
        """Raise UsageError if the last restore failed after it had changed the state."""
        if self._half_restored:
            raise UsageError(
                "the state is half restored, because restore() failed: expected a successful "
                "restore() before the state is saved"
            )

    def _finish(self, call: str, consequence: str = "") -> None:
        """Wait for the current write, if any. A collective, see `calls.finish`."""
        calls.finish(self._collectives, call, self._writer.finished, consequence)

    def close(self) -> None:
        """Wait for the current write and release the storage. A collective; may be called twice.

        Raises:
            CheckpointError: on all ranks: a write failed.
            Stopped: on all ranks: a stop signal came after the last `maybe_save`, and a step is
                saved.
        """
        if self._closed:
            return
        if self._first and self._boundary.waits and self._schedule.missed:
            _log.warning(
                "a save was due, but each call of maybe_save up to step %d came between a backward "
                "pass and its step. Call save() at the end of the training",
                self._schedule.seen_step,
            )
        request = self._checkpointers.request
        can_stop = stops = False
        try:
            self.wait()
            is_saved = self._step is not None and not self._is_archive
            # An archive may be closed after the checkpointer that resumes the job.
            can_stop = self._all(is_saved or request.end_process is not None)
            # A signal that came after the last `maybe_save`.
            unanswered = request.unanswered is not None
            stops = can_stop and not self._all(not unanswered or self._signals.is_for_script)
        finally:
            self._end(keep_signals=can_stop)
        if stops and request.end_process is not None:
            request.end_process(request.unanswered)
        if self._checkpointers.is_last(self):
            self._signals.deliver()

    def _end(self, keep_signals: bool) -> None:
        self._closed = True
        request = self._checkpointers.request
        if keep_signals and self._step is not None and not self._is_archive:
            # Horovod may be shut down, so this does not ask for the rank.
            request.end_process = partial(end_process, request, self._step, self.run is not None)
        self._checkpointers.remove(self)
        self._signals.remove(keep_signals)
        self._writer.close()
        self._host_memory.close()

    def abandon(self) -> None:
        """Close on this rank alone, and log an error instead of raising it. Not a collective.

        For a rank that ends with an exception; the other ranks may continue. A `with` block calls
        `abandon` after an exception, and otherwise `close`. If the script continues with another
        checkpointer, that one stops the job after a stop signal that came before.
        """
        if self._closed:
            return
        self._closed = True
        try:
            while not self._writer.finished(calls.WAIT_SECONDS):
                pass
        except Exception as error:
            _log.error("the last save failed: %s", error)
        finally:
            self._end(keep_signals=self._checkpointers.request.stopped_at is not None)

    def __enter__(self) -> Self:
        self._check_open()
        if not self._schedule.is_empty:
            # Before DataLoader workers are forked: a signal to the process group must not end them.
            self.record_signals()
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abandon()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                "the checkpointer is closed: make a new one. In Keras, a fit with a Checkpoint "
                "inside another fit closes the Checkpoint of the outer fit"
            )
