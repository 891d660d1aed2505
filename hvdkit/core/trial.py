"""A trial of `hvdkit tune`: measure some steps of the user's training, and end it.

`hvdkit tune` starts the user's command with the variable HVDKIT_TRIAL. The first
`DistributedOptimizer` of each rank, or `fit` of Keras, then counts the steps. After the last step,
every rank prints a report, which `hvdkit tune` reads, and raises `SystemExit`. All ranks make the
same steps, so they end after the same step.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

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
    """

    steps: int = 0
    samples: int = 0
    bucket_bytes: tuple[int, ...] = ()
    wire_formats: tuple[str, ...] = ()
    turns: int = 0
    turn_steps: int = 10

    @classmethod
    def requested(cls, environ: Mapping[str, str] = os.environ) -> TrialPlan | None:
        """Return the plan in the environment; None if this process is in no trial."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        fields: dict[str, Any] = json.loads(text)
        for name in ("bucket_bytes", "wire_formats"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def to_json(self) -> str:
        """Return the value of the variable."""
        return json.dumps(asdict(self))


_reported = False


def report_at_exit(rank: int, steps: Callable[[], int]) -> None:
    """Print a report when the script ends by itself, before the trial is over.

    Args:
        rank: this rank.
        steps: returns the steps that were made.
    """

    def report() -> None:
        # After an uncaught exception, the traceback must be the last text of the rank.
        if not _reported and not hasattr(sys, "last_type"):
            _print(rank, steps(), {})

    atexit.register(report)


def end(rank: int, steps: int, **measured: Any) -> NoReturn:
    """Print the report of this rank, and end the script. Not a collective.

    Args:
        rank: this rank.
        steps: the steps that were made.
        measured: further values that JSON can represent.

    Raises:
        SystemExit: always, with status 0.
    """
    global _reported
    _reported = True
    _print(rank, steps, measured)
    raise SystemExit(0)


def _print(rank: int, steps: int, measured: Mapping[str, Any]) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report = {"rank": rank, "steps": steps, "peak_bytes": peak, **measured}
    # A progress bar may have left an unfinished line.
    print(f"\n{MARK}{json.dumps(report)}", flush=True)
