"""Agree on a `fit` before it begins: the same steps, epochs and callbacks on all ranks.

The callback list of `hvdkit.keras.fit.callback_list` makes a `Coordination` for each `fit`, which
makes the `JointFit`.
"""

import logging
from collections.abc import Sequence
from typing import Any

import keras

from hvdkit.agreement.consistency import all_equal, digest24, group_by_text
from hvdkit.agreement.waiting import warning_while_waiting
from hvdkit.errors import UsageError
from hvdkit.keras import backend
from hvdkit.keras.fit.agreement import Agreement
from hvdkit.keras.fit.batch_check import batch_check_of
from hvdkit.keras.fit.callback_kinds import acts_on_batches, changes_at_end
from hvdkit.keras.fit.comparisons import logged, reducing_over
from hvdkit.keras.fit.epoch_logs import EpochLogs
from hvdkit.keras.fit.fit_call import initial_epoch
from hvdkit.keras.fit.joint_fit import JointFit, steps_per_execution
from hvdkit.keras.fit.statistics import synchronized_by_strategy
from hvdkit.keras.functions import broadcast_model
from hvdkit.keras.models import distributions_of, has_own_step

log = logging.getLogger("hvdkit.keras")

_WAITING_ADVICE = (
    "every rank must call fit, or in a loop of its own, on_train_begin of its CallbackList. To "
    "train on this rank only, do so in `with hvd.local_fit():`."
)


class Coordination:
    """The agreement of the ranks before a `fit`, and the logs of an `evaluate`.

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

    @property
    def has_windows(self) -> bool:
        """Whether an optimizer accumulates batches."""
        return any(d.accumulation_steps > 1 for d in self.distributions)

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
        own.append(steps_per_execution(self.model))
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
            if self.group.is_first and "separate" not in logged:
                log.warning(
                    "fit trains a separate model on each of %d ranks, because gradients are not "
                    "reduced over the ranks. Compile the model with "
                    "hvd.DistributedOptimizer(optimizer). If each rank should have its own model, "
                    "call fit in `with hvd.local_fit():`.",
                    count,
                )
            logged.add("separate")
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
            if steps_per_execution(self.model) > 1 or differ[3]:
                mine += f" with steps_per_execution={steps_per_execution(self.model)}"
            by_rank = "; ".join(group_by_text(self.group, mine, "hvdkit.keras.fit.who"))
            raise UsageError(
                f"ranks call fit with different numbers of steps or epochs ({by_rank}), so the job "
                f"would hang. Give all ranks the same number of batches, with hvd.shard(data) or "
                f"steps_per_epoch=, and the same epochs="
            )
        if all_known < count:
            params["steps"] = None
        return True

    def begin(self, callbacks: list[Any], restores: bool) -> JointFit:
        """Agree on the settings of the `fit`, and return it. A collective.

        Discards gradients that an earlier `fit` has left in an accumulation window when it raised.

        Args:
            callbacks: the callbacks of this rank.
            restores: broadcast the model and the initial epoch of the first rank, which may have
                restored a backup.
        """
        terminates = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks)
        acts = any(map(acts_on_batches, callbacks))
        restores = restores and self.group.is_first
        restored = (self.model._initial_epoch or 0) if restores else 0
        reducing = reducing_over(self.group, self.distributions)
        compares = any(d.check_parameters for d in reducing)
        left_open = any(d.in_fit for d in self.distributions)
        batches = reducing[0].batches if reducing else 0
        own = [terminates, acts, restores, restored, compares, bool(reducing), True, left_open]
        own += [batches, batches * batches]
        own += [all(d.check_parameters for d in self.distributions), self._has_own_step]
        own.append(any(map(changes_at_end, callbacks)))
        counts = self.group.sum([int(value) for value in own], "hvdkit.keras.begin")
        everyone = counts[6]
        agreed = Agreement(
            checks_loss=bool(counts[0]),
            stops_at_batches=bool(counts[1]),
            changes_at_end=bool(counts[12]),
            compares_values=counts[4] == everyone,
            compares_unreduced=counts[10] == everyone,
            reduces=counts[5] == everyone,
            asks_step=counts[11] == everyone,
        )
        self._batches.turn(agreed.reduces)
        for distribution in self.distributions:
            if counts[7]:
                distribution.discard()
            distribution.in_fit = True
        if counts[7] or not all_equal(everyone, counts[8], counts[9]):
            # The ranks' counts differ after an error, or some ranks are new.
            for distribution in reducing:
                distribution.batches = 0
        if counts[2]:
            broadcast_model(self.model, self.group.ranks[0], self.group.process_set)
            if counts[3]:
                # `fit` reads `_initial_epoch` after `on_train_begin`.
                self.model._initial_epoch = counts[3]
        return JointFit(self.model, self._batches, self.distributions, agreed)

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

    def reduce_evaluation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of an `evaluate` outside of `fit` in place. A collective."""
        EpochLogs(self.model, self.group).reduce_evaluation(logs)
