"""Find out whether the kernel has killed a rank because memory was full."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hvdkit import cgroups

# Of version 2 and 1: the file with the limit, and the file and the key of a counter of the times
# that the limit was reached.
_LIMITS = (("memory.max", "memory.events", "max"), ("memory.limit_in_bytes", "memory.failcnt", ""))
# The files with the number of processes of a cgroup that the kernel has killed.
_KILLS = ("memory.events", "memory.oom_control")
# Version 1 has no word for no limit, but a number of this size.
_NO_LIMIT = 1 << 60


@dataclass
class MemoryKills:
    """The counters of the kernel for the cgroup of a rank, as they were when the rank started.

    Args:
        process: the process id of the rank.
        proc: where the system mounts procfs.
    """

    process: int
    proc: Path = Path("/proc")
    _folders: list[Path] = field(init=False)
    _before: tuple[int, int, dict[Path, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._folders = cgroups.folders("memory", self.process, self.proc)
        self._before = self._counters()

    def explain(self) -> str:
        """Return a probable cause of the rank's SIGKILL: "" if no process was killed for memory."""
        in_cgroup, on_host, reached = self._before
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
        on_host = cgroups.number(self.proc, "vmstat", "oom_kill") or 0
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
