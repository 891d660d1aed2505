"""Find the control groups (cgroups) of a process, of version 1 and 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

#: Where the system mounts cgroups.
ROOT = Path("/sys/fs/cgroup")


def folders(controller: str, process: int | str = "self", proc: Path = Path("/proc")) -> list[Path]:
    """Return the folders of a process's cgroup and of the cgroups around it, innermost first.

    In a container, some of them may not be visible. The list then has the visible ones.

    Args:
        controller: the controller, such as "memory" or "pids".
        process: the process id.
        proc: where the system mounts procfs.
    """
    try:
        lines = (proc / str(process) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []  # the process has ended
    found: dict[int, list[Path]] = {}
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            found[1] = list(_existing(ROOT / names, path))
        elif not names:
            found[2] = list(_existing(ROOT, path))
    return found.get(1) or found.get(2) or []


def _existing(mount: Path, path: str) -> Iterator[Path]:
    place = mount / path.lstrip("/")
    while True:
        if place.is_dir():
            yield place
        if place == mount or mount not in place.parents:
            return
        place = place.parent


def number(folder: Path, name: str, key: str = "") -> int | None:
    """Return a number in a file of a cgroup; None if there is none, or no limit ("max").

    Args:
        folder: the folder of the cgroup.
        key: the first word of the line with the number; empty for a file with one number.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            before, _, value = line.rpartition(" ")
            if before == key:
                return int(value)
    return None
