"""A trial of `hvdkit tune`: measure some steps of the user's training, and end it.

`hvdkit tune` starts the user's command with the variable HVDKIT_TRIAL. The steps of a rank are
counted by its first `DistributedOptimizer` of PyTorch, by `fit` of Keras, or by its first
`DistributedGradientTape`. After the last step, every rank prints a report, which `hvdkit tune`
reads, and raises `SystemExit`. All ranks make the same steps, so they end after the same step.

PyTorch measures all candidates in one run. A graph of TensorFlow contains its buckets, so Keras and
TensorFlow measure one candidate in each run.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NoReturn

from hvdkit.reduction.plan import Reduction
from hvdkit.reduction.wire_format import WireFormat
from hvdkit.training.tuning import WARM_UP

#: The settings of a trial.
VARIABLE = "HVDKIT_TRIAL"
#: The batch size of each rank, for the user's script.
BATCH_VARIABLE = "HVDKIT_BATCH_SIZE"
#: The beginning of a report's line.
MARK = "hvdkit.trial "


@dataclass(frozen=True)
class TrialPlan:
    """The settings of a trial, the same on every rank.

    Attributes:
        steps: the number of steps; ignored if `turns` is not 0.
        samples: the batch of each rank, to measure the noise scale; 0: do not measure it.
        bucket_bytes: bucket sizes to measure.
        wire_formats: names of wire formats to measure beside the script's own.
        turns: the turns of each candidate; 0: measure no candidates.
        turn_steps: the steps of each turn.
        candidate: the bucket size in bytes and the wire format of this run, for Keras and
            TensorFlow; None: those of the script.
    """

    steps: int = 0
    samples: int = 0
    bucket_bytes: tuple[int, ...] = ()
    wire_formats: tuple[str, ...] = ()
    turns: int = 0
    turn_steps: int = 10
    candidate: tuple[int, str] | None = None

    @classmethod
    def requested(cls, environ: Mapping[str, str] = os.environ) -> TrialPlan | None:
        """Return the plan in the environment; None if this process is in no trial."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        fields: dict[str, Any] = json.loads(text)
        for name in ("bucket_bytes", "wire_formats"):
            fields[name] = tuple(fields[name])
        fields["candidate"] = fields["candidate"] and tuple(fields["candidate"])
        return cls(**fields)

    def to_json(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


def with_candidate(reduction: Reduction, format_of: Callable[[str], WireFormat]) -> Reduction:
    """Return the settings of a reduction in this run: the given ones, except for a candidate.

    Args:
        reduction: the settings of the script.
        format_of: returns the wire format with a name.
    """
    requested = TrialPlan.requested()
    if requested is None or requested.candidate is None:
        return reduction
    size, name = requested.candidate
    chosen = reduction.format if name == reduction.format.name else format_of(name)
    return replace(reduction, bucket_bytes=size, format=chosen)


class BatchCount:
    """Counts and times the batches of a run of Keras or TensorFlow.

    Args:
        plan: what to measure.
        rank: this rank.
        window: the batches of a step. If candidates are measured, the time of a step is that of all
            its batches, because only the last one communicates.
        clock: returns seconds.

    """

    def __init__(
        self,
        plan: TrialPlan,
        rank: int,
        window: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank = rank
        self._measures = plan.turns > 0
        self._window = window
        steps = WARM_UP + plan.turns * plan.turn_steps
        self._last = steps * window if self._measures else plan.steps
        self._clock = clock
        # The batches that were trained, and the time: at the beginning, and after each `add`.
        self._trained = [(0, clock())]
        report_at_exit(rank, lambda: self.made)

    @property
    def made(self) -> int:
        """The batches that were trained."""
        return self._trained[-1][0]

    @property
    def over(self) -> bool:
        """Whether the last batch was trained, and a step was timed if candidates are measured."""
        return self.made >= self._last and (bool(self._times()) or not self._measures)

    def add(self, batches: int = 1) -> None:
        """Count batches that have been trained, together if there are several."""
        self._trained.append((self.made + batches, self._clock()))

    def _times(self) -> list[float]:
        """Return the times of the steps after the warm-up."""
        # With `steps_per_execution`, the first batches may end together with later ones.
        ends = [(made, now) for made, now in self._trained if not made % self._window]
        return [
            (now - since) / (made - before) * self._window
            for (before, since), (made, now) in pairwise(ends)
            if before >= WARM_UP * self._window
        ]

    def report(self, reduction: Reduction, gradient_bytes: int) -> None:
        """Print the report of this rank. Not a collective.

        Args:
            reduction: the settings of the reduction.
            gradient_bytes: the size of the gradients of a step.
        """
        measured: dict[str, Any] = {}
        if self._measures:
            measured["run"] = {
                "settings": [reduction.bucket_bytes, reduction.format.name],
                "gradient_bytes": gradient_bytes,
                "seconds": statistics.median(self._times()),
            }
        report(self._rank, self.made, **measured)


_counting = _reported = False
# The settings of the first tape's reductions, and the most bytes that a tape has reduced.
_reduced: tuple[Reduction, int] | None = None


def counting() -> bool:
    """Return whether the steps of this process are counted already."""
    return _counting


def note_reduction(reduction: Reduction, gradient_bytes: int) -> None:
    """Note the reduction of a tape, for the report.

    Args:
        reduction: its settings.
        gradient_bytes: the size of its gradients.
    """
    global _reduced
    first, size = _reduced or (reduction, 0)
    _reduced = first, max(size, gradient_bytes)


def noted_reduction() -> tuple[Reduction, int] | None:
    """Return the first tape's settings, and the most bytes of a tape; None without a tape."""
    return _reduced


def report_at_exit(rank: int, steps: Callable[[], int]) -> None:
    """Print a report when the script ends by itself, before the trial is over.

    Args:
        rank: this rank.
        steps: returns the steps that were made.
    """

    def report_now() -> None:
        # After an uncaught exception, the traceback must be the last text of the rank.
        if not _reported and not hasattr(sys, "last_type"):
            _print(rank, steps(), {})

    global _counting
    _counting = True
    atexit.register(report_now)


def report(rank: int, steps: int, **measured: Any) -> None:
    """Print the report of this rank. Not a collective.

    Args:
        rank: this rank.
        steps: the steps that were made.
        measured: further values that JSON can represent.
    """
    global _reported
    _reported = True
    _print(rank, steps, measured)


def end(rank: int, steps: int, **measured: Any) -> NoReturn:
    """Print the report of this rank, and end the script. Not a collective.

    Args:
        rank: see `report`.
        steps: see `report`.
        measured: see `report`.

    Raises:
        SystemExit: always, with status 0.
    """
    report(rank, steps, **measured)
    raise SystemExit(0)


def _print(rank: int, steps: int, measured: Mapping[str, Any]) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {"rank": rank, "steps": steps, "peak_bytes": peak, **measured}
    # A progress bar may have left an unfinished line.
    print(f"\n{MARK}{json.dumps(report)}", flush=True)
