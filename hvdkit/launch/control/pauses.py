"""Notice that the launcher did not run for some time: a stopped process, or a suspended machine.

Meanwhile it did not read the messages of agents, so it does not know the state of the ranks.
"""

from __future__ import annotations

from hvdkit.launch.control.messages import PAUSE_SECONDS
from hvdkit.launch.ending.events import Resumed
from hvdkit.launch.ending.journal import Journal

#: The time in which the launcher reads the messages that arrived while it was stopped.
_READ_SECONDS = 1.0
#: Seconds for which a pause may be the cause of what the launcher sees.
_REMEMBERED_SECONDS = 60.0


class Pauses:
    """The pauses of this process. All times are of `time.monotonic`.

    Args:
        journal: the events of the job, which get the pauses.

    Attributes:
        read_until: all messages that had arrived until this time have been handled.
    """

    def __init__(self, journal: Journal, now: float) -> None:
        self._journal = journal
        self._looked_at = self.read_until = now
        self._start = Resumed(now, 0.0)

    @property
    def last(self) -> Resumed:
        """The end of the last pause; without one, the start of the job."""
        return self._journal.facts.resumed or self._start

    def look(self, now: float) -> None:
        """Note a pause since the last call."""
        pause = now - self._looked_at
        self._looked_at = now
        if pause > PAUSE_SECONDS:
            self._journal.add(Resumed(now, pause))

    def note_read(self, until: float, now: float) -> None:
        """Note that all messages that had arrived until a time have been handled.

        A write of output to a slow reader also counts as a pause, and may follow on another one.
        """
        # After a pause, threads first have to receive the messages that arrived meanwhile.
        resumed = self.last
        if until < resumed.at or now > resumed.at + _READ_SECONDS or not resumed.seconds:
            self.read_until = until

    def has_read(self, now: float) -> bool:
        """Return whether the last messages have been handled: the state of the ranks is known.

        The queue may contain much output, whose reader is slow, before a message that matters.
        """
        return now < self.read_until + _READ_SECONDS

    def ended_agents(self, now: float, timeout: float) -> bool:
        """Return whether agents end now because a pause was longer than their timeout."""
        recently = now < self.last.at + PAUSE_SECONDS
        return recently and self.last.seconds > max(0, timeout - PAUSE_SECONDS)

    def sentence(self, now: float) -> str:
        """Return a sentence about a pause in the last minute; "" if there was none."""
        at, seconds = self.last.at, self.last.seconds
        if not seconds or now >= at + _REMEMBERED_SECONDS:
            return ""
        return (
            f"This launcher did not run for {seconds:.0f} s, until {now - at:.0f} s ago (SIGSTOP, "
            f"a suspended job or machine, or a program that did not read its output)."
        )
