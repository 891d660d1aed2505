"""Decide which steps to keep: a pure function of the steps' manifests.

Called by `Writer` after each save, and by `hvdkit checkpoint prune`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdkit.checkpoint.manifest import Manifest
from hvdkit.errors import UsageError

Mode = Literal["min", "max"]

#: Words in the usual names of metrics, separated by `_`, `-`, `/` and the like.
_SMALLEST_IS_BEST = {"loss", "error", "err", "mse", "mae", "rmse", "perplexity", "ppl"}
_SMALLEST_IS_BEST |= {"wer", "cer"}
_LARGEST_IS_BEST = {"accuracy", "acc", "auc", "f1", "precision", "recall", "iou", "dice", "bleu"}
_LARGEST_IS_BEST |= {"map", "ndcg", "psnr", "reward", "return", "r2"}

#: Words that reverse the meaning of a name, or make it a difference.
_UNCLEAR = {"neg", "negative", "minus", "inverse", "inv", "drop", "reduction", "change", "delta"}
_UNCLEAR |= {"diff", "improvement", "gain"}


def _mode_of(metric: str) -> Mode | None:
    """Return whether the smallest or largest value is best, if the metric's name implies it."""
    parts = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if parts & _UNCLEAR or re.match(r"\s*1\W", metric):
        return None
    smallest, largest = parts & _SMALLEST_IS_BEST, parts & _LARGEST_IS_BEST
    if bool(smallest) == bool(largest):
        return None
    return "min" if smallest else "max"


@dataclass(frozen=True)
class KeepBest:
    """Keep the steps with the best values of a metric, however old.

    Attributes:
        metric: its name, as given to `save`.
        mode: "min" or "max": which value is best. Optional if the name implies it, such as
            `val_loss` or `accuracy`.
        count: the number of steps to keep.
    """

    metric: str
    mode: Mode | None = None
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise UsageError(f"KeepBest's metric is {self.metric!r:.40}; expected its name.")
        if self.mode is None:
            object.__setattr__(self, "mode", _mode_of(self.metric))
        if self.mode is None:
            raise UsageError(
                f"KeepBest({self.metric!r}) does not say whether the smallest or the largest value "
                f"is best, and the name of the metric does not tell; expected "
                f"KeepBest({self.metric!r}, 'min') or KeepBest({self.metric!r}, 'max')."
            )
        if self.mode not in ("min", "max"):
            raise UsageError(f"{self.metric}'s mode is {self.mode!r}; expected 'min' or 'max'.")
        if self.count < 1:
            raise UsageError(
                f"KeepBest({self.metric!r}) has count={self.count}; expected 1 or more."
            )

    def of(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> int | None:
        """Return the best of several steps, the newest if several are equally good.

        Args:
            steps: number and metrics of each, oldest first.

        Returns:
            The number of the step; None if no step has a value that is a number.
        """
        ranked = self.ranked([metrics for _, metrics in steps])
        return steps[ranked[0]][0] if ranked else None

    def ranked(self, metrics: Sequence[Mapping[str, float]]) -> list[int]:
        """Return the indices of the steps that have a value which is a number, best first.

        Of equal values, the newer step comes first.

        Args:
            metrics: of each step, oldest first.
        """
        sign = 1 if self.mode == "min" else -1
        valued = [i for i, m in enumerate(metrics) if not math.isnan(m.get(self.metric, math.nan))]
        return sorted(valued, key=lambda i: (sign * metrics[i][self.metric], -i))

    @classmethod
    def parse(cls, text: str) -> KeepBest:
        """Read `METRIC:min` or `METRIC:max`, as the command line takes it.

        Raises:
            UsageError: the text has another form.
        """
        metric, colon, mode = text.rpartition(":")
        if not metric or not colon or mode not in ("min", "max"):
            raise UsageError(
                f"--keep-best is {text!r}; expected METRIC:min or METRIC:max, such as loss:min."
            )
        return cls(metric, "min" if mode == "min" else "max")


@dataclass(frozen=True)
class Retention:
    """Rules for the steps to keep.

    Attributes:
        keep_last: the number of newest steps to keep, at least 1; None keeps all.
        keep_best: the best steps to keep as well.
        keep_every: also keep steps whose number is a multiple of this; None: no such steps.
        of_all_runs: whether the rules hold for all runs together. Otherwise they hold for the run
            that is written, and the steps of older runs are kept.
    """

    keep_last: int | None = 3
    keep_best: Sequence[KeepBest] = ()
    keep_every: int | None = None
    of_all_runs: bool = False

    def __post_init__(self) -> None:
        _check_count("keep_every", self.keep_every, "None for no such steps")
        _check_count("keep_last", self.keep_last, "None to keep all steps")
        for best in self.keep_best:
            if not isinstance(best, KeepBest):
                raise UsageError(
                    f"keep_best has {best!r:.40}; expected KeepBest, such as KeepBest('loss')."
                )

    def missing(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the metrics of `keep_best` that are not in `metrics`."""
        return [best.metric for best in self.keep_best if best.metric not in metrics]

    def kept(self, manifests: Sequence[Manifest]) -> set[int]:
        """Return the indices of the manifests to keep.

        Of two manifests of one step, the older is dropped: a resumed run has saved the step again.

        Args:
            manifests: sorted, oldest first.
        """
        newest = {manifest.step: place for place, manifest in enumerate(manifests)}
        places = sorted(newest.values())
        if self.keep_last is None:
            return set(places)
        stay = set(places[-self.keep_last :])
        if self.keep_every is not None:
            stay.update(p for p in places if manifests[p].step % self.keep_every == 0)
        for best in self.keep_best:
            ranked = best.ranked([manifests[place].metrics for place in places])
            stay.update(places[i] for i in ranked[: best.count])
        return stay


def _check_count(name: str, value: Any, otherwise: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; expected a whole number >= 1, or {otherwise}.")
