"""Steps as the methods of a checkpointer return them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.checkpoint.retention import KeepBest
from hvdkit.checkpoint.store import Store
from hvdkit.errors import UsageError


@dataclass(frozen=True)
class Restored:
    """The step that a job resumes from.

    Attributes:
        step: as given to `save`.
        epoch: as given to `save`.
        metrics: as given to `save`.
        world_size: the number of ranks of the job that saved it.
    """

    step: int
    epoch: int | None
    metrics: Mapping[str, float]
    world_size: int


@dataclass(frozen=True)
class SavedStep:
    """A step that can be restored.

    Attributes:
        step: as given to `save`.
        epoch: as given to `save`.
        metrics: as given to `save`.
        location: its path or URL.
    """

    step: int
    epoch: int | None
    metrics: Mapping[str, float]
    location: str


def described(store: Store) -> list[dict[str, Any]]:
    """Return the fields of a `SavedStep` for each complete step of the newest run."""
    return [
        {
            "step": info.step,
            "epoch": info.manifest.epoch,
            "metrics": dict(info.manifest.metrics),
            "location": info.location,
        }
        for info in store.steps_of_newest_run()
    ]


def best_of(steps: Sequence[SavedStep], wanted: KeepBest) -> int | None:
    """Return the number of the best step; None if there is none, or the metric was NaN in all.

    Raises:
        UsageError: there are steps, and none has the metric.
    """
    metric = wanted.metric
    if steps and not any(metric in saved.metrics for saved in steps):
        known = sorted({name for saved in steps for name in saved.metrics})
        expected = (
            f"expected one of {', '.join(known)}"
            if known
            else (f"save() was called without metrics: pass metrics={{{metric!r}: ...}}")
        )
        raise UsageError(f"no step has the metric {metric!r}: {expected}")
    return wanted.of([(saved.step, saved.metrics) for saved in steps])
