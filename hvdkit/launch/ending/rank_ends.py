"""The ends of ranks, and the exit statuses that count."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdkit.exit_statuses import CRASHES, signal_of
from hvdkit.launch.ending import events as e
from hvdkit.system.signals import STOP_SIGNALS

#: Signals with which the launcher, the user or a batch system ends a process.
ENDING_SIGNALS = (*STOP_SIGNALS, signal.SIGKILL)


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank.

    Attributes:
        status: the status that counts: that of the process, or of the script if a signal has ended
            the process after an orderly end of the script.
        at: when the process has ended.
        hint: as for `Failure`.
        stack: as for `Failure`.
        script: the orderly end of its script, if it counts.
        crash: the signal of a crash after it; 0 for none.
    """

    rank: int
    status: int
    at: float
    tail: Sequence[str] = ()
    hint: str = ""
    stack: Sequence[str] = ()
    script: e.Reported | None = None
    crash: int = 0


def orderly_scripts(
    reports: Iterable[e.Reported], orderly: Collection[int]
) -> Mapping[int, e.Reported]:
    """Return rank -> the first report of the orderly end of its script.

    Args:
        reports: the reports of the ranks, in the order of their times.
        orderly: the statuses of an orderly end.
    """
    found: dict[int, e.Reported] = {}
    for each in reports:
        if each.report.status in orderly:
            found.setdefault(each.rank, each)
        else:
            found.pop(each.rank, None)  # the command has started another Python
    return found


def rank_ends(
    ends: Iterable[e.Ended],
    exits: Iterable[e.Exited],
    lost: Sequence[e.AgentLost],
    scripts: Mapping[int, e.Reported],
) -> Mapping[int, RankEnd]:
    """Return rank -> its end.

    Args:
        ends: the ends of ranks.
        exits: the ends of processes, which are known earlier.
        lost: the losses of agents.
        scripts: the result of `orderly_scripts`.
    """
    exit_of = {each.rank: each for each in exits}
    found: dict[int, RankEnd] = {}
    for end in ends:
        at = min(end.at, exit_of[end.rank].at) if end.rank in exit_of else end.at
        found[end.rank] = RankEnd(end.rank, end.status, at, end.tail, end.hint, end.stack)
    for rank, each in exit_of.items():
        # The other agents will send the output of their ranks, which may be the reason for
        # their ends. If Slurm ends all agents, a killed rank is the cause.
        is_lost = any(rank in loss.ranks for loss in lost)
        if rank not in found and (is_lost or (lost and each.status == -signal.SIGKILL)):
            found[rank] = RankEnd(rank, each.status, each.at)
    return {rank: _counted(end, scripts.get(rank)) for rank, end in found.items()}


def _counted(end: RankEnd, script: e.Reported | None) -> RankEnd:
    """Return the end with the script's status if only a signal has ended the process after it."""
    number = signal_of(end.status)
    if script is None or number not in (*ENDING_SIGNALS, *CRASHES):
        return end
    assert script.report.status is not None
    crash = number if number in CRASHES else 0
    return replace(end, status=script.report.status, script=script, crash=crash)
