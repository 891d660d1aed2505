"""Find the ranks that are late in `hvd.init()`.

Over Gloo, ranks register at the rendezvous, and the engine has a timeout for their connections.
Over MPI, there is no rendezvous, and the engine waits forever for a rank that is late. So ranks
note how far they are (`hvdkit.record_files`), and their agents send these notes. Ranks that pass
`comm` to `hvd.init()` note nothing, because ranks outside of `comm` need not call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: The launcher asks for the states of the processes so many seconds before the deadline.
_ASK_SECONDS = 3.0


@dataclass(frozen=True)
class LateRanks:
    """The ranks that have not started in time.

    Attributes:
        ranks: the ranks.
        registered: whether they have called `hvd.init()`, which has not returned.
    """

    ranks: tuple[int, ...]
    registered: bool


class StartWatch:
    """Watches the start of a job's ranks, and over MPI also each later call of `hvd.init()`.

    Args:
        size: the number of ranks.
        timeout: the seconds for the other ranks after one rank has registered, and over MPI also
            after one rank has connected.
        registered: returns the ranks that have registered at the rendezvous; None over MPI.
        ask: asks the agents for the states of the ranks' processes.
    """

    def __init__(
        self,
        size: int,
        timeout: float,
        registered: Callable[[], set[int]] | None,
        ask: Callable[[], None],
    ) -> None:
        self._size = size
        self._timeout = timeout
        self._registered = registered
        self._ask = ask
        # Over MPI: rank -> the number of its last start, and whether it is connected.
        self._notes: dict[int, tuple[int, bool]] = {}
        # The start that is watched.
        self._start = 1
        self._all_registered = self._done = self._asked = False
        self._deadline = float("inf")

    def note(self, rank: int, start: int, connected: bool) -> None:
        """Set how far `hvd.init()` is in a rank over MPI.

        Args:
            rank: the rank.
            start: the number of its last start of Horovod, from 1.
            connected: whether this start has connected the rank.
        """
        self._notes[rank] = (start, connected)

    def postpone(self, seconds: float) -> None:
        """Give the ranks more time, because the launcher did not run and has read no messages."""
        self._deadline += seconds

    def check(self, now: float) -> LateRanks | None:
        """Return the ranks that are late; None while there is time, and after a start.

        Args:
            now: the time (`time.monotonic`).
        """
        if self._done:
            return None
        if not self._all_registered:
            if self._registered is not None:
                arrived = self._registered()
            else:
                arrived = {rank for rank, (start, _) in self._notes.items() if start >= self._start}
            if len(arrived) == self._size:
                self._all_registered, self._deadline, self._asked = True, float("inf"), False
            # No limit before the first rank: ranks may import and download for any time.
            elif arrived:
                return self._late(now, arrived)
        if self._all_registered and self._registered is not None:
            self._done = True  # the engine itself has a timeout
        elif self._all_registered:
            now_connected = {
                rank
                for rank, (start, connected) in self._notes.items()
                if start > self._start or (start == self._start and connected)
            }
            if len(now_connected) < self._size:
                return self._late(now, now_connected)
            self._start += 1
            self._all_registered, self._deadline, self._asked = False, float("inf"), False
        return None

    def _late(self, now: float, arrived: set[int]) -> LateRanks | None:
        self._deadline = min(self._deadline, now + self._timeout)
        if now > self._deadline - _ASK_SECONDS and not self._asked:
            self._asked = True
            self._ask()
        if now <= self._deadline:
            return None
        late = tuple(rank for rank in range(self._size) if rank not in arrived)
        return LateRanks(late, self._all_registered)
