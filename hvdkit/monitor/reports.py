"""`Reports`: sum the contributions of all ranks, one report at a time.

A report is one small sum over the ranks. The sum begins at the end of a step, runs while the next
step is computed, and is read at the end of the next step. So no rank waits for the sum, and the
record of a step appears one step later.

No decision about a collective depends on data of one rank: reports are due after a number of calls
of `step`, which every rank makes equally often. If a rank has a metric for the first time, a flag
in the sum tells all ranks. All ranks then exchange the names of their metrics and repeat the sum.
All collectives are sums, because a rank in `hvd.join()` takes part in a sum without a call.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

from hvdkit.agreement.collectives import Collectives
from hvdkit.errors import UsageError
from hvdkit.monitor import metrics
from hvdkit.monitor.exchange import (
    Contribution,
    Decoded,
    decode,
    encode,
    exchange_names,
    is_complete,
)

# More names than this are a mistake, such as a name with a number in it.
_MAX_NAMES = 500


class Reports:
    """The reports of a monitor.

    Args:
        collectives: the collectives of the ranks.
        name: the name of the collectives.
        every: steps per report.
    """

    def __init__(self, collectives: Collectives, name: str, every: int) -> None:
        self._collectives = collectives
        self._name = name
        self._every = every
        self._generation: int | None = None
        self._names: list[str] = []
        self._steps_left = every
        # The report that has been started: this rank's part, and a function that waits for the sum.
        self._started: tuple[Contribution, Callable[[], list[int]]] | None = None

    @property
    def is_new_generation(self) -> bool:
        """Whether `init` or `join` was called since the last call of `compare`."""
        return self._collectives.generation != self._generation

    def compare(self, steps: int, flag: bool) -> tuple[int, bool]:
        """Return the most steps of a rank, and whether a rank has set the flag. A collective."""
        self._generation = self._collectives.generation
        own = [0] * len(self._collectives.ranks)
        own[self._place] = steps
        *found, flags = self._collectives.sum([*own, int(flag)], f"{self._name}.steps")
        # New ranks of an elastic job begin with 0, and a rank that was in `join` made fewer steps.
        most = max(found)
        self._steps_left = self._every - most % self._every
        self._names = sorted(metrics.METRICS)
        return most, bool(flags)

    def are_due(self, position: int, steps: int) -> bool:
        """Return whether a report is due `steps` steps after `position`. Not a collective."""
        if self.is_new_generation:  # `compare` will change it to this
            return steps >= self._every - position % self._every
        return steps >= self._steps_left

    def count(self, steps: int) -> bool:
        """Count steps that have ended, and return whether a report is due. Not a collective."""
        self._steps_left -= steps
        return self._steps_left <= 0

    def exchange_names(self, own: Iterable[str]) -> None:
        """Give a slot to each metric of each rank. A collective.

        Raises:
            UsageError: on every rank, if there are too many names.
        """
        added = exchange_names(
            self._collectives, sorted(set(own) - set(self._names)), f"{self._name}.names"
        )
        self._names = sorted({*self._names, *added})
        if len(self._names) > _MAX_NAMES:
            raise UsageError(
                f"Monitor got more than {_MAX_NAMES} names of metrics, such as "
                f"{', '.join(map(repr, added[:3]))}: use the same names in each step"
            )

    def start(self, own: Contribution) -> None:
        """Start a report. A collective."""
        self._steps_left = self._every
        result = self._collectives.start_sum(self._encode(own), self._name)
        self._started = own, functools.cache(result)

    def finish(self, is_read: bool) -> Decoded | None:
        """Complete the report that was started last. A collective if a metric is new.

        Args:
            is_read: whether to return the contributions of all ranks.
        """
        started, self._started = self._started, None
        if started is None:
            return None
        (own, result), ranks = started, list(self._collectives.ranks)
        summed, names = result(), self._names
        again = None
        if not is_complete(summed, names):
            self.exchange_names(own.values)
            again = self._collectives.sum(self._encode(own), f"{self._name}.again")
        if not is_read:
            return None
        decoded = decode(summed, names, ranks)
        if again is not None:
            # A rank that has called `join` meanwhile is only in the first sum.
            values = decode(again, self._names, ranks).values
            decoded = replace(decoded, values={**values, **decoded.values})
        return decoded

    def finish_earlier(self) -> Decoded | None:
        """Return a report that was started before `init` or `join`. Not a collective."""
        started, self._started = self._started, None
        # The report is lost if Horovod was shut down, or if the number of ranks has changed.
        with contextlib.suppress(Exception):
            if started is not None:
                return decode(started[1](), self._names, list(self._collectives.ranks))
        return None

    def wait(self) -> None:
        """Wait for the sum that this rank has started. Not a collective."""
        if self._started is not None:
            self._started[1]()

    def _encode(self, own: Contribution) -> list[int]:
        return encode(own, self._names, self._place, len(self._collectives.ranks))

    @property
    def _place(self) -> int:
        return list(self._collectives.ranks).index(self._collectives.rank)
