"""Notice that the launcher did not run for some time: a stopped process, or a suspended machine.

Meanwhile it did not read the messages of agents, so it does not know the state of the ranks.
"""

from __future__ import annotations

from hvdkit.launch.messages import PAUSE_SECONDS

#: The time in which the launcher reads the messages that arrived while it was stopped.
_READ_SECONDS = 1.0
#: Seconds for which a pause may be the cause of what the launcher sees.
_REMEMBERED_SECONDS = 60.0


class Pauses:
    """The pauses of this process. All times are of `time.monotonic`.

    Args:
        now: the time.
    """

    def __init__(self, now: float) -> None:
        self._looked_at = now
        #: The end of the last pause; the start of the job without one.
        self.resumed_at = now
        #: The seconds of the last pause; 0 without one.
        self.seconds = 0.0
        #: All messages that had arrived until this time have been handled.
        self.read_until = now

    def look(self, now: float) -> float:
        """Return the seconds of a pause since the last call; 0 if there was none."""
        pause = now - self._looked_at
        self._looked_at = now
        if pause <= PAUSE_SECONDS:
            return 0.0
        self.resumed_at, self.seconds = now, pause
        return pause

    def note_read(self, until: float, now: float) -> None:
        """Note that all messages that had arrived until a time have been handled.

        A write of output to a slow reader also counts as a pause, and may follow on another one.
        """
        # After a pause, threads first have to receive the messages that arrived meanwhile.
        if until < self.resumed_at or now > self.resumed_at + _READ_SECONDS or not self.seconds:
            self.read_until = until

    def has_read(self, now: float) -> bool:
        """Return whether the last messages have been handled: the state of the ranks is known.

        The queue may contain much output, whose reader is slow, before a message that matters.
        """
        return now < self.read_until + _READ_SECONDS

    def ended_agents(self, now: float, timeout: float) -> bool:
        """Return whether agents end now because a pause was longer than their timeout."""
        recently = now < self.resumed_at + PAUSE_SECONDS
        return recently and self.seconds > max(0, timeout - PAUSE_SECONDS)

    def sentence(self, now: float) -> str:
        """Return a sentence about a pause in the last minute; "" if there was none."""
        if not self.seconds or now >= self.resumed_at + _REMEMBERED_SECONDS:
            return ""
        return (
            f"This launcher did not run for {self.seconds:.0f} s, until "
            f"{now - self.resumed_at:.0f} s ago (SIGSTOP, a suspended job or machine, or a program "
            f"that did not read its output)."
        )
