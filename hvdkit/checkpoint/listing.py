"""Which steps a folder lists: what the names say, and the manifests behind them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdkit.checkpoint import disk
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import read_manifest

MAX_STEP = 10**12

_STEP = re.compile(r"step-(\d{12})(?:-run(\d{1,9}))?(?:-\d{1,9})?")
_SET_ASIDE = "damaged-"

#: How often to look again where a live writer has removed or renamed what was listed.
LOOKS = 10


@dataclass(frozen=True)
class Entry:
    """A step's folder, as far as it can be told without reading its large files.

    Attributes:
        name: the folder's.
        step: the step's number.
        run: the number of its run. Where the manifest is unreadable, the name tells it.
        inode: of the folder: another folder may get the name.
        manifest: None if it is unreadable.
        error: why it is not whole; None if it is.
    """

    name: str
    step: int
    run: int
    inode: int
    manifest: Manifest | None
    error: CheckpointError | None

    @property
    def size(self) -> int:
        """Bytes of all files together; 0 if that is not known."""
        return 0 if self.manifest is None else self.manifest.size


def scan(folder: int) -> list[Entry]:
    """All steps of the open folder, in the order in which they were committed.

    Those whose manifest is unreadable come last in their run, as if they were the newest.

    Raises:
        OSError: the folder cannot be listed.
    """
    for _ in range(LOOKS):
        looked = [_look(folder, name) for name in disk.names(folder) if _STEP.fullmatch(name)]
        entries = [entry for entry in looked if entry is not None]
        if len(entries) == len(looked):
            break
    return sorted(
        entries,
        key=lambda e: (
            *(e.run, e.manifest is None, e.manifest.commit if e.manifest else 0),
            *(e.step, e.name),
        ),
    )


def whole(entries: Iterable[Entry]) -> list[tuple[str, Manifest]]:
    """Names and manifests of those that are whole, in the same order."""
    return [(e.name, e.manifest) for e in entries if e.manifest is not None and e.error is None]


def newest_run(entries: Iterable[Entry]) -> int | None:
    """The run that was begun last; None where there are no steps."""
    return max((entry.run for entry in entries), default=None)


def next_run(folder: int, entries: Iterable[Entry]) -> int:
    """Return a number for a new run. No step has it, not even a damaged one that was renamed.

    Raises:
        OSError: the folder cannot be listed.
    """
    aside = (_STEP.match(name.removeprefix(_SET_ASIDE)) for name in set_aside(folder))
    taken = [entry.run for entry in entries] + [_run_of(match) for match in aside if match]
    return max(taken, default=0) + 1


def set_aside(folder: int) -> list[str]:
    """Names of the folders of steps that were set aside.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = (name for name in disk.names(folder) if name.startswith(_SET_ASIDE))
    return sorted(name for name in names if _STEP.match(name.removeprefix(_SET_ASIDE)))


def free_name(step: int, run: int, names: Sequence[str]) -> str:
    """A name for a new folder of `step`, where `names` are taken.

    A step that is there already, from before a resume, is replaced by removing it afterwards: at
    no time is there none.
    """
    return _free(f"step-{step:012d}" + (f"-run{run}" if run > 1 else ""), names)


def set_aside_name(name: str, names: Sequence[str]) -> str:
    """The name under which the step's folder `name` is set aside, where `names` are taken."""
    return _free(_SET_ASIDE + name, names)


def _free(name: str, names: Sequence[str]) -> str:
    free, count = name, 1
    while free in names:
        count += 1
        free = f"{name}-{count}"
    return free


def _run_of(match: re.Match[str]) -> int:
    return int(match[2] or 1)


def _look(parent: int, name: str) -> Entry | None:
    """The entry for the folder `name`, which is one of a step; None if it is gone by now."""
    match = _STEP.fullmatch(name)
    assert match is not None
    step, run = int(match[1]), _run_of(match)
    manifest = None
    problem: CheckpointError | None = None
    try:
        inode = os.lstat(name, dir_fd=parent).st_ino
        with disk.reading(name), disk.folder(name, parent) as folder:
            manifest = read_manifest(folder, step)
            run = manifest.run
            for file, record in manifest.files.items():
                descriptor, size = disk.open_plain(file, folder)
                os.close(descriptor)
                if size != record.size:
                    raise Damaged(file, f"it has {size} bytes instead of {record.size}")
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        if not _is_there(parent, name, inode):
            return None
        problem = error
    return Entry(name, step, run, inode, manifest, problem)


def is_same(parent: int, entry: Entry) -> bool:
    """Whether the folder is still there, and not another one of its name.

    A live writer deletes old steps, and names are used again.
    """
    found = _look(parent, entry.name)
    return found is not None and found.inode == entry.inode and found.manifest == entry.manifest


def _is_there(parent: int, name: str, inode: int) -> bool:
    try:
        return os.lstat(name, dir_fd=parent).st_ino == inode
    except FileNotFoundError:
        return False
    except OSError:
        return True
