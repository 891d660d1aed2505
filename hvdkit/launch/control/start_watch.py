"""Find the ranks that are late in `hvd.init()`.

Over Gloo, ranks register at the rendezvous, and the engine has a timeout for their connections.
Over MPI, there is no rendezvous, and the engine waits forever for a rank that is late. So ranks
note how far they are (`hvdkit.runtime.record_files`), and their agents send these notes. Ranks that
pass `comm` to `hvd.init()` note nothing, because ranks outside of `comm` need not call it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hvdkit.launch.ending.events import InHorovod, Resumed


@dataclass(frozen=True)
class LateStart:
    """Ranks that have not started yet, although others have.

    Attributes:
        registered: whether they have called `hvd.init()`, which has not returned.
        due: when they are late.
    """

    ranks: tuple[int, ...]
    registered: bool
    due: float


def late_start(
    size: int, notes: Iterable[InHorovod], pauses: Iterable[Resumed], timeout: float
) -> LateStart | None:
    """Return the ranks that have not started; None if all have, or if no rank has begun to.

    There is no limit before the first rank: ranks may import and download for any time.

    Args:
        notes: how far ranks are.
        pauses: the times in which the launcher did not run, and has read no messages.
        timeout: the seconds for the other ranks after one rank has registered, and over MPI also
            for the connections after all have registered.
    """
    # Rank -> when it has begun each start of Horovod, and the number of starts that are complete.
    begun: dict[int, dict[int, float]] = {rank: {} for rank in range(size)}
    complete = dict.fromkeys(range(size), 0)
    for note in notes:
        begun[note.rank].setdefault(note.start, note.at)
        complete[note.rank] = note.start if note.connected else note.start - 1
    start = min(complete.values()) + 1
    times = {
        rank: min(at for number, at in each.items() if number >= start)
        for rank, each in begun.items()
        if max(each, default=0) >= start
    }
    if not times:
        return None
    registered = len(times) == size
    since = max(times.values()) if registered else min(times.values())
    due = since + timeout + sum(each.seconds for each in pauses if each.at > since)
    late = (r for r in range(size) if (complete[r] < start if registered else r not in times))
    return LateStart(tuple(late), registered, due)
