"""Find out whether the kernel has killed a rank because memory was full."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from hvdkit.system import cgroups

# Of version 2 and 1: the file with the limit, and the file and the key of a counter of the times
# that the limit was reached.
_LIMITS = (("memory.max", "memory.events", "max"), ("memory.limit_in_bytes", "memory.failcnt", ""))
# The files with the number of processes of a cgroup that the kernel has killed.
_KILLS = ("memory.events", "memory.oom_control")
# The end of a process with much memory takes seconds.
_LOOK_SECONDS = 10.0
# In version 1, a number above this one means that there is no limit.
_NO_LIMIT = 1 << 60


class MemoryKills:
    """The kernel's counters for the cgroup of a rank.

    Args:
        process: the process id of the rank.
        proc: where the system mounts procfs.
    """

    def __init__(self, process: int, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._folders = cgroups.folders("memory", process, proc)
        # The counters some time ago, and at the last look, with its time: a process that was killed
        # long before the end of the rank is not its cause.
        self._looks = deque([(time.monotonic(), self._counters())], maxlen=2)

    def look(self) -> None:
        """Read the counters, but only every few seconds."""
        if time.monotonic() > self._looks[-1][0] + _LOOK_SECONDS:
            self._looks.append((time.monotonic(), self._counters()))

    def explain(self) -> str:
        """Return a probable cause of the rank's SIGKILL: "" if no process was killed for memory."""
        in_cgroup, on_host, reached = self._looks[0][1]
        in_cgroup_now, on_host_now, reached_now = self._counters()
        full = [
            limit
            for folder, count in reached_now.items()
            if count > reached.get(folder, 0) and (limit := _limit(folder)) is not None
        ]
        if in_cgroup_now > in_cgroup and full:
            return (
                f"probably by the kernel, because the memory limit of its cgroup "
                f"({min(full) / 1e9:.1f} GB) was reached"
            )
        if on_host_now > on_host:
            return "probably by the kernel, because the memory of the host or of a cgroup was full"
        return ""

    def _counters(self) -> tuple[int, int, dict[Path, int]]:
        """Return the kills in the cgroup and on the host, and how often each limit was reached."""
        own = self._folders[:1]
        found = [cgroups.number(folder, name, "oom_kill") for folder in own for name in _KILLS]
        on_host = cgroups.number(self._proc, "vmstat", "oom_kill") or 0
        reached = {
            folder: count
            for folder in self._folders
            for _, name, key in _LIMITS
            if (count := cgroups.number(folder, name, key)) is not None
        }
        return sum(filter(None, found)), on_host, reached


def _limit(folder: Path) -> int | None:
    """Return the memory limit of a cgroup in bytes; None without one."""
    for name, _, _ in _LIMITS:
        limit = cgroups.number(folder, name)
        if limit is not None and limit < _NO_LIMIT:
            return limit
    return None
