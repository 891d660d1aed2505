"""List the steps in a checkpoint folder, and choose names for new step folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.posix import disk
from hvdkit.checkpoint.posix.files import PosixFiles
from hvdkit.checkpoint.reading import open_file, read_manifest
from hvdkit.checkpoint.storage import Entry, bounded, in_commit_order, step_name

_STEP = re.compile(r"step-(\d{12})(?:-run(\d{1,9}))?(?:-\d{1,9})?")
_QUARANTINED = "damaged-"

# How often to list again after a live writer has removed or renamed a step.
_LIST_ATTEMPTS = 10


def scan(folder: int) -> list[Entry]:
    """Return all steps in the checkpoint folder, in the order of their commits.

    Args:
        folder: the descriptor of the checkpoint folder.

    Raises:
        OSError: the folder cannot be listed.
    """
    for _ in range(_LIST_ATTEMPTS):
        names = [name for name in disk.names(folder) if _STEP.fullmatch(name)]
        looked = list(bounded(look(folder, name) for name in names))
        entries = [entry for entry in looked if entry is not None]
        if len(entries) == len(looked):
            break
    return in_commit_order(entries)


def next_run(folder: int, entries: Iterable[Entry]) -> int:
    """Return a number for a new run that no step has, not even a quarantined step.

    Raises:
        OSError: the folder cannot be listed.
    """
    damaged = (_STEP.match(name.removeprefix(_QUARANTINED)) for name in quarantined(folder))
    taken = [entry.run for entry in entries] + [_run_of(match) for match in damaged if match]
    return max(taken, default=0) + 1


def quarantined(folder: int) -> list[str]:
    """Return the names of the folders of quarantined steps.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = (name for name in disk.names(folder) if name.startswith(_QUARANTINED))
    return sorted(name for name in names if _STEP.match(name.removeprefix(_QUARANTINED)))


def free_name(step: int, run: int, names: Sequence[str]) -> str:
    """Return a name for a new folder of `step` that is not in `names`.

    The run may have saved the same step before, for example before a rollback. The older folder is
    deleted only after the new one is complete, so one of the two always exists.
    """
    return _free(step_name(step, run), names)


def settled_name(name: str, names: Sequence[str]) -> str:
    """Return the name that a new folder of the same step would get, given the existing `names`."""
    step, run = _parsed(name)
    return free_name(step, run, names)


def quarantine_name(name: str, names: Sequence[str]) -> str:
    """Return the quarantine name of the damaged folder `name`, given the existing `names`."""
    return _free(_QUARANTINED + name, names)


def _free(name: str, names: Sequence[str]) -> str:
    free, count = name, 1
    while free in names:
        count += 1
        free = f"{name}-{count}"
    return free


def _run_of(match: re.Match[str]) -> int:
    return int(match[2] or 1)


def _parsed(name: str) -> tuple[int, int]:
    """Return the step and the run in a folder's name."""
    match = _STEP.fullmatch(name)
    assert match is not None
    return int(match[1]), _run_of(match)


def look(parent: int, name: str) -> Entry | None:
    """Return the entry for the step folder `name`; None if it was removed meanwhile."""
    step, run = _parsed(name)
    manifest = None
    problem: CheckpointError | None = None
    try:
        inode = os.lstat(name, dir_fd=parent).st_ino
        files = PosixFiles(parent, name)
        try:
            manifest = read_manifest(files, step)
            run = manifest.run
            for file, record in manifest.files.items():
                open_file(files, file, record)
        finally:
            files.close()
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        if not _is_there(parent, name, inode):
            return None
        problem = error
    return Entry(name, step, run, inode, manifest, problem)


def _is_there(parent: int, name: str, inode: int) -> bool:
    try:
        return os.lstat(name, dir_fd=parent).st_ino == inode
    except FileNotFoundError:
        return False
    except OSError:
        return True
