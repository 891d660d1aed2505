"""Collectives and joint decisions of the ranks that run one `fit` together.

The callback list of `hvdkit.keras.fit.callback_list` makes a `Coordination` for each `fit` and
calls it.
"""

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.agreement.consistency import (
    RankMismatchError,
    all_equal,
    check_consistency,
    digest,
    digest24,
    group_by_text,
)
from hvdkit.agreement.names import without_layer_numbers, without_model_names
from hvdkit.agreement.replicas import CheckSettings, ReplicaCheck, find_difference
from hvdkit.agreement.same_data import PASSES, SameData
from hvdkit.agreement.waiting import warning_while_waiting
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.fit.batch_check import batch_check_of
from hvdkit.keras.fit.fit_call import initial_epoch
from hvdkit.keras.fit.layer_state import compare_layers
from hvdkit.keras.fit.metrics import MetricState, flatten, reduce_logs
from hvdkit.keras.fit.statistics import (
    StatisticsAverage,
    compared_buffers,
    statistics_of,
    synchronized_by_strategy,
)
from hvdkit.keras.functions import broadcast_model, calls
from hvdkit.keras.models import distributions_of, has_own_step
from hvdkit.keras.replicas import keras_replicas

log = logging.getLogger("hvdkit.keras")

_WAITING_ADVICE = (
    "every rank must call fit, or in a loop of its own, on_train_begin of its CallbackList. To "
    "train on this rank only, do so in `with hvd.local_fit():`."
)

_FIRST_ADVICE = (
    "Mean gradients never make different values equal. Pass "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit, or call "
    "hvd.broadcast_model(model, root_rank=0) before fit. If ranks should have different values, "
    "pass check_parameters=False to hvd.DistributedOptimizer."
)
_UNREDUCED_ADVICE = (
    "Each rank trains this part of the model separately, because no hvd.DistributedOptimizer "
    "reduces its gradients. Wrap every optimizer of the model with hvd.DistributedOptimizer. If "
    "train_step itself reduces the gradients, pass "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit."
)
_CHANGED_ADVICE = (
    "A layer changes this variable in call, from the batches of its own rank, and hvdkit does not "
    "reduce it. So each rank has another model, and only that of rank 0 is saved. In training, "
    "reduce the numbers that call computes from a batch, with hvd.allreduce. If ranks should have "
    "different values, pass hvd.callbacks.BroadcastGlobalVariablesCallback(0, "
    "local_variables=[variable]) to fit."
)
_SAME_DATA_ADVICE = (
    "Give each rank its own part: data = hvd.shard(data). Random data need another seed on each "
    "rank"
)

_logged: set[str] = set()
# The models in whose training step a collective was called, when it ran or was traced.
_calling: "weakref.WeakSet[Any]" = weakref.WeakSet()

_BATCH_HOOKS = ("on_train_batch_begin", "on_batch_begin", "on_train_batch_end", "on_batch_end")


class HasLocalVariables(keras.callbacks.Callback):
    """Base of callbacks with variables that are local to each rank.

    Attributes:
        local_variables: each one a `keras.Variable` or a variable of the framework.
    """

    local_variables: list[Any]


class Coordination:
    """The collectives and joint decisions of one `fit` or `evaluate`.

    Args:
        model: the model.
        requested: whether a callback on this rank requests metrics over all ranks.
        needs_one_model: whether a callback on this rank cannot work with a separate model on each
            rank.
        collective: the class names of the callbacks whose hooks are collectives, in their order.
        changing: the class names of Keras's callbacks that change the model or its optimizer, in
            their order. They are compared unless `check_parameters` is off.

    Attributes:
        in_use: whether this rank needs coordination: its model has a wrapped optimizer or a custom
            `train_step`, or a callback requests metrics over all ranks.
        group: the collectives of the coordinated ranks.
        checks_loss: whether a callback on any rank reacts to a loss that is not finite.
        stops_at_batches: whether a callback on any rank may stop training after a batch.
        changes_at_end: whether `on_train_end` of a callback on any rank may change weights.
    """

    def __init__(
        self,
        model: Any,
        requested: bool,
        needs_one_model: bool = False,
        collective: Sequence[str] = (),
        changing: Sequence[str] = (),
    ) -> None:
        self.model = model
        self._batches = batch_check_of(model)
        self.group = self._batches.group
        self._needs_one_model = needs_one_model
        self.distributions = distributions_of(model)
        self._has_own_step = model.compiled and has_own_step(model)
        self._trains_together = bool(self.distributions) or self._has_own_step
        if any(d.check_parameters for d in self.distributions):
            collective = [*collective, *changing]
        self._collective = ", ".join(collective) or "none"
        self.in_use = requested or self._trains_together
        # `begin` sets these to the same values on all ranks, even if the callbacks differ.
        self.checks_loss = self.stops_at_batches = self.changes_at_end = False
        # Whether this `fit` has trained a batch. All ranks have the same number of batches.
        self._has_trained = False
        self._stop_deferred = False
        self._compares_values = self._compares_unreduced = False
        # The `Distribution`s, one per wrapped optimizer, whose variables are compared every few
        # batches.
        self._compared: list[Any] = []
        # The id of a variable without gradients -> digest of its value at the beginning.
        self._before: dict[int, int] = {}
        self._trains_one_model = False
        self._asks_step = False
        self._statistics: StatisticsAverage | None = None
        self._trained: MetricState | None = None
        # The first losses of this `fit` on this rank.
        self._first_losses: list[float] = []
        # `calls()` before a batch.
        self._calls = 0
        self._same_data: SameData | None = SameData(
            self.group, self._digest_of_losses, "losses", _SAME_DATA_ADVICE
        )
        self._validated: set[str] = set()
        self._averaged: set[str] = set()

    @property
    def has_windows(self) -> bool:
        """Whether an optimizer accumulates batches."""
        return any(d.accumulation_steps > 1 for d in self.distributions)

    @property
    def _steps_per_execution(self) -> int:
        # A model in a loop of a user may not be compiled.
        return int(getattr(self.model, "steps_per_execution", None) or 1)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which logs and writes files."""
        return bool(backend.hvd.rank() == self.group.ranks[0])

    def enter(self, params: dict[str, Any], restores: bool = False) -> bool:
        """Return whether the `fit` is coordinated. A collective.

        Args:
            params: the parameters of the callbacks: `steps` in an epoch, None if unknown, and
                `epochs`. If a rank does not know its steps, `steps` becomes None on all ranks,
                because callbacks count batches with it, and all ranks must count the same.
            restores: whether this rank has a `BackupAndRestore`.

        Raises:
            UsageError: on every rank, if the numbers of steps or epochs or the callbacks of hvdkit
                differ; if a callback needs one model and each rank would train its own; if a rank
                has a `BackupAndRestore` and its model is not built; or if a layer normalizes over
                the replicas of a `tf.distribute.Strategy`.
            BackwardFailed: on every rank, if an earlier `fit` has raised on some ranks only.
        """
        self._batches.turn(False)
        for distribution in self.distributions:
            distribution.end_interrupted()
        steps, epochs = params.get("steps"), int(params.get("epochs") or 0)
        known = steps is not None
        own = [int(steps or 0), epochs, digest24(self._collective.encode())]
        own.append(self._steps_per_execution)
        unbuilt = restores and not self.model.built
        synchronized = synchronized_by_strategy(self.model) if self._trains_together else []
        values = [1, int(self.in_use), int(self._needs_one_model), int(known), int(unbuilt)]
        values += [int(bool(synchronized)), *own, *(n * n for n in own)]
        with warning_while_waiting(log, backend.hvd.rank(), "fit", _WAITING_ADVICE):
            self._batches.enters()
            totals = self.group.sum(values, "hvdkit.keras.fit")
        count, in_use, needs, all_known, any_unbuilt, any_synchronized, *sums = totals
        differ = [not all_equal(count, sums[k], sums[k + 4]) for k in range(4)]
        if differ[2]:
            by_rank = "; ".join(group_by_text(self.group, self._collective, "hvdkit.keras.fit.who"))
            raise UsageError(
                f"ranks call fit with different callbacks ({by_rank}), whose hooks are collectives "
                f"or change the model: pass these callbacks on every rank, in the same order"
            )
        if not in_use and needs:
            raise UsageError(
                f"hvd.callbacks.Checkpoint and MonitorCallback need one model, but fit would train "
                f"a separate model on each of {count} ranks, because gradients are not reduced "
                f"over the ranks. Compile the model with hvd.DistributedOptimizer(optimizer)"
            )
        if not in_use:
            if self.is_first and "separate" not in _logged:
                log.warning(
                    "fit trains a separate model on each of %d ranks, because gradients are not "
                    "reduced over the ranks. Compile the model with "
                    "hvd.DistributedOptimizer(optimizer). If each rank should have its own model, "
                    "call fit in `with hvd.local_fit():`.",
                    count,
                )
            _logged.add("separate")
            return False
        if any_unbuilt:
            # Keras would raise an error on the first rank only.
            raise UsageError(
                f"the model is not built on {any_unbuilt} of {count} ranks: BackupAndRestore needs "
                f"a built model before fit. Give the model an Input, or call it on a batch of data"
            )
        if any_synchronized and count > 1:
            names = ", ".join(repr(layer.name) for layer in synchronized) or "none on this rank"
            raise UsageError(
                f"the model has BatchNormalization(synchronized=True) on {any_synchronized} of "
                f"{count} ranks (layers: {names}), which Keras synchronizes in a "
                f"tf.distribute.Strategy only, so each rank would normalize with the statistics of "
                f"its own batch. Use hvdkit.tensorflow.SyncBatchNormalization(), or omit "
                f"synchronized=True"
            )
        if (differ[0] and all_known == count) or differ[1] or differ[3]:
            mine = f"{steps} steps in each of {epochs} epochs"
            if self._steps_per_execution > 1 or differ[3]:
                mine += f" with steps_per_execution={self._steps_per_execution}"
            by_rank = "; ".join(group_by_text(self.group, mine, "hvdkit.keras.fit.who"))
            raise UsageError(
                f"ranks call fit with different numbers of steps or epochs ({by_rank}), so the job "
                f"would hang. Give all ranks the same number of batches, with hvd.shard(data) or "
                f"steps_per_epoch=, and the same epochs="
            )
        if all_known < count:
            params["steps"] = None
        return True

    def begin(self, callbacks: list[Any], restores: bool) -> None:
        """Set the same settings on every rank. A collective.

        Discards gradients that an earlier `fit` has left in an accumulation window when it raised.

        Args:
            callbacks: the callbacks of this rank.
            restores: broadcast the model and the initial epoch of the first rank, which may have
                restored a backup.
        """
        terminates = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks)
        acts = any(map(_acts_on_batches, callbacks))
        restores = restores and self.is_first
        restored = (self.model._initial_epoch or 0) if restores else 0
        reducing = self._distributions_of_group
        compares = any(d.check_parameters for d in reducing)
        left_open = any(d.in_fit for d in self.distributions)
        batches = reducing[0].batches if reducing else 0
        own = [terminates, acts, restores, restored, compares, bool(reducing), True, left_open]
        own += [batches, batches * batches]
        own += [all(d.check_parameters for d in self.distributions), self._has_own_step]
        own.append(any(map(_changes_at_end, callbacks)))
        counts = self.group.sum([int(value) for value in own], "hvdkit.keras.begin")
        self.checks_loss, self.stops_at_batches = bool(counts[0]), bool(counts[1])
        self._compares_values, self._trains_one_model = (n == counts[6] for n in counts[4:6])
        self._compares_unreduced = counts[10] == counts[6]
        self.changes_at_end = bool(counts[12])
        self._batches.turn(self._trains_one_model)
        self._asks_step = counts[11] == counts[6]
        for distribution in self.distributions:
            if counts[7]:
                distribution.discard()
            distribution.in_fit = True
        if counts[7] or not all_equal(counts[6], counts[8], counts[9]):
            # The ranks' counts differ after an error, or some ranks are new.
            for distribution in reducing:
                distribution.batches = 0
        if counts[2]:
            broadcast_model(self.model, self.group.ranks[0], self.group.process_set)
            if counts[3]:
                # `fit` reads `_initial_epoch` after `on_train_begin`.
                self.model._initial_epoch = counts[3]
        self._compared = [d for d in reducing if d.check_parameters and self._compares_values]
        self._end_batches()
        for distribution in self._compared:
            distribution.times.take()
        self._statistics = StatisticsAverage(
            self.model, self.group, lambda v: any(d.is_local(v) for d in self.distributions)
        )
        if self._compares_values:
            untrained = self._untrained_variables()
            self._before = dict(zip(map(id, untrained), backend.digests(untrained), strict=True))

    def compare_layers(self) -> None:
        """Compare the state of layers that is not in variables. A collective.

        Called before the first batch, because vocabularies of different sizes may cause errors
        there. Callbacks do not broadcast such state.

        Raises:
            RankMismatchError: on every rank, see `layer_state.compare_layers`.
        """
        if self._compares_values and not self.group.single_rank:
            compare_layers(
                self.group, self.model, lambda e: any(d.is_local(e) for d in self.distributions)
            )

    def compare_initial_epochs(self) -> None:
        """Check that `fit` begins at the same epoch on all ranks. A collective.

        Called after the callbacks that may resume at another epoch, and before the first epoch,
        because a rank may have no epoch left.

        Raises:
            UsageError: on every rank, if the epochs differ.
        """
        epoch = initial_epoch(self.model)
        values = [1, epoch, epoch * epoch]
        count, total, squares = self.group.sum(values, "hvdkit.keras.initial_epoch")
        if all_equal(count, total, squares):
            return
        mine = f"initial_epoch={epoch}"
        by_rank = "; ".join(group_by_text(self.group, mine, "hvdkit.keras.fit.who"))
        raise UsageError(
            f"ranks begin fit at different epochs ({by_rank}), so they would train different "
            f"epochs together, and then hang. Pass the same initial_epoch= on every rank: if rank "
            f"0 reads it from a file, hvd.broadcast_object(initial_epoch, root_rank=0)"
        )

    def end(self) -> None:
        """Record that `fit` has ended without an error. Not a collective."""
        self._batches.turn(False)
        for distribution in self.distributions:
            distribution.in_fit = False

    @property
    def _distributions_of_group(self) -> list[Any]:
        """The `Distribution`s that reduce over the same ranks as this coordination."""
        ranks = list(self.group.ranks)
        return [d for d in self.distributions if list(d.collectives.ranks) == ranks]

    def compare_values(self, callbacks: Sequence[Any]) -> None:
        """Compare the model's variables between ranks. A collective in the first call of a `fit`.

        Later calls in the same `fit` do nothing. The first call is after the first batch, because
        a callback may broadcast there. The comparison includes the variables whose gradients are
        reduced, and other variables that the batch has not changed on any rank, for example of
        frozen layers or of an adapted `Normalization`. A variable that the batch has changed
        without a gradient, such as a counter of a layer, may differ between ranks.

        Args:
            callbacks: the callbacks of `fit`. Their local variables, on any rank, are not compared.

        Raises:
            RankMismatchError: on every rank, if variables or their values differ between ranks.
        """
        if not self._compares_values:
            return
        self._compares_values = False
        checked = [d for d in self._distributions_of_group if d.check_parameters]
        shared = [v for d in checked for v in d.shared_variables]
        trained = {id(variable) for variable in shared}
        others = [v for v in self._untrained_variables() if id(v) not in trained]
        variables = [*shared, *others]
        lines = [f"{_name_of(v)}, {v.dtype} {list(v.shape)}" for v in variables]
        lines += [str(d.check_settings) for d in checked]
        check_consistency(self.group, lines, "the variables of the model")
        local = _local_variables(callbacks)
        before, self._before = self._before, {}
        now = dict(zip(map(id, others), backend.digests(others), strict=True))
        excluded = [
            backend.is_among(v, local) or (id(v) in now and now[id(v)] != before.get(id(v)))
            for v in variables
        ]
        anywhere = self.group.max([int(value) for value in excluded], "hvdkit.keras.local")
        exempt = {id(v) for v, skip in zip(variables, anywhere, strict=True) if skip}
        for distribution in checked:
            distribution.exempt = exempt
        compared = [v for v in variables if id(v) not in exempt]
        # Without later comparisons, the state of ranks may differ on purpose.
        optimizers = [d.optimizer for d in checked if d.check_settings.interval]
        ReplicaCheck(
            self.group,
            CheckSettings(),
            lambda: keras_replicas(compared, *optimizers),
            first_advice=f"{_FIRST_ADVICE}{self._unapplied()}",
        ).compare(1, first=True)

    def compare_unreduced(self, callbacks: Sequence[Any]) -> None:
        """Warn if ranks train or change variables separately. A collective in the first call.

        Later calls in the same `fit` do nothing. An optimizer in a `train_step` may be plain, so
        that nothing reduces the gradients of its variables. It is not an error, because a
        `train_step` may reduce gradients itself, or train separate variables on purpose. A layer
        may change a variable in `call`, such as an average of its inputs.

        Args:
            callbacks: as for `compare_values`.
        """
        if not self._compares_unreduced:
            return
        self._compares_unreduced = False
        local = _local_variables(callbacks)
        known = {id(v) for d in self.distributions for v in d.shared_variables}
        trained = [
            variable
            for variable in self.model.trainable_weights
            if id(variable) not in known
            and not any(d.is_local(variable) for d in self.distributions)
            and not backend.is_among(variable, local)
        ]
        self._warn_of_difference("unreduced", trained, f"{_UNREDUCED_ADVICE}{self._unapplied()}")
        changed = [v for v in self._untrained_variables() if not backend.is_among(v, local)]
        self._warn_of_difference("changed", changed, _CHANGED_ADVICE)

    def _warn_of_difference(self, kind: str, variables: Sequence[Any], advice: str) -> None:
        """Log on the first rank, once, if variables differ between ranks. A collective."""
        found = find_difference(self.group, keras_replicas(variables), "after the first epoch")
        if found is None or not found.far:
            return
        if self.is_first and kind not in _logged:
            log.warning(f"%s {advice}", found.text)
        _logged.add(kind)

    def _unapplied(self) -> str:
        """Return a sentence if no wrapped optimizer has reduced anything."""
        kinds = [type(d.optimizer).__name__ for d in self.distributions]
        if not kinds or any(d.applied for d in self.distributions):
            return ""
        return (
            f" Nothing was reduced by the wrapped {', '.join(kinds)}, because neither its apply "
            f"nor its apply_gradients was called: call one of them with the gradients."
        )

    def compare_replicas(self, batches: int) -> None:
        """Count batches, and compare times and trained variables if a comparison is due.

        A collective.

        Args:
            batches: the number of batches that were trained together, the same on all ranks.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        self._has_trained = True
        for distribution in self._compared:
            distribution.batches += batches
            if distribution.check_settings.is_due(distribution.batches, batches):
                distribution.stragglers.report()
                distribution.replicas.compare(distribution.batches)
                self._compare_data()
            distribution.times.end_step()

    def note_logs(self, logs: dict[str, Any] | None) -> None:
        """Record the loss of a batch, as Keras has computed it. Not a collective."""
        if calls() != self._calls:
            _calling.add(self.model)
        # A `train_step` of the model may return losses that it has reduced.
        reads = bool(self.distributions) and not self._has_own_step
        if reads and len(self._first_losses) < PASSES:
            loss = np.asarray(keras.ops.convert_to_numpy((logs or {}).get("loss", 0.0)))
            # A model's `compute_metrics` may return a vector, which is not compared.
            self._first_losses.append(float(loss) if loss.ndim == 0 else 0.0)

    def _compare_data(self) -> None:
        """Compare the first losses, with the first comparison of a `fit`. A collective."""
        same_data, self._same_data = self._same_data, None
        if same_data is not None:
            same_data.compare()

    def _digest_of_losses(self) -> int | None:
        losses = self._first_losses
        if self.model in _calling:
            return None  # the losses depend on the data of all ranks
        if len(losses) < PASSES or not all(map(math.isfinite, losses)) or not any(losses):
            return None
        return int.from_bytes(digest([repr(loss) for loss in losses])[:8], "little")

    def compare_at_end(self, callbacks: Sequence[Any] = ()) -> None:
        """Compare trained variables at the end of a `fit` that has trained. A collective.

        Args:
            callbacks: the callbacks of this rank whose `on_train_end` was called.

        Raises:
            RankMismatchError: on every rank, see `ReplicaCheck.compare`.
        """
        for distribution in self._compared if self._has_trained else ():
            if not distribution.replicas.settings.interval:
                continue
            try:
                distribution.replicas.compare(distribution.batches)
            except RankMismatchError as error:
                mine = (
                    ", ".join(type(c).__name__ for c in callbacks if _changes_at_end(c)) or "none"
                )
                by_rank = group_by_text(distribution.collectives, mine, "hvdkit.keras.end")
                if len(by_rank) == 1:
                    raise
                raise RankMismatchError(
                    f"{error} This is the comparison at the end of fit. The callbacks with "
                    f"on_train_end differ between ranks ({'; '.join(by_rank)}): a callback that "
                    f"changes weights must be on every rank."
                ) from None

    def begin_batch(self) -> None:
        """Begin to measure the times of a batch. A collective on PyTorch.

        On PyTorch, the batch has been read. On TensorFlow, the graph of the step reads and checks.

        Raises:
            UsageError: on every rank, if the data of a rank have ended.
        """
        if backend.NAME == "torch":
            self._batches.begins()
        self._calls = calls()
        for distribution in self._compared:
            distribution.times.start()

    def end_batch(self, batches: range) -> None:
        """Count the batches that were trained. A collective in the first call, and with executions.

        The data may have ended within an execution of several batches.

        Args:
            batches: their numbers in the epoch.

        Raises:
            UsageError: on every rank, if other ranks have more batches.
        """
        self._batches.trained = batches.stop
        self._batches.together = self._steps_per_execution
        if self._batches.together > 1:
            self._batches.ends()
        if self._asks_step:
            self._asks_step = False
            self._note_reductions()
            self._batches.trained = batches.stop

    def _note_reductions(self) -> None:
        """Find out what reduces the gradients of a custom `train_step`. A collective.

        The first batch has shown it: tapes, or wrapped optimizers that `begin` could not find.
        """
        known, self.distributions = self.distributions, distributions_of(self.model)
        new = [d for d in self._distributions_of_group if d not in known]
        checks = bool(new) and all(d.check_parameters for d in new)
        tapes = backend.tapes_reduce(self.model.trainable_weights, self.group.process_set)
        own = [1, bool(self._distributions_of_group), checks, tapes]
        count, wrapped, checking, taped = self.group.sum(
            [int(value) for value in own], "hvdkit.keras.step"
        )
        self._trains_one_model = wrapped == count
        self._batches.turn(self._trains_one_model or taped == count)
        for distribution in new:
            distribution.in_fit = True
        if new and self.is_first and "elsewhere" not in _logged:
            log.warning(
                "train_step uses a wrapped %s that is not an attribute of the model, so "
                "checkpoints, commits and broadcasts do not contain its state. Make it an "
                "attribute: model.my_optimizer = optimizer",
                ", ".join(type(each.optimizer).__name__ for each in new),
            )
            _logged.add("elsewhere")
        if checking == count:
            self._compares_values = True
            self._compared += new

    def _end_batches(self) -> None:
        """Stop measuring times until the next batch.

        Outside of training batches, for example in validation, a rank also waits for other ranks.
        These waits would count as its own time.
        """
        for distribution in self._compared:
            distribution.times.stop()

    def _untrained_variables(self) -> list[Any]:
        """Return variables without gradients, except seeds and moving statistics."""
        moving = {id(variable) for variable in statistics_of(self.model)}
        return [
            variable
            for variable in [*self.model.non_trainable_weights, *compared_buffers(self.model)]
            if id(variable) not in moving
            and not any(d.is_local(variable) for d in self.distributions)
        ]

    def check_loss(self, logs: dict[str, Any] | None) -> tuple[dict[str, Any] | None, bool]:
        """Set the loss to NaN if it is not finite on another rank. A collective.

        Returns:
            The logs of the batch, and whether the loss is not finite on any rank.
        """
        loss = float((logs or {}).get("loss", 0.0))
        broken = not math.isfinite(loss)
        if not self.group.max([int(broken)], "hvdkit.keras.loss")[0]:
            return logs, False
        return {**(logs or {}), "loss": loss if broken else math.nan}, True

    def synchronize_stop(self) -> None:
        """Set `stop_training` on every rank if it is set on one. A collective."""
        own = bool(self.model.stop_training or self._stop_deferred)
        self._stop_deferred = False
        (stop,) = self.group.max([int(own)], "hvdkit.keras.stop")
        if stop and not own:
            log.info("training stops, because a callback on another rank has stopped it")
        self.model.stop_training = bool(stop)

    def defer_stop(self) -> None:
        """Defer a stop of this rank until the next `synchronize_stop`. Not a collective."""
        self._stop_deferred = self._stop_deferred or bool(self.model.stop_training)
        self.model.stop_training = False

    def end_training_batches(self) -> None:
        """Complete the training batches of an epoch. A collective.

        Closes the accumulation window, averages moving statistics, and copies the metrics, because
        validation resets them.

        Raises:
            UsageError: on every rank, if other ranks have more batches.
        """
        self._batches.ends()
        self._batches.trained = 0
        self._end_batches()
        for distribution in self.distributions:
            if distribution.accumulation_steps > 1:
                distribution.flush()
        assert self._statistics is not None
        # Tapes in a `train_step` have reduced gradients in the first batch.
        self._statistics.average(
            self._trains_one_model
            or backend.tapes_reduce(self.model.trainable_weights, self.group.process_set)
        )
        self._trained = self._metrics()

    def end_validation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of a validation in place. A collective."""
        ranks, validating = self.group.sum([1, 1], "hvdkit.keras.epoch")
        everyone = validating == ranks
        logs.update(reduce_logs(self.model, self._metrics(), logs, self.group, everyone))
        self._validated = {f"val_{name}" for name in logs}

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of an epoch in place, without the logs of validation. A collective."""
        if self._trained is None:
            self.end_training_batches()
        flatten(logs)
        # A script may validate on some ranks only. The other ranks wait in this loop, and get the
        # result, because callbacks on `val_loss` must decide equally on all ranks.
        while self.group.sum([1, 0], "hvdkit.keras.epoch")[1]:
            theirs = reduce_logs(self.model, None, {}, self.group, everyone=False)
            logs.update({f"val_{name}": value for name, value in theirs.items()})
            self._validated = {f"val_{name}" for name in theirs}
        own = {name: value for name, value in logs.items() if name not in self._validated}
        logs.update(reduce_logs(self.model, self._trained, own, self.group, everyone=True))
        self._trained, self._validated = None, set()

    def reduce_evaluation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of an `evaluate` outside of `fit` in place. A collective."""
        logs.update(reduce_logs(self.model, self._metrics(), logs, self.group, everyone=True))

    def _metrics(self) -> MetricState:
        state = MetricState.of(self.model)
        for name in set(state.averaged()) - self._averaged if self.is_first else ():
            log.warning(
                "the results of metric %r are averaged over ranks, because its class is not known "
                "to be additive. If its variables are sums over samples, mark its class with "
                "hvdkit.keras.callbacks.additive.",
                name,
            )
        self._averaged.update(state.averaged())
        return state


def _local_variables(callbacks: Sequence[Any]) -> set[int]:
    """Return the ids of the variables that callbacks keep local to each rank."""
    return {id(v) for c in callbacks if isinstance(c, HasLocalVariables) for v in c.local_variables}


def _changes_at_end(callback: Any) -> bool:
    """Return whether `on_train_end` of a callback may change weights."""
    if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
        return True
    return isinstance(callback, keras.callbacks.SwapEMAWeights) or _is_own(callback.on_train_end)


def _acts_on_batches(callback: Any) -> bool:
    """Return whether a callback of a user has hooks for batches, and may stop training there."""
    return any(_is_own(getattr(callback, name)) for name in _BATCH_HOOKS)


def _is_own(hook: Any) -> bool:
    """Return whether a callback's hook is a user's; those of a LambdaCallback are functions."""
    owner = (getattr(hook, "__module__", None) or "").split(".")[0]
    return owner not in ("keras", "hvdkit")


def _name_of(variable: Any) -> str:
    """Return a variable's name that is equal on ranks with equal models."""
    return without_model_names(without_layer_numbers(variable.path))
