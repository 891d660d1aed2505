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

#: Seconds that other ranks get to fail by themselves once a failure is known that may be the cause.
_SETTLE_SECONDS = 0.5
#: The same, from the first failure on, while all failures tell of a lost peer.
_CAUSE_SECONDS = 5.0

#: Tails of so many failures are shown, each of which ends with another line.
_SHOWN = 3

# Horovod's own words, and those of systems below it. The second may also come from a rank's own
# connections, such as to a store.
_LOST_PEER = re.compile(r"HorovodInternalError|Horovod has been shut down")
_LOST_CONNECTION = re.compile(
    r"Connection (?:closed|reset) by peer|ncclRemoteError|remote process exited|Broken pipe"
)
_TRACEBACK = "Traceback (most recent call last)"
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
    def of_peer(self) -> int:
        """How surely the rank failed because another one did: 0 not, 1 perhaps, 2 surely."""
        lines = list(self.tail)
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        text = "\n".join(lines[starts[-1] :] if starts else lines)
        return 2 if _LOST_PEER.search(text) else int(bool(_LOST_CONNECTION.search(text)))

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
        self._first_at = float("inf")
        self._cause_at = float("inf")

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, rank: int, status: int, tail: Sequence[str]) -> None:
        """Record that a rank has ended with `status`, which is not 0."""
        failure = Failure(rank, status, tail)
        self._found.append(failure)
        if status != RESUMABLE:
            now = time.monotonic()
            self._first_at = min(self._first_at, now)
            if not failure.of_peer:
                self._cause_at = min(self._cause_at, now)

    @property
    def deadline(self) -> float:
        """When the ranks that are left are to be ended; infinite while none has failed."""
        return min(self._cause_at + _SETTLE_SECONDS, self._first_at + _CAUSE_SECONDS)

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
        return sorted(worse, key=lambda failure: failure.of_peer)

    def report(self, ended: int, finished: Sequence[int]) -> str:
        """Return what the user is told.

        Args:
            ended: the number of ranks that were ended because of the failures.
            finished: ranks that had ended without an error.
        """
        first, *others = self._ordered()
        told = [f"{self._describe([first.rank])} failed: {ending_text(first.status)}"]
        after = [failure.rank for failure in others if failure.of_peer > first.of_peer]
        if after:
            told.append(f"{_count(len(after))} failed after it, because a peer was lost")
        if ended:
            told.append(f"the {ended} that still ran {'was' if ended == 1 else 'were'} ended")
        lines = ["; ".join(told) + "."]
        if first.of_peer:
            lines.append(_without_cause(self._describe, finished))
        lines.append(tail_of(first.rank, first.tail))
        shown = {first.last_line}
        alike = [failure for failure in others if failure.of_peer == first.of_peer]
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


def _without_cause(describe: Callable[[list[int]], str], finished: Sequence[int]) -> str:
    """Say what may have happened where every failure tells of a lost peer."""
    told = "Each rank that failed had lost a peer, and none said why."
    if finished:
        told += f" {describe(list(finished))} had ended without an error: with fewer batches?"
    return told


def tail_of(rank: int, tail: Sequence[str]) -> str:
    """Return the last lines of a rank, under a heading."""
    if not tail:
        return f"Rank {rank} wrote nothing."
    return "\n".join([f"Rank {rank}'s last lines:", *(f"  {line}" for line in tail)])


def _count(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
