"""The storage protocol, which a folder and an object store implement.

A `Storage` lists and opens steps. `open_for_writing` makes one process at a time the writer. The
writer writes the files of a step as a `Draft`; `StorageWriter.commit` makes the step visible.

To add a storage, implement the protocols in a package beside `posix/`. Return it from
`open_storage` (`places.py`), and add it to the fixture `place` of
`tests/unit/checkpoint/conftest.py`. Also test that each of its calls fails, and that the writer is
killed at each call.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hvdkit.checkpoint.chunks import FileRecord
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.errors import UsageError

MAX_STEP = 10**12
#: The most values in the manifests of all steps of a listing. They take at most about 500 MB.
_MOST_VALUES = 5_000_000
#: The memory of an entry and its row in a table, in values of a manifest.
_ENTRY_VALUES = 100

_URL = re.compile(r"(.*?)://(.*)", re.DOTALL)


def check_number(name: str, value: Any) -> None:
    """Check the number of a step, a run or an epoch.

    Raises:
        UsageError: it is not a whole number, negative or too large.
    """
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not 0 <= value < MAX_STEP:
        raise UsageError(f"{name} is {value!r}: expected a whole number from 0 to {MAX_STEP - 1}")


@dataclass(frozen=True)
class Entry:
    """A step in the listing, described without reading its large files.

    Attributes:
        name: of the step in its storage.
        step: the step's number.
        run: the number of its run; from the name if the manifest is unreadable.
        identity: distinguishes a step from a later step of the same name.
        manifest: None if it is unreadable.
        error: why the step is incomplete; None for a complete step.
    """

    name: str
    step: int
    run: int
    identity: Hashable
    manifest: Manifest | None
    error: CheckpointError | None

    @property
    def size(self) -> int:
        """The sum of the sizes of all files, in bytes; 0 if it is unknown."""
        return 0 if self.manifest is None else self.manifest.size


class StepFiles(Protocol):
    """The files of one step, for reading.

    Attributes:
        readers: the number of threads with which reading is fastest; at least 1.
    """

    readers: int

    def open(self, name: str) -> int:
        """Open the file `name`. Return its size in bytes.

        Raises:
            Damaged: the file is missing, or is not a plain file.
            CheckpointError: it cannot be opened now; it may be intact.
        """
        ...

    def read_into(self, name: str, out: np.ndarray, offset: int) -> None:
        """Fill `out` (uint8) with the bytes of an open file, starting at `offset`.

        Raises:
            Damaged: the file is too short.
            CheckpointError: it cannot be read now; it may be intact.
        """
        ...

    def close(self) -> None:
        """Close all files. May be called more than once."""
        ...


class Draft(Protocol):
    """A step that is being written. Readers do not see it.

    Attributes:
        commit: the number of its commit, greater than that of any step.
        written: bytes that `write` has stored so far. If the number stops growing, the write
            hangs. None if the storage itself raises an error when a request hangs.
    """

    commit: int

    @property
    def written(self) -> int | None: ...

    def write(self, name: str, pieces: Iterable[memoryview]) -> FileRecord:
        """Write a file and hash it. After the return, the file survives a power cut.

        Args:
            name: of the file.
            pieces: its content.

        Raises:
            CheckpointError: the file could not be written.
        """
        ...

    def copy(self, name: str, entry: Entry) -> None:
        """Copy a file from another step of this storage, on the server if possible.

        Raises:
            CheckpointError: the file could not be copied.
        """
        ...

    def files(self) -> StepFiles:
        """Open the draft for reading."""
        ...


class StorageWriter(Protocol):
    """The writer of a storage: one process at a time."""

    def check(self) -> None:
        """Check that this process still is the writer.

        Raises:
            WriterConflict: another process has taken over.
            CheckpointError: the storage was removed, or this process was forked from the writer.
        """
        ...

    def entries(self) -> list[Entry]:
        """List all steps, as `Storage.entries` does."""
        ...

    def next_run(self, entries: Sequence[Entry]) -> int:
        """Return a number for a new run, greater than that of any step, damaged ones included.

        Args:
            entries: all steps.
        """
        ...

    def draft(self, step: int, run: int) -> Draft:
        """Begin to write a step."""
        ...

    def commit(self, draft: Draft) -> str:
        """Make the step visible atomically. Return its name.

        Raises:
            WriterConflict: another process has taken over.
            CheckpointError: the commit failed. If its outcome is unknown, the step may be
                visible; it is complete then.
        """
        ...

    def discard(self, draft: Draft) -> None:
        """Remove a draft that was not committed. A failure is only logged."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete steps, quarantined ones included. Hide them before the first file is deleted.

        A failure is only logged.
        """
        ...

    def settle(self, name: str) -> str:
        """Give a step its final name, once older steps of its number are deleted.

        Returns:
            The final name.
        """
        ...

    def sweep(self) -> None:
        """Try again to remove files that this writer failed to remove. A failure is only logged."""
        ...

    def close(self) -> None:
        """Let another process become the writer. May be called more than once."""
        ...


class Storage(Protocol):
    """A folder or object store with steps. `str` gives its path or URL."""

    def exists(self) -> bool:
        """Return whether the folder exists, or any object of steps under the URL."""
        ...

    def location(self, name: str) -> str:
        """Return the path or URL of a step."""
        ...

    def entries(self) -> list[Entry]:
        """List all steps, incomplete ones included, in the order of `in_commit_order`.

        Raises:
            CheckpointError: the storage cannot be read. A storage that does not exist raises no
                error: it has no steps.
        """
        ...

    def quarantined(self) -> list[str]:
        """List the names of damaged steps that were moved out of the way.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        ...

    def open_step(self, entry: Entry) -> StepFiles:
        """Open a step for reading.

        Raises:
            Damaged: the step is missing, or is not a folder.
            CheckpointError: it cannot be opened now; it may be intact.
        """
        ...

    def is_same(self, entry: Entry) -> bool:
        """Return whether the step still exists and was not replaced by one of the same name.

        A live writer deletes old steps and may use their names again.
        """
        ...

    def quarantine(self, entry: Entry) -> str | None:
        """Move a damaged step out of the way.

        Returns:
            Its new name; None if another process has moved or replaced it.

        Raises:
            CheckpointError: it cannot be moved.
        """
        ...

    def open_for_writing(self) -> StorageWriter:
        """Become the writer, and remove files that dead writers have left.

        Raises:
            WriterConflict: another live process is the writer.
            CheckpointError: the folder cannot be made or written to.
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


def bounded(entries: Iterable[Entry | None]) -> Iterator[Entry | None]:
    """Yield the entries of a listing. Other users may have filled the folder with steps.

    Raises:
        CheckpointError: their manifests would take too much memory.
    """
    values = 0
    for number, entry in enumerate(entries):
        values += _ENTRY_VALUES
        if entry is not None and entry.manifest is not None:
            values += entry.manifest.values
        if values > _MOST_VALUES:
            raise CheckpointError(
                f"the list of steps takes too much memory: the manifests of {number} steps have "
                f"{values:,} values; expected at most {_MOST_VALUES:,}. Move steps that hvdkit did "
                f"not write to another folder, or delete old ones."
            )
        yield entry


def expect_manifests(entries: Iterable[Entry], location: str) -> None:
    """Raise an error if a manifest cannot be read now.

    Without its manifest, the place of a step in the order of commits is unknown. A manifest that is
    known to be damaged raises no error.

    Args:
        entries: the steps.
        location: of the storage, for the error.

    Raises:
        CheckpointError: a manifest cannot be read now, and may be intact.
    """
    for entry in entries:
        if entry.manifest is None and not isinstance(entry.error, Damaged):
            raise CheckpointError(f"{entry.name} in {location}: {entry.error}") from entry.error


def step_name(step: int, run: int) -> str:
    """Return the name of a step, without the suffix that a second step of this number gets."""
    return f"step-{step:012d}" + (f"-run{run}" if run > 1 else "")


def newest_run(entries: Iterable[Entry]) -> int | None:
    """Return the number of the newest run; None if there are no steps."""
    return max((entry.run for entry in entries), default=None)
