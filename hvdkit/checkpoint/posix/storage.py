"""Steps in a folder. Each listed step is complete.

DIR/step-000000001200/    one step, made visible by one rename
    manifest.json         step, epoch, world size, versions, size and hash of each file
    state.json            the nested state, with a mark in place of each tensor
    ranks.jsonl           the state of each rank, a line for each
    PART.safetensors      the tensors of a part
DIR/damaged-step-…        a damaged step in quarantine
DIR/.writing-…            a step being written; removed if its writer is dead
DIR/.deleting-…           a step being deleted
DIR/.lock, DIR/.writer    the writer's lock and lease; see `lock`
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hvdkit.checkpoint.chunks import CACHED_BYTES, CHUNK_BYTES, ChunkHasher, FileRecord
from hvdkit.checkpoint.errors import failing
from hvdkit.checkpoint.posix import disk, listing
from hvdkit.checkpoint.posix.files import PosixFiles
from hvdkit.checkpoint.posix.lock import FolderLock
from hvdkit.checkpoint.storage import Draft, Entry, StepFiles
from hvdkit.system.plain_files import printable

_log = logging.getLogger(__name__)

#: Bytes between two syncs of a file. Without them, the last sync could take very long, because
#: the page cache may hold many gigabytes.
_SYNC_BYTES = 1_000_000_000

#: Prefixes of the names of folders that are being written or deleted.
_WRITING, _DELETING = ".writing-", ".deleting-"


class PosixStorage:
    """A folder, local or shared. `open_for_writing` creates it if it does not exist."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder).absolute()

    def __str__(self) -> str:
        return str(self._path)

    def exists(self) -> bool:
        """Return whether the folder exists."""
        return self._path.is_dir()

    def location(self, name: str) -> str:
        """Return the path of a step's folder."""
        return str(self._path / name)

    def entries(self) -> list[Entry]:
        """List all steps."""
        with self._open() as folder:
            return [] if folder is None else listing.scan(folder)

    def quarantined(self) -> list[str]:
        """List the names of the quarantined steps."""
        with self._open() as folder:
            return [] if folder is None else listing.quarantined(folder)

    def open_step(self, entry: Entry) -> StepFiles:
        """Open a step for reading."""
        with failing("read", self._path), disk.folder(self._path) as folder:
            return PosixFiles(folder, entry.name)

    def is_same(self, entry: Entry) -> bool:
        """Return whether the step's folder still exists and was not replaced."""
        with self._open() as folder:
            return folder is not None and _is_same(folder, entry)

    def quarantine(self, entry: Entry) -> str | None:
        """Rename a damaged step."""
        with self._open() as folder:
            if folder is None or not _is_same(folder, entry):
                return None
            name = listing.quarantine_name(entry.name, disk.names(folder))
            with failing("rename", self._path / entry.name):
                try:
                    disk.rename(entry.name, name, folder)
                except FileNotFoundError:
                    return None
            return name

    def open_for_writing(self) -> PosixWriter:
        """Create the folder if it does not exist, lock it, and remove leftovers."""
        return PosixWriter(self._path)

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """Open the folder for the duration of a block; None if it does not exist."""
        with failing("read", self._path):
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                descriptor = None
        try:
            with failing("read", self._path):
                yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)


class PosixDraft:
    """A hidden folder beside the steps. A file is on the disk when `write` returns."""

    def __init__(self, path: Path, parent: int, step: int, run: int, commit: int) -> None:
        self.name = path.name
        self.step, self.run, self.commit = step, run, commit
        self.written = 0
        self._path = path
        self._parent = parent
        with failing("make", path):
            disk.make_folder(self.name, parent)

    def write(self, name: str, pieces: Iterable[memoryview]) -> FileRecord:
        """Write and hash a file, and wait until it is on the disk."""
        hasher, size, started, synced = ChunkHasher(), 0, 0, 0
        with failing("write", self._path / name), disk.folder(self.name, self._parent) as folder:
            descriptor = disk.create(name, folder)
            try:
                for piece in pieces:
                    for at in range(0, len(piece), CACHED_BYTES):
                        part = piece[at : at + CACHED_BYTES]
                        hasher.update(part)
                        disk.write(descriptor, part, name)
                        size += len(part)
                        self.written += len(part)
                        if size - started >= CHUNK_BYTES:
                            # Start writing this chunk while the next one is prepared.
                            disk.forget(descriptor, started, size)
                            started = size
                        if size - synced >= _SYNC_BYTES:
                            # Wait, so that `written` shows the progress of a slow disk.
                            disk.sync(descriptor, name)
                            synced = size
                disk.sync(descriptor, name)
                disk.forget(descriptor, 0, size)
            finally:
                os.close(descriptor)
        return hasher.record()

    def copy(self, name: str, entry: Entry) -> None:
        """Link a file of another step; copy it if the file system has no links."""
        with (
            failing("write", self._path / name),
            disk.folder(entry.name, self._parent) as source,
            disk.folder(self.name, self._parent) as folder,
        ):
            disk.link(name, source, folder)

    def files(self) -> StepFiles:
        """Open the draft for reading."""
        return PosixFiles(self._parent, self.name)


class PosixWriter:
    """The writer of a folder. It holds the folder's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._attempts = itertools.count(1)
        self._newest_commit: int | None = None
        with ExitStack() as resources, failing("write to", path):
            disk.make_folders(path)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            resources.callback(os.close, self._folder)
            self._lock = FolderLock(path, self._folder)
            resources.callback(self._lock.close)
            # While this process holds the lock, all other writers are dead.
            self._sweep("")
            self._resources = resources.pop_all()

    @property
    def commit_number(self) -> int:
        """The number of the next commit."""
        if self._newest_commit is None:
            self.entries()
        assert self._newest_commit is not None
        return self._newest_commit + 1

    def check(self) -> None:
        """Check that the folder still exists and is locked by this process."""
        with failing("write to", self._path):
            self._lock.check()

    def entries(self) -> list[Entry]:
        """List all steps."""
        with failing("read", self._path):
            entries = listing.scan(self._folder)
        commits = [entry.manifest.commit for entry in entries if entry.manifest]
        self._newest_commit = max(self._newest_commit or 0, *commits, 0)
        return entries

    def next_run(self, entries: Sequence[Entry]) -> int:
        """Return a number for a new run."""
        with failing("read", self._path):
            return listing.next_run(self._folder, entries)

    def draft(self, step: int, run: int) -> PosixDraft:
        """Begin to write a step."""
        name = f"{_WRITING}{self._lock.lease.token}-{next(self._attempts)}"
        return PosixDraft(self._path / name, self._folder, step, run, self.commit_number)

    def commit(self, draft: Draft) -> str:
        """Make the step visible by renaming its folder."""
        assert isinstance(draft, PosixDraft)
        path = self._path / draft.name
        with failing("write", path), disk.folder(draft.name, self._folder) as folder:
            disk.sync_folder(folder, draft.name)
        # Another writer may have taken over while a large step was written.
        self.check()
        with failing("rename", path):
            made = os.stat(draft.name, dir_fd=self._folder)
            final = listing.free_name(draft.step, draft.run, disk.names(self._folder))
            try:
                disk.rename(draft.name, final, self._folder)
            except FileNotFoundError:
                # A file server may have renamed it, lost the reply and received a second request.
                there = os.stat(final, dir_fd=self._folder)
                if (there.st_dev, there.st_ino) != (made.st_dev, made.st_ino):
                    raise
        self._newest_commit = draft.commit
        with failing("fsync", self._path):
            disk.sync_folder(self._folder, self._path.name)
        return final

    def discard(self, draft: Draft) -> None:
        """Remove a draft. If that fails, `sweep` tries again."""
        assert isinstance(draft, PosixDraft)
        self._remove(draft.name)

    def delete(self, names: Sequence[str]) -> None:
        """Hide the steps by renaming them, and then delete their files."""
        hidden = {}
        for name in names:
            new = f"{_DELETING}{self._lock.lease.token}-{name}"
            try:
                disk.rename(name, new, self._folder)
                hidden[name] = new
            except OSError as error:
                _log.warning("%s could not be deleted: %s", self._path / name, error.strerror)
        try:
            # Otherwise a power cut could leave a listed step without some of its files.
            disk.sync_folder(self._folder, self._path.name)
        except OSError as error:
            _log.warning("%s could not be synced: %s", self._path, error.strerror)
            return
        for name, new in hidden.items():
            try:
                disk.remove(new, self._folder)
            except OSError as error:
                _log.warning("%s could not be deleted: %s", self._path / name, error.strerror)

    def settle(self, name: str) -> str:
        """Remove a suffix such as -2 from the name of a step, if the plain name is free now."""
        try:
            settled = listing.settled_name(name, disk.names(self._folder))
            if len(settled) >= len(name):
                return name
            disk.rename(name, settled, self._folder)
        except OSError as error:
            _log.warning("%s keeps its name: %s", self._path / name, error.strerror)
            return name
        return settled

    def sweep(self) -> None:
        """Try again to remove folders that this writer failed to remove."""
        self._sweep(self._lock.lease.token)

    def close(self) -> None:
        """Release the lock."""
        self._resources.close()

    def _sweep(self, token: str) -> None:
        """Remove unfinished folders of the writer with this token; of all writers if it is ""."""
        try:
            names = disk.names(self._folder)
        except OSError as error:
            _log.warning("unfinished steps in %s were not removed: %s", self._path, error.strerror)
            return
        for name in names:
            if name.startswith((_WRITING + token, _DELETING + token)):
                _log.info("removing the unfinished %s", self._shown(name))
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            disk.remove(name, self._folder)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s could not be removed yet: %s", self._shown(name), error.strerror)

    def _shown(self, name: str) -> str:
        # Another user may have chosen the name.
        return printable(str(self._path / name), one_line=True)


def _is_same(folder: int, entry: Entry) -> bool:
    found = listing.look(folder, entry.name)
    return (
        found is not None and found.identity == entry.identity and found.manifest == entry.manifest
    )
