"""The ranks of a job that have failed: which of them is the cause, and what the user is told.

When a rank raises, the others lose it as a peer, and often end before it does: its traceback, its
threads and its `atexit` functions take time, while a lost connection is noticed at once. So the
first to end is not the cause. Failures are collected for a moment, and those that tell of a lost
peer come last.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.errors import RESUMABLE
from hvdkit.processes import ending_text

#: Seconds that other ranks get to fail by themselves, by how far the failure tells its own cause:
#: it does, it may (an exit status alone), it tells of connections, it tells of a lost peer.
_WAITS = (0.5, 2.0, 5.0, 5.0)
_KNOWN, _SILENT, _CONNECTION, _LOST = range(4)

#: Tails of so many failures are shown, each of which ends with another line.
_SHOWN = 3
#: So many lines of each.
_SHOWN_LINES = 20

# Horovod's own words, and those of systems below it, which may also come from a rank's own
# connections, such as to a store.
_SHUT_DOWN = re.compile(r"Horovod has been shut down")
_INTERNAL = re.compile(r"HorovodInternalError")
_BROKEN = re.compile(
    r"Connection (?:closed|reset) by peer|ncclRemoteError|remote process exited|Broken pipe"
)
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = re.compile(r"direct cause of the following|During handling of the above")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Failure:
    """One rank that has ended with a status other than 0.

    Attributes:
        rank: the rank.
        status: its exit status, negative for a signal.
        tail: the last lines that it wrote.
    """

    rank: int
    status: int
    tail: Sequence[str]

    @property
    def traceback(self) -> list[str]:
        """The lines from the last traceback on; of chained ones, from the first. Empty if none."""
        lines = list(self.tail)
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        while len(starts) > 1 and _CHAINED.search("\n".join(lines[starts[-2] : starts[-1]])):
            starts.pop()  # an exception that another one has led to
        return lines[starts[-1] :] if starts else []

    @property
    def exception(self) -> str | None:
        """The line that names the exception, of chained ones the last; None without any."""
        found = None
        before = ""
        for line in self.traceback:
            # A traceback's own lines are indented, save for its first.
            if before.startswith("  ") and line[:1].strip():
                found = line
            before = line
        return found

    @property
    def doubt(self) -> int:
        """The likelihood that another rank is the cause, from `_KNOWN` (low) to `_LOST`."""
        text = "\n".join(self.traceback or self.tail)
        broken = _BROKEN.search(text)
        if _SHUT_DOWN.search(text) or (broken and _INTERNAL.search(text)):
            return _LOST
        if broken:
            return _CONNECTION
        return _KNOWN if self.traceback or self.status < 0 else _SILENT

    @property
    def last_line(self) -> str:
        """The last line, with its numbers left out: equal where ranks failed alike."""
        lines = [line for line in self.tail if line.strip()]
        return _NUMBER.sub("", lines[-1]) if lines else ""


class Failures:
    """The failures of a job, in the order in which they become known.

    Args:
        describe: names ranks, such as "rank 1 on host1".
    """

    def __init__(self, describe: Callable[[list[int]], str]) -> None:
        self._describe = describe
        self._found: list[Failure] = []
        self._deadline = float("inf")

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, rank: int, status: int, tail: Sequence[str]) -> None:
        """Record that a rank has ended with `status`, which is not 0."""
        failure = Failure(rank, status, tail)
        self._found.append(failure)
        if status != RESUMABLE:
            self._deadline = min(self._deadline, time.monotonic() + _WAITS[failure.doubt])

    @property
    def deadline(self) -> float:
        """When the ranks that are left are to be ended; infinite while none has failed."""
        return self._deadline

    @property
    def resumable(self) -> bool:
        """Whether all of them have stopped in order, and can go on."""
        return all(failure.status == RESUMABLE for failure in self._found)

    @property
    def cause(self) -> Failure:
        """The failure that has led to the others, as far as is known."""
        return self._ordered()[0]

    def _ordered(self) -> list[Failure]:
        worse = [failure for failure in self._found if failure.status != RESUMABLE]
        return sorted(worse, key=lambda failure: failure.doubt)

    def report(self, ended: int, finished: Sequence[int]) -> str:
        """Return what the user is told.

        Args:
            ended: the number of ranks that were ended because of the failures.
            finished: ranks that had ended without an error.
        """
        first, *others = self._ordered()
        told = [f"{self._describe([first.rank])} failed: {ending_text(first.status)}"]
        after = [each for each in others if each.doubt == _LOST and first.doubt < _LOST]
        if after:
            told.append(f"{_count(len(after))} failed after it, because a peer was lost")
        if ended:
            told.append(f"the {ended} that still ran {'was' if ended == 1 else 'were'} ended")
        lines = ["; ".join(told) + "."]
        if first.doubt == _LOST:
            stopped = [each.rank for each in self._found if each.status == RESUMABLE]
            lines.append(_without_cause(self._describe, finished, stopped))
        lines.append(tail_of(first.rank, first.tail))
        shown = {first.last_line}
        alike = [each for each in others if each.doubt < _LOST or first.doubt == _LOST]
        for failure in alike:
            if failure.last_line not in shown and len(shown) < _SHOWN:
                shown.add(failure.last_line)
                ending = ending_text(failure.status)
                lines.append(f"{self._describe([failure.rank])} failed, too: {ending}.")
                lines.append(tail_of(failure.rank, failure.tail))
        same = sum(failure.last_line == first.last_line for failure in alike)
        if same:
            lines.append(f"{_count(same)} more failed like rank {first.rank}.")
        return "\n".join(lines)


def _without_cause(
    describe: Callable[[list[int]], str], finished: Sequence[int], stopped: Sequence[int]
) -> str:
    """Say what may have happened where every failure tells of a lost peer."""
    told = "Each rank that failed had lost a peer, and none said why."
    if finished:
        told += f" {describe(list(finished))} had ended without an error: with fewer batches?"
    if stopped:
        told += f" {describe(list(stopped))} had stopped in order (exit status {RESUMABLE})."
    return told


def tail_of(rank: int, tail: Sequence[str]) -> str:
    """Return the last lines of a rank, under a heading."""
    if not tail:
        return f"Rank {rank} wrote nothing."
    shown = tail[-_SHOWN_LINES:]
    return "\n".join([f"Rank {rank}'s last lines:", *(f"  {line}" for line in shown)])


def _count(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
