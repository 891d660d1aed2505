"""Which steps stay: a pure function of what is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdkit.checkpoint.manifest import Manifest
from hvdkit.errors import UsageError


@dataclass(frozen=True)
class KeepBest:
    """Keep the steps with the best values of a metric, however old.

    Attributes:
        metric: its name, as given to `save`.
        mode: whether the smallest or the largest value is best.
        count: how many to keep.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise UsageError(f"{self.metric}'s mode is {self.mode!r}; expected 'min' or 'max'.")
        if self.count < 1:
            raise UsageError(
                f"{self.count} steps with the best {self.metric} are to be kept; expected 1 or "
                "more."
            )

    @classmethod
    def parse(cls, text: str) -> KeepBest:
        """Read `METRIC:min` or `METRIC:max`, as the command line takes it.

        Raises:
            UsageError: it is not that.
        """
        metric, colon, mode = text.rpartition(":")
        if not metric or not colon or mode not in ("min", "max"):
            raise UsageError(
                f"--keep-best is {text!r}; expected a metric and which is best, such as loss:min."
            )
        return cls(metric, "min" if mode == "min" else "max")


@dataclass(frozen=True)
class Retention:
    """How many steps stay.

    Attributes:
        keep_last: the newest ones, at least 1; None: all.
        keep_best: those that stay besides.
    """

    keep_last: int | None = 3
    keep_best: Sequence[KeepBest] = ()

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise UsageError(
                f"keep_last is {self.keep_last}; expected 1 or more, or None to keep all steps."
            )

    def kept(self, manifests: Sequence[Manifest]) -> set[int]:
        """Which of `manifests`, oldest first, stay: the numbers of their places.

        Of two with the same step number, the older goes: a resumed run has saved it again.
        """
        newest = {manifest.step: place for place, manifest in enumerate(manifests)}
        places = sorted(newest.values())
        if self.keep_last is None:
            return set(places)
        stay = set(places[-self.keep_last :])
        for best in self.keep_best:
            valued = [
                place
                for place in places
                if not math.isnan(manifests[place].metrics.get(best.metric, math.nan))
            ]
            sign = 1 if best.mode == "min" else -1
            # Of equal values the newer is kept.
            valued.sort(key=lambda place: (sign * manifests[place].metrics[best.metric], -place))
            stay.update(valued[: best.count])
        return stay
