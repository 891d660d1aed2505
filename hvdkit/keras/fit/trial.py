"""A trial of `hvdkit tune` in `model.fit`. See `hvdkit.training.trial`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.keras import backend
from hvdkit.keras.fit.collective_callbacks import LastCallback
from hvdkit.keras.models import distributions_of
from hvdkit.training import trial
from hvdkit.training.trial import BatchCount, TrialPlan


class TrialCallback(LastCallback):
    """Count the batches of `fit`, and end the script. Every rank has one.

    Args:
        plan: the settings of the trial.
    """

    def __init__(self, plan: TrialPlan) -> None:
        super().__init__()
        self._plan = plan
        self._count: BatchCount | None = None

    def fit_begins(self, callbacks: Sequence[Any]) -> None:  # noqa: ARG002
        """Called after `on_train_begin` of the other callbacks."""
        if not trial.counting():
            found = distributions_of(self.model)
            window = found[0].accumulation_steps if found else 1
            self._count = BatchCount(self._plan, backend.hvd.rank(), window)

    def batches_end(self, batches: range) -> None:
        """Called after `batches` of the epoch have been trained.

        Raises:
            SystemExit: the trial is over.
        """
        if self._count is None:
            return  # a tape counts its steps
        self._count.add(len(batches))
        if not self._count.over:
            return
        # A `train_step` may use a tape instead of a distributed optimizer.
        reduced = trial.noted_reduction()
        # A GAN has several.
        if found := distributions_of(self.model):
            reduced = found[0].reduction, max(each.gradient_bytes for each in found)
        if reduced is None:
            trial.end(backend.hvd.rank(), self._count.made)
        self._count.report(*reduced)
        raise SystemExit(0)
