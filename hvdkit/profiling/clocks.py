"""Measure the offset between the clock of a rank and that of the first rank.

No rank leaves a collective before all ranks have entered it. So with times of their own clocks,

    entered(i) - left(j)  <=  offset(i) - offset(j)  <=  left(i) - entered(j)

holds for each collective and each pair of ranks i and j. The upper bound is tight if j enters last,
and the lower bound if i enters last. Therefore the ranks take turns: in each round, which is one
collective, one group of ranks enters about 1 ms after the others. The bounds of all rounds are true
at the same time, so the tightest two count. The middle between them is the estimate, and half of
their distance bounds its error. As in NTP (RFC 5905), the shortest round trip decides. Unlike NTP,
the method does not assume that both directions take equally long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.agreement.collectives import Collectives
from hvdkit.errors import HvdkitError

# The largest number of groups. The ranks of one group enter a round late.
_GROUPS = 32
# The number of rounds in which each group is late.
_TURNS = 10
# The first rounds connect the ranks and fill caches.
_WARM_UP = 2
# By how much a rank is late: longer than the ranks need to leave a round.
_LATE_SECONDS = 0.001

#: The clock of this rank in nanoseconds: monotonic, because the time of day may jump.
now = time.monotonic_ns

_BOOT = Path("/proc/sys/kernel/random/boot_id")

#: The time at which a rank has entered a collective, and the time at which it has left it, both in
#: nanoseconds of its own clock.
Round = tuple[int, int]


@dataclass(frozen=True)
class Offset:
    """The time of a clock minus that of the first rank's clock.

    Attributes:
        nanoseconds: the estimate.
        error: the largest error of the estimate, in nanoseconds.
        time: the time of the measurement, by this clock.
    """

    nanoseconds: float
    error: float
    time: float


def measure(collectives: Collectives, name: str) -> list[Round]:
    """Measure the rounds, and return those of this rank. A collective: a round takes about 2 ms.

    Args:
        collectives: the collectives of the ranks.
        name: the name of the collective of each round.
    """
    groups = min(len(collectives.ranks), _GROUPS)
    own = list(collectives.ranks).index(collectives.rank) % groups
    rounds = []
    for number in range(_WARM_UP + groups * _TURNS):
        if number % groups == own:
            time.sleep(_LATE_SECONDS)
        entered = now()
        collectives.sum([0], name)
        rounds.append((entered, now()))
    return rounds[_WARM_UP:]


def offset_of(own: Sequence[Round], first: Sequence[Round]) -> Offset:
    """Return the offset of a clock from the rounds of its rank and of the first rank."""
    pairs = list(zip(own, first, strict=True))
    low = max(entered - left for (entered, _), (_, left) in pairs)
    high = min(left - entered for (_, left), (entered, _) in pairs)
    # `low` is above `high` if one of the clocks was set during the measurement.
    return Offset((low + high) / 2, abs(high - low) / 2, sum(map(sum, own)) / len(own) / 2)


def difference(marks: Sequence[Round], found: Sequence[Round]) -> int:
    """Return this clock's time minus that of a framework's profiler, in nanoseconds.

    A mark is a short event that this process makes and the profiler records.

    Args:
        marks: the times before and after each mark, by this clock, in nanoseconds.
        found: the beginning and the end of each mark, by the profiler, in nanoseconds.

    Raises:
        HvdkitError: the profiler has not recorded all marks.
    """
    if not found or len(found) != len(marks):
        raise HvdkitError(
            f"the framework's profiler has recorded {len(found)} of {len(marks)} "
            f"events that hvdkit needs to compare the clocks. Another profiler may run in this "
            f"process: end that profiler first"
        )
    pairs = list(zip(marks, sorted(found), strict=True))
    low = max(before - begin for (before, _), (begin, _) in pairs)
    high = min(after - end for (_, after), (_, end) in pairs)
    return (low + high) // 2


@dataclass(frozen=True)
class ClockChange:
    """The offset of a rank's clock between two measurements, interpolated linearly.

    Attributes:
        begin: the first measurement.
        end: the second measurement.
    """

    begin: Offset
    end: Offset

    @property
    def error(self) -> float:
        """The largest error of `to_first` in nanoseconds, if both clocks have constant rates."""
        return max(self.begin.error, self.end.error)

    def offset(self, time: float) -> float:
        """Return the offset at a time of this clock, in nanoseconds."""
        begin, end = self.begin, self.end
        if end.time <= begin.time:
            return begin.nanoseconds
        part = (time - begin.time) / (end.time - begin.time)
        return begin.nanoseconds + part * (end.nanoseconds - begin.nanoseconds)

    def to_first(self, time: int) -> int:
        """Return the first rank's time for a time of this clock, both in nanoseconds.

        The order of times is kept, so an event inside another one stays inside it.
        """
        return time - round(self.offset(time))


def clock_change(begin: Offset, end: Offset, same_clock: bool) -> ClockChange:
    """Return the change between two measurements.

    Args:
        begin: the first measurement.
        end: the second measurement.
        same_clock: whether both ranks read the clock of the same kernel. Then the offset is 0,
            unless the measurements exclude 0: libfaketime may change the time of one process.
    """
    both = (begin, end)
    if same_clock and all(abs(each.nanoseconds) <= each.error for each in both):
        begin, end = (Offset(0.0, 0.0, each.time) for each in both)
    return ClockChange(begin, end)


def kernel() -> str:
    """Return the id of the running kernel, whose clock this process reads; empty if unknown."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""
