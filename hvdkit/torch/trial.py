"""A trial of `hvdkit tune` with the first optimizer of the script. See `hvdkit.training.trial`."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.errors import UsageError
from hvdkit.torch.autotune import fingerprint, formats_of, make_tuner
from hvdkit.torch.noise_scale import GradientNoiseScale
from hvdkit.torch.wrapped_optimizer import WrappedOptimizer
from hvdkit.training import trial, tuning
from hvdkit.training.noise_scale import Estimate
from hvdkit.training.trial import TrialPlan

# The decay of the moving average. Almost 1, so all steps of a trial have the same weight.
_DECAY = 1 - 1e-9
#: Measured steps in each block, whose means show the error of the noise scale.
_BLOCK = 10


class Trial:
    """Count the steps of an optimizer, measure, and end the script.

    Args:
        optimizer: the optimizer. It has made no step.
        plan: what to measure.
    """

    def __init__(self, optimizer: WrappedOptimizer, plan: TrialPlan) -> None:
        self._rank = optimizer.reducer.collectives.rank
        self._plan = plan
        self._steps = 0
        self._tuner: tuning.Tuner | None = None
        self._fingerprint = ""
        self._noise: GradientNoiseScale | None = None
        self._noise_problem = ""
        # At the end of each block: the sum of the estimates of all steps so far.
        self._sums: list[Estimate] = []
        trial.report_at_exit(self._rank, lambda: self._steps)
        if plan.turns:
            formats = formats_of(optimizer, plan.wire_formats)
            self._tuner = make_tuner(
                optimizer, plan.bucket_bytes, formats, plan.turns, plan.turn_steps
            )
            self._fingerprint = fingerprint(optimizer)
            if optimizer.reducer.collectives.single_rank:
                self._tuner.cancel()
            else:
                self._tuner.begin()
        if plan.samples:
            try:
                self._noise = GradientNoiseScale(
                    optimizer, samples=plan.samples, every=1, decay=_DECAY
                )
            except UsageError as error:
                self._noise_problem = str(error)

    def after_step(self) -> None:
        """Count a step. After the last one, print the report.

        Raises:
            SystemExit: the trial is over.
        """
        self._steps += 1
        if self._noise is not None and self._noise.measured >= _BLOCK * (len(self._sums) + 1):
            signal, noise = self._noise.signal or 0.0, self._noise.noise or 0.0
            count = self._noise.measured
            self._sums.append(Estimate(signal * count, noise * count))
        if self._tuner is not None:
            self._tuner.after_step()
            if self._tuner.done:
                self._end(fingerprint=self._fingerprint, tuned=_measured(self._tuner))
        elif self._steps >= self._plan.steps:
            self._end(noise=self._noise_report())

    def _end(self, **measured: Any) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            measured["gpu_peak_bytes"] = torch.cuda.max_memory_reserved()
        trial.end(self._rank, self._steps, **measured)

    def _noise_report(self) -> dict[str, Any]:
        if self._noise is None:
            return {"problem": self._noise_problem}
        return {
            "measured": self._noise.measured,
            "sums": [[each.signal, each.noise] for each in self._sums],
        }


def _measured(tuner: tuning.Tuner) -> dict[str, Any]:
    """Return the times of all candidates, for `hvdkit tune`."""
    return {
        "current": [tuner.current.bucket_bytes, tuner.current.wire_format],
        "seconds": [
            [each.bucket_bytes, each.wire_format, times] for each, times in tuner.seconds.items()
        ],
    }
