"""Find slow ranks, for which all other ranks wait in each step.

A rank's own time is the time between two reductions, in which the rank reads data, computes and
updates. In the rest of the time, it waits for the network and for slower ranks, in reductions and
in collectives of the script. So all ranks have about the same time per step, and only the own times
show which rank is slow.

A rank's own time is compared with the median of the other ranks, as in NVIDIA's resiliency
extension (https://nvidia.github.io/nvidia-resiliency-ext/straggler_det/).
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

from hvdkit.agreement.collectives import Collectives
from hvdkit.runtime.counters import counters

#: The sections of a step. `WAIT` is a reduction; the others are a rank's own time.
FORWARD, BACKWARD, WAIT, UPDATE = "data and forward", "backward", "wait", "update"
SECTIONS = (FORWARD, BACKWARD, WAIT, UPDATE)

# A rank is slow if its own time is more than this many times the median of the other ranks,
_SLOW = 1.2
# and if the difference is more than this part of its total time. Smaller differences may be chance.
_LOST = 0.05
# Consecutive reports in which a rank is slow before it is named, and the seconds that they cover.
# Over a shorter time, another program on the host can make any rank slow.
_REPORTS = 2
_PERSISTENT_SECONDS = 10.0
# Reports over fewer seconds are ignored, because the host's scheduler can make any rank slow.
_SECONDS = 0.5

_log = logging.getLogger("hvdkit")

# The times that are measured in this process.
_measured: weakref.WeakSet[StepTimes] = weakref.WeakSet()


def wait_measured(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function like `wait` whose time counts as `WAIT`, in the thread that trains.

    Args:
        wait: the framework's function that waits for a collective.
    """

    @functools.wraps(wait)
    def measured(handle: Any) -> Any:
        interrupted = [(times, times.begin_wait()) for times in list(_measured)]
        began = time.perf_counter()
        try:
            return wait(handle)
        finally:
            if any(section is not None for _, section in interrupted):
                counters.count_wait(time.perf_counter() - began)
            for times, section in interrupted:
                times.end_wait(section)

    return measured


class _Current(NamedTuple):
    """The section of a rank.

    Attributes:
        section: the section.
        since: the time at which it began; None if nothing is counted.
        thread: the thread that trains. A backward pass on a GPU has another one.
        forward_began: see `StepTimes`.
    """

    section: str = FORWARD
    since: float | None = None
    thread: int = 0
    forward_began: float = float("-inf")


class StepTimes:
    """The time that this rank has spent in each section.

    Args:
        clock: returns seconds.

    Attributes:
        seconds: section -> seconds since the beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._current = _Current()
        # `seconds` at the last `take`.
        self._taken: dict[str, float] = {}
        _measured.add(self)

    @property
    def forward_began(self) -> float:
        """The seconds of `FORWARD` when this section began last, after another one."""
        return self._current.forward_began

    def enter(self, section: str) -> None:
        """Record that a section begins, and the current one ends."""
        if section == FORWARD:
            now = self._current._replace(thread=threading.get_ident())
            if now.since is not None and now.section != FORWARD:
                now = now._replace(forward_began=self.seconds.get(FORWARD, 0.0))
            self._current = now
        self._switch(section)

    def begin_wait(self) -> str | None:
        """Record that a collective begins to wait. Return the section for `end_wait`.

        Returns None if this thread does not train, or nothing is counted.
        """
        now = self._current
        if now.since is None or now.thread != threading.get_ident() or now.section == WAIT:
            return None
        self._switch(WAIT)
        return now.section

    def end_wait(self, section: str | None) -> None:
        """Record that the collective of `begin_wait` has ended: the section continues."""
        if section is not None and self._current.section == WAIT:
            self._switch(section)

    def _switch(self, section: str) -> None:
        now, before = self._clock(), self._current
        if before.since is not None:
            spent = self.seconds.get(before.section, 0.0) + now - before.since
            self.seconds[before.section] = spent
        self._current = before._replace(section=section, since=now)

    def start(self) -> None:
        """Count again after `stop`, beginning with the section `FORWARD`."""
        if self._current.since is None:
            self.enter(FORWARD)

    def stop(self) -> None:
        """Stop counting until the next `enter` or `start`."""
        if self._current.since is not None:
            self._switch(self._current.section)
        self._current = self._current._replace(since=None)

    def end_step(self) -> None:
        """Record that a step ends, and the next one begins."""
        self.enter(FORWARD)

    def totals(self) -> dict[str, float]:
        """Return the seconds in each section since the beginning."""
        if self._current.since is not None:
            self._switch(self._current.section)
        return dict(self.seconds)

    def take(self) -> dict[str, float]:
        """Return the seconds in each section since the last call of this method."""
        totals = self.totals()
        spent = {s: seconds - self._taken.get(s, 0.0) for s, seconds in totals.items()}
        self._taken.update(totals)
        return {section: seconds for section, seconds in spent.items() if seconds}


class MeasuredTimes(Protocol):
    """The times of a rank, see `StepTimes`."""

    def take(self) -> dict[str, float]:
        """Return the seconds in each section since the last call of this method."""
        ...


class StragglerReport:
    """Compare the times of all ranks every few steps. Every rank has one.

    Args:
        collectives: the collectives of the ranks.
        times: the times of this rank.
    """

    def __init__(self, collectives: Collectives, times: MeasuredTimes) -> None:
        self._collectives = collectives
        self._times = times
        # The seconds of the last reports in a row in which this rank was slow.
        self._slow: list[float] = []

    def report(self) -> None:
        """Compare the times since the last report. A slow rank logs a warning. A collective.

        Ranks in `join` are not compared.
        """
        self.compare(self._collectives.sum(self.numbers(), "hvdkit.stragglers"))

    def numbers(self) -> list[int]:
        """Return this rank's times since the last report, to be summed over the ranks.

        The list has the microseconds in each section for each rank. Those of other ranks are zeros.
        """
        own, ranks = self._times.take(), list(self._collectives.ranks)
        microseconds = [0] * (len(ranks) * len(SECTIONS))
        place = ranks.index(self._collectives.rank) * len(SECTIONS)
        for k, section in enumerate(SECTIONS):
            microseconds[place + k] = int(own.get(section, 0.0) * 1e6)
        return microseconds

    def compare(self, summed: Sequence[int]) -> None:
        """Log a line if this rank is slow. Not a collective.

        Args:
            summed: the sums of `numbers` over the ranks.
        """
        ranks = list(self._collectives.ranks)
        times = {}
        for k, rank in enumerate(ranks):
            of_rank = summed[k * len(SECTIONS) : (k + 1) * len(SECTIONS)]
            if any(of_rank):
                times[rank] = {s: n / 1e6 for s, n in zip(SECTIONS, of_rank, strict=True)}
        seconds = max((sum(each.values()) for each in times.values()), default=0.0)
        if len(times) < 2 or seconds < _SECONDS:
            return
        rank = self._collectives.rank
        if rank not in times or not is_slow(rank, times):
            self._slow.clear()
            return
        self._slow.append(seconds)
        if _persists(self._slow) and not _persists(self._slow[:-1]):
            _log.warning("%s", describe(rank, times))


def _persists(reports: Sequence[float]) -> bool:
    return len(reports) >= _REPORTS and sum(reports) >= _PERSISTENT_SECONDS


def own_time(seconds: Mapping[str, float]) -> float:
    """Return the seconds outside of reductions."""
    return sum(value for section, value in seconds.items() if section != WAIT)


def is_slow(rank: int, times: Mapping[int, Mapping[str, float]]) -> bool:
    """Return whether a rank needs 20 % more time of its own than the median of the others.

    The difference must also be more than 5 % of the rank's total time.

    Args:
        rank: the rank.
        times: rank -> section -> seconds.
    """
    others = median(own_time(seconds) for other, seconds in times.items() if other != rank)
    own, total = own_time(times[rank]), sum(times[rank].values())
    return own > _SLOW * others and own - others > _LOST * total


def describe(rank: int, times: Mapping[int, Mapping[str, float]]) -> str:
    """Return a line about a slow rank, in the process of that rank.

    Args:
        rank: the rank.
        times: rank -> section -> seconds.
    """
    others = [seconds for other, seconds in times.items() if other != rank]
    own, usual = own_time(times[rank]), median(map(own_time, others))
    lost = {
        section: times[rank][section] - median(seconds[section] for seconds in others)
        for section in (FORWARD, BACKWARD, UPDATE)
    }
    worst = max(lost, key=lambda section: lost[section])
    total = sum(times[rank].values())
    return (
        f"rank {rank} on host {socket.gethostname()} is slow: in the last {total:.1f} s it spent "
        f"{own:.1f} s outside of reductions, and the median of the other ranks is {usual:.1f} s. "
        f"The largest difference is in {worst}. All ranks wait for it, "
        f"{100 * (own - usual) / total:.0f} % of the time."
    )
