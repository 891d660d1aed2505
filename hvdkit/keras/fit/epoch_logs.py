"""The metrics of an epoch over all ranks, in the logs that callbacks get."""

import logging
from typing import Any

from hvdkit.keras.fit.metrics import MetricState, flatten, reduce_logs

log = logging.getLogger("hvdkit.keras")


class EpochLogs:
    """Reduce the logs of one `fit` or `evaluate` over the ranks.

    Args:
        model: the model.
        group: the collectives of the ranks.
    """

    def __init__(self, model: Any, group: Any) -> None:
        self._model = model
        self._group = group
        # Of the training batches of the epoch, copied before validation resets the metrics.
        self._trained: MetricState | None = None
        # The names of the logs of validation.
        self._validated: set[str] = set()
        self._averaged: set[str] = set()

    @property
    def training_ended(self) -> bool:
        """Whether the training batches of the epoch have ended."""
        return self._trained is not None

    def end_training(self) -> None:
        """Copy the metrics of the training batches. Not a collective."""
        self._trained = self._metrics()

    def end_validation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of a validation in place. A collective."""
        ranks, validating = self._group.sum([1, 1], "hvdkit.keras.epoch")
        everyone = validating == ranks
        logs.update(reduce_logs(self._model, self._metrics(), logs, self._group, everyone))
        self._validated = {f"val_{name}" for name in logs}

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of an epoch in place, without the logs of validation. A collective.

        `end_training` comes before.
        """
        flatten(logs)
        # A script may validate on some ranks only. The other ranks wait in this loop, and get the
        # result, because callbacks on `val_loss` must decide equally on all ranks.
        while self._group.sum([1, 0], "hvdkit.keras.epoch")[1]:
            theirs = reduce_logs(self._model, None, {}, self._group, everyone=False)
            logs.update({f"val_{name}": value for name, value in theirs.items()})
            self._validated = {f"val_{name}" for name in theirs}
        own = {name: value for name, value in logs.items() if name not in self._validated}
        logs.update(reduce_logs(self._model, self._trained, own, self._group, everyone=True))
        self._trained, self._validated = None, set()

    def reduce_evaluation(self, logs: dict[str, Any]) -> None:
        """Reduce the logs of an `evaluate` outside of `fit` in place. A collective."""
        logs.update(reduce_logs(self._model, self._metrics(), logs, self._group, everyone=True))

    def _metrics(self) -> MetricState:
        state = MetricState.of(self._model)
        for name in set(state.averaged()) - self._averaged if self._group.is_first else ():
            log.warning(
                "the results of metric %r are averaged over ranks, because its class is not known "
                "to be additive. If its variables are sums over samples, mark its class with "
                "hvdkit.keras.callbacks.additive.",
                name,
            )
        self._averaged.update(state.averaged())
        return state
