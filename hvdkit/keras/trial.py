"""A trial of `hvdkit tune` in `model.fit`. See `hvdkit.core.trial`."""

from __future__ import annotations

from hvdkit.core import trial
from hvdkit.core.trial import TrialPlan
from hvdkit.keras import backend
from hvdkit.keras.training import LastCallback


class TrialCallback(LastCallback):
    """Count the batches of `fit`, and end the script. Every rank has one.

    Args:
        plan: the settings of the trial.
    """

    def __init__(self, plan: TrialPlan) -> None:
        super().__init__()
        self._plan = plan
        self._before = self._batches = 0
        trial.report_at_exit(backend.hvd.rank(), lambda: self._before + self._batches)

    def epoch_begins(self, epoch: int) -> None:  # noqa: ARG002
        """Called before the first batch of an epoch."""
        self._before, self._batches = self._before + self._batches, 0

    def batch_ends(self, batch: int) -> None:
        """Called after batch `batch` of the epoch (zero-based) has been trained.

        Raises:
            SystemExit: the trial is over.
        """
        self._batches = batch + 1
        made = self._before + self._batches
        if made >= self._plan.steps:
            trial.end(backend.hvd.rank(), made)
