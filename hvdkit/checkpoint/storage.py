"""The protocol of a place for steps, which a folder and an object store implement.

A `Storage` lists and opens steps. Its `open_for_writing` gives the right to write to one process
at a time; a step is put together as a `Draft` and becomes visible by `StorageWriter.commit`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdkit.checkpoint.chunks import FileRecord
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.errors import UsageError

MAX_STEP = 10**12

_URL = re.compile(r"(.*?)://(.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A step in the listing, described without reading its large files.

    Attributes:
        name: of the step in its storage.
        step: the step's number.
        run: the number of its run. If the manifest is unreadable, the name tells it.
        identity: differs between two steps that have the same name, one after the other.
        manifest: None if it is unreadable.
        error: why the step is not whole; None if it is.
    """

    name: str
    step: int
    run: int
    identity: Hashable
    manifest: Manifest | None
    error: CheckpointError | None

    @property
    def size(self) -> int:
        """Bytes of all files together; 0 if that is not known."""
        return 0 if self.manifest is None else self.manifest.size


class StepFiles(Protocol):
    """The files of one step, for reading.

    Attributes:
        readers: threads that read faster together than one; at least 1.
    """

    readers: int

    def open(self, name: str) -> int:
        """Open the file `name`. Returns its size in bytes.

        Raises:
            Damaged: the file is missing, or is not a plain file.
            CheckpointError: it cannot be opened, for a reason that says nothing about it.
        """
        ...

    def read_into(self, name: str, out: np.ndarray, offset: int) -> None:
        """Fill `out` (uint8) with the bytes from `offset` on of an open file.

        Raises:
            Damaged: the file ends before.
            CheckpointError: it cannot be read, for a reason that says nothing about it.
        """
        ...

    def close(self) -> None:
        """Close all files. May be called again."""
        ...


class Draft(Protocol):
    """A step that is being written, and that no reader sees.

    Attributes:
        written: bytes that `write` has stored so far, from which a write that hangs is known.
            None if the storage itself raises an error where a request hangs.
    """

    @property
    def written(self) -> int | None: ...

    def write(self, name: str, pieces: Iterable[memoryview]) -> FileRecord:
        """Write a file and hash it. Returns when a power cut cannot lose it.

        Args:
            name: of the file.
            pieces: its content.

        Raises:
            CheckpointError: the file could not be written.
        """
        ...

    def copy(self, name: str, entry: Entry) -> None:
        """Copy a file from another step of this storage, without reading it if possible.

        Raises:
            CheckpointError: the file could not be copied.
        """
        ...

    def files(self) -> StepFiles:
        """Open the draft for reading."""
        ...


class StorageWriter(Protocol):
    """The right to write, held by one process at a time.

    Attributes:
        commit_number: of the next commit, greater than those of all steps before it.
    """

    @property
    def commit_number(self) -> int: ...

    def check(self) -> None:
        """Check that this process still holds the right.

        Raises:
            WriterConflict: another process has taken over.
            CheckpointError: the place is gone, or this process was forked from the writer.
        """
        ...

    def entries(self) -> list[Entry]:
        """List all steps, as `Storage.entries` does."""
        ...

    def next_run(self, entries: Sequence[Entry]) -> int:
        """Return a number for a new run, greater than the runs of all steps, damaged ones too.

        Args:
            entries: all that there are.
        """
        ...

    def draft(self, step: int, run: int) -> Draft:
        """Begin to write a step."""
        ...

    def commit(self, draft: Draft) -> str:
        """Make the step visible, or nothing. Returns its name.

        Raises:
            WriterConflict: another process has taken over.
            CheckpointError: it could not be done. If the outcome is unknown, the step may be
                visible, and is whole then.
        """
        ...

    def discard(self, draft: Draft) -> None:
        """Remove a draft that was not committed. A failure only warns."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete steps, quarantined ones too. They are not visible from the first moment on.

        A failure only warns.
        """
        ...

    def settle(self, name: str) -> str:
        """Give a step its final name, once older steps of its number are deleted.

        Returns:
            The name that the step has now.
        """
        ...

    def sweep(self) -> None:
        """Remove what this writer could not remove before. A failure only warns."""
        ...

    def close(self) -> None:
        """Give the right back. May be called again."""
        ...


class Storage(Protocol):
    """A place for steps. Making one touches nothing. `str` gives its path or URL."""

    def exists(self) -> bool:
        """Whether the place exists."""
        ...

    def location(self, name: str) -> str:
        """The path or URL of a step."""
        ...

    def entries(self) -> list[Entry]:
        """List all steps, also those that are not whole, in the order of `in_commit_order`.

        Raises:
            CheckpointError: the place cannot be read. A place that does not exist has no steps.
        """
        ...

    def quarantined(self) -> list[str]:
        """List the names of damaged steps that were moved out of the way.

        Raises:
            CheckpointError: the place cannot be read.
        """
        ...

    def open_step(self, entry: Entry) -> StepFiles:
        """Open a step for reading.

        Raises:
            Damaged: the step is missing, or is not a folder.
            CheckpointError: it cannot be opened, for a reason that says nothing about it.
        """
        ...

    def is_same(self, entry: Entry) -> bool:
        """Whether the step is still there, and not another one of its name.

        A live writer deletes old steps, and names may be used again.
        """
        ...

    def quarantine(self, entry: Entry) -> str | None:
        """Move a damaged step out of the way.

        Returns:
            The name that it has now; None if another process has moved or replaced it.

        Raises:
            CheckpointError: it cannot be moved.
        """
        ...

    def open_for_writing(self) -> StorageWriter:
        """Take the right to write, and remove what dead writers have left.

        Raises:
            WriterConflict: another process, which is alive, writes here.
            CheckpointError: the place cannot be made or written to.
        """
        ...


def in_commit_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort steps by run and commit.

    Steps whose manifest is unreadable come last in their run, as if they were the newest.
    """
    return sorted(
        entries,
        key=lambda e: (
            *(e.run, e.manifest is None, e.manifest.commit if e.manifest else 0),
            *(e.step, e.name),
        ),
    )


def step_name(step: int, run: int) -> str:
    """The name of a step, without what tells it from another one of its number and run."""
    return f"step-{step:012d}" + (f"-run{run}" if run > 1 else "")


def newest_run(entries: Iterable[Entry]) -> int | None:
    """The run that was begun last; None if there are no steps."""
    return max((entry.run for entry in entries), default=None)


def open_storage(
    place: str | os.PathLike[str], options: Mapping[str, Any] | None = None
) -> Storage:
    """Return the storage for a path or a URL. Touches nothing.

    Args:
        place: a path, `file://` and an absolute path, or a URL that fsspec knows.
        options: for fsspec, such as `endpoint_url` or `key`; for URLs only.

    Raises:
        UsageError: fsspec is missing, or does not know such a URL; or there are options for a path.
    """
    text = os.fspath(place)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/([^/]|$)", text):
        raise UsageError(
            f"checkpoints are to be kept in {text}, which is a URL with one slash too few. A Path "
            f"loses it: give a URL as text."
        )
    url = _URL.fullmatch(text)
    if url is not None and url[1] in ("file", "local") and not url[2].startswith("/"):
        raise UsageError(
            f"checkpoints are to be kept in {text}; expected an absolute path, such as file:///a/b."
        )
    if url is not None and url[1] not in ("file", "local"):
        from hvdkit.checkpoint.objects.storage import ObjectStorage

        return ObjectStorage(text, options or {})
    if options:
        raise UsageError(
            f"storage_options {sorted(options)} are for URLs; checkpoints are to be kept in the "
            f"folder {text}."
        )
    from hvdkit.checkpoint.posix.storage import PosixStorage

    return PosixStorage(url[2] if url is not None else os.path.expanduser(text))
