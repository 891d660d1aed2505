"""Plan when the launcher asks all ranks for their records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from enum import Enum, auto

#: Seconds to wait for the records of all ranks.
ANSWER_SECONDS = 5.0


class Reason(Enum):
    """The reason for a round of records."""

    #: A collective of a rank has waited for too long.
    STALL = auto()
    #: The time limit of a stall has passed.
    LIMIT = auto()
    #: Some ranks run long after the others have ended.
    LAST_RANKS = auto()
    #: A rank runs long after it has written a traceback.
    RAISED = auto()


@dataclass(frozen=True)
class Round:
    """A round that has ended.

    Attributes:
        reasons: the reasons for it.
        silent: the running ranks that did not send a record.
    """

    reasons: Set[Reason]
    silent: Collection[int]


class RecordRounds:
    """The rounds of records: at most one at a time. All times are of `time.monotonic`.

    Args:
        ask: asks all ranks for records.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._due: dict[Reason, float] = {}
        # The reasons for the round that runs; empty if none runs.
        self._reasons: set[Reason] = set()
        self._began = float("-inf")
        self._answered: dict[int, float] = {}

    @property
    def is_running(self) -> bool:
        """Whether the launcher waits for records."""
        return bool(self._reasons)

    def plan(self, reason: Reason, at: float) -> None:
        """Begin a round after the time `at`, instead of an earlier plan for the same reason."""
        self._due[reason] = at

    def cancel(self, reason: Reason) -> None:
        """Drop the plan for a reason."""
        self._due.pop(reason, None)

    def begin(self, reason: Reason, now: float) -> None:
        """Begin a round: ask all ranks for records."""
        self._reasons.add(reason)
        self._began = now
        self._ask()

    def begin_due(self, now: float) -> None:
        """Begin a round if it is due. A round that runs answers the due reasons, too."""
        due = [reason for reason, at in self._due.items() if now > at]
        if due and not self.is_running:
            self.begin(due[0], now)
        for reason in due:
            self.cancel(reason)
            self._reasons.add(reason)

    def answer(self, rank: int, now: float) -> None:
        """Add that a rank has sent a record."""
        self._answered[rank] = now

    def end(self, now: float, ranks: Collection[int]) -> Round | None:
        """End the round if all `ranks` have sent a record, or if their time is over.

        Call this only while a round runs.

        Returns:
            The round; None if it has not ended.
        """
        silent = [rank for rank in ranks if self._answered.get(rank, float("-inf")) < self._began]
        if silent and now < self._began + ANSWER_SECONDS:
            return None
        ended = Round(frozenset(self._reasons), silent)
        self._reasons.clear()
        return ended
