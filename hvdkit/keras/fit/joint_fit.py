"""A `fit` that several ranks run together."""

import logging
import math
from typing import Any

from hvdkit.keras import backend
from hvdkit.keras.fit.agreement import Agreement
from hvdkit.keras.fit.batch_check import BatchCheck
from hvdkit.keras.fit.comparisons import Comparisons, logged, reducing_over
from hvdkit.keras.fit.epoch_logs import EpochLogs
from hvdkit.keras.fit.statistics import StatisticsAverage
from hvdkit.keras.models import distributions_of

log = logging.getLogger("hvdkit.keras")


class JointFit:
    """The collectives and joint decisions of one `fit`, from its first batch on.

    Args:
        model: the model.
        batches: the check that all ranks have a batch.
        distributions: of the wrapped optimizers of the model. The first batch may add some.
        agreed: what the ranks have agreed on.

    Attributes:
        agreed: as given.
        comparisons: compares the ranks.
    """

    def __init__(
        self, model: Any, batches: BatchCheck, distributions: list[Any], agreed: Agreement
    ) -> None:
        self.model = model
        self.group = batches.group
        self.agreed = agreed
        self._batches = batches
        self._distributions = distributions
        # Whether wrapped optimizers reduce on all ranks.
        self._reduces = agreed.reduces
        self._stop_deferred = False
        reducing = reducing_over(self.group, distributions)
        compared = [d for d in reducing if d.check_parameters and agreed.compares_values]
        self.comparisons = Comparisons(model, self.group, distributions, compared, agreed)
        self._statistics = StatisticsAverage(
            model, self.group, lambda v: any(d.is_local(v) for d in distributions)
        )
        self._logs = EpochLogs(model, self.group)

    def end(self) -> None:
        """Record that `fit` has ended without an error. Not a collective."""
        self._batches.turn(False)
        for distribution in self._distributions:
            distribution.in_fit = False

    def begin_batch(self) -> None:
        """Begin to measure the times of a batch. A collective on PyTorch.

        On PyTorch, the batch has been read. On TensorFlow, the graph of the step reads and checks.

        Raises:
            UsageError: on every rank, if the data of a rank have ended.
        """
        if backend.NAME == "torch":
            self._batches.begins()
        self.comparisons.begin_batch()

    def end_batch(self, batches: range) -> None:
        """Count the batches that were trained. A collective in the first call, and with executions.

        The data may have ended within an execution of several batches.

        Args:
            batches: their numbers in the epoch.

        Raises:
            UsageError: on every rank, if other ranks have more batches.
        """
        self._batches.trained = batches.stop
        self._batches.together = steps_per_execution(self.model)
        if self._batches.together > 1:
            self._batches.ends()
        if self.agreed.asks_step and not self.comparisons.has_trained:
            self._note_reductions()
            self._batches.trained = batches.stop

    def _note_reductions(self) -> None:
        """Find out what reduces the gradients of a custom `train_step`. A collective.

        The first batch has shown it: tapes, or wrapped optimizers that `begin` could not find.
        """
        known = list(self._distributions)
        self._distributions[:] = distributions_of(self.model)
        reducing = reducing_over(self.group, self._distributions)
        new = [d for d in reducing if d not in known]
        checks = bool(new) and all(d.check_parameters for d in new)
        tapes = backend.tapes_reduce(self.model.trainable_weights, self.group.process_set)
        own = [1, bool(reducing), checks, tapes]
        count, wrapped, checking, taped = self.group.sum(
            [int(value) for value in own], "hvdkit.keras.step"
        )
        self._reduces = wrapped == count
        self._batches.turn(self._reduces or taped == count)
        for distribution in new:
            distribution.in_fit = True
        if new and self.group.is_first and "elsewhere" not in logged:
            log.warning(
                "train_step uses a wrapped %s that is not an attribute of the model, so "
                "checkpoints, commits and broadcasts do not contain its state. Make it an "
                "attribute: model.my_optimizer = optimizer",
                ", ".join(type(each.optimizer).__name__ for each in new),
            )
            logged.add("elsewhere")
        if checking == count:
            self.comparisons.add(new)

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
        self.comparisons.end_batches()
        for distribution in self._distributions:
            if distribution.accumulation_steps > 1:
                distribution.flush()
        # Tapes in a `train_step` have reduced gradients in the first batch.
        self._statistics.average(
            self._reduces
            or backend.tapes_reduce(self.model.trainable_weights, self.group.process_set)
        )
        self._logs.end_training()

    def end_validation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of a validation in place. A collective."""
        self._logs.end_validation(logs)

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of an epoch in place, without the logs of validation. A collective."""
        if not self._logs.training_ended:
            self.end_training_batches()
        self._logs.end_epoch(logs)


def steps_per_execution(model: Any) -> int:
    """Return the number of batches that Keras trains in one execution."""
    # A model in a loop of a user may not be compiled.
    return int(getattr(model, "steps_per_execution", None) or 1)
