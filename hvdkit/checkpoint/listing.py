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

_STEP = re.compile(r"step-(\d{12})(?:-(\d{1,9}))?")
_SET_ASIDE = "damaged-"


@dataclass(frozen=True)
class Entry:
    """A step's folder, as far as it can be told without reading its large files.

    Attributes:
        name: the folder's.
        step: the step's number.
        manifest: None if it is unreadable.
        error: why it is not whole; None if it is.
    """

    name: str
    step: int
    manifest: Manifest | None
    error: CheckpointError | None


def scan(folder: int) -> list[Entry]:
    """All steps of the open folder, in the order in which they were committed.

    Those whose manifest is unreadable come last, as if they were the newest.

    Raises:
        OSError: the folder cannot be listed.
    """
    entries = [
        entry
        for name in disk.names(folder)
        if (match := _STEP.fullmatch(name)) and (entry := _look(folder, name, int(match[1])))
    ]
    return sorted(
        entries,
        key=lambda e: (e.manifest is None, e.manifest.commit if e.manifest else 0, e.step, e.name),
    )


def whole(entries: Iterable[Entry]) -> list[tuple[str, Manifest]]:
    """Names and manifests of those that are whole, in the same order."""
    return [(e.name, e.manifest) for e in entries if e.manifest is not None and e.error is None]


def newest_run(entries: Iterable[Entry]) -> str | None:
    """The run whose step was committed last; None where no manifest can be read."""
    manifests = [entry.manifest for entry in entries if entry.manifest is not None]
    return max(manifests, key=lambda made: made.commit).run if manifests else None


def set_aside(folder: int) -> list[str]:
    """Names of the folders of steps that were set aside.

    Raises:
        OSError: the folder cannot be listed.
    """
    names = (name for name in disk.names(folder) if name.startswith(_SET_ASIDE))
    return sorted(name for name in names if _STEP.match(name.removeprefix(_SET_ASIDE)))


def free_name(step: int, names: Sequence[str]) -> str:
    """A name for a new folder of `step`, where `names` are taken.

    A step that is there already, from before a resume, is replaced by removing it afterwards: at
    no time is there none.
    """
    return _free(f"step-{step:012d}", names)


def set_aside_name(name: str, names: Sequence[str]) -> str:
    """The name under which the step's folder `name` is set aside, where `names` are taken."""
    return _free(_SET_ASIDE + name, names)


def _free(name: str, names: Sequence[str]) -> str:
    free, count = name, 1
    while free in names:
        count += 1
        free = f"{name}-{count}"
    return free


def _look(parent: int, name: str, step: int) -> Entry | None:
    """The entry for the folder `name`; None if it is gone by now."""
    manifest = None
    try:
        with disk.reading(name), disk.folder(name, parent) as folder:
            manifest = read_manifest(folder, step)
            for file, record in manifest.files.items():
                descriptor, size = disk.open_plain(file, folder)
                os.close(descriptor)
                if size != record.size:
                    raise Damaged(file, f"it has {size} bytes instead of {record.size}")
    except CheckpointError as error:
        return Entry(name, step, manifest, error) if is_listed(parent, name) else None
    return Entry(name, step, manifest, None)


def is_listed(parent: int, name: str) -> bool:
    """Whether there is still something called `name`: a live writer may remove old steps."""
    try:
        os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True
