"""Find the start of a job that `hvdkit why` explains, in the folder of `--output-dir`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

#: In the folder of a start: its description (`hvdkit.launch.starts`), and the failure of a rank.
START, ERROR = "start.json", "error.json"
#: In the folder of `--output-dir`: a link to the folder of the newest start.
LATEST = "latest"
# The time of the start, and 2, 3, … for further starts in the same second.
_NAME = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")


def newest(folder: Path, records: str) -> tuple[Path, str]:
    """Return the folder of the newest start, and a sentence for the user.

    Args:
        folder: a folder of `--output-dir`. If it has no starts, it is the folder of a start itself.
        records: the name of the folder for records.

    Returns:
        The folder, and "". If the newest start has no files but its output: the folder of the
        newest start with a description, if there is one, and a sentence about this.
    """
    starts = list(_starts(folder))
    latest = folder / LATEST
    # A copy of the folder may lack the link.
    first = latest if latest.is_dir() else next(iter(starts), folder)
    if first == folder or any((first / name).exists() for name in (START, ERROR, records)):
        return first, ""
    name = first.resolve().name
    described = next((start for start in starts if (start / START).exists()), first)
    return described, f"The newest start, {name}, has no description ({START}): was the disk full?"


def _starts(folder: Path) -> Iterator[Path]:
    """Yield the folders of starts in a folder, the newest first."""
    found = [
        (match[1], int(match[2] or 1), path)
        for path in folder.glob("*")
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    for *_, path in sorted(found, reverse=True):
        yield path
