"""Writing a step: beside, fsynced, read back, then made visible by one rename."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import xxhash

from hvdkit.checkpoint import disk, listing, manifest, tensors
from hvdkit.checkpoint.errors import CheckpointError, Damaged, failing
from hvdkit.checkpoint.lock import FolderLock
from hvdkit.checkpoint.manifest import FileRecord, Manifest
from hvdkit.checkpoint.reading import examine
from hvdkit.checkpoint.retention import Retention
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.errors import UsageError

_log = logging.getLogger(__name__)

#: What is hashed and written at once: stays in the processor's cache between the two.
_CHUNK_BYTES = 1_000_000

#: What the names of folders begin with that are being written and deleted.
_WRITING, _DELETING = ".writing-", ".deleting-"

#: Puts the files of a step into an open folder, whose path is for errors; returns its manifest.
PutFiles = Callable[[int, Path], Manifest]


@dataclass(frozen=True)
class EncodedPart:
    """A part of the state, ready to be written.

    Attributes:
        tree: its JSON form, as `tree.encode` gives it.
        tensors: name -> dtype and shape, and the content in host memory: uint8, contiguous,
            row-major, `tensors.nbytes(spec)` bytes. The names are those that `tree.encode` gave.
    """

    tree: Any
    tensors: Mapping[str, tuple[TensorSpec, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """What is written as one step. It must not change until `Writer.write` is back.

    Attributes:
        step: how many steps were trained, 0 or more.
        epoch: the epoch that the step is in, if the training counts epochs.
        world_size: ranks of the job.
        metrics: values by name; NaN and infinities are allowed.
        versions: of what wrote it, by name: hvdkit, python, the framework.
        parts: name -> part. A name is a letter and up to 63 letters, digits, `_` or `-`.
        ranks: one tree for each rank, in its JSON form (`tree.encode`), without tensors.
    """

    step: int
    epoch: int | None
    world_size: int
    metrics: Mapping[str, float]
    versions: Mapping[str, str]
    parts: Mapping[str, EncodedPart]
    ranks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.step < listing.MAX_STEP:
            raise UsageError(f"step is {self.step}; expected 0 to {listing.MAX_STEP - 1}.")
        for name in self.parts:
            manifest.check_part_name(name)
        for metric, value in self.metrics.items():
            try:
                float(value)
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"the metric {metric!r} is {value!r:.40}; expected a number."
                ) from error


class Writer:
    """The one writer of a folder: holds its lock. Made by `Store.open_for_writing`.

    Not for several threads at once; which thread calls does not matter. A context manager.

    Attributes:
        run: the number of the run that is written. The retention deletes no others.
    """

    def __init__(
        self, path: Path, retention: Retention, run: int | None = None, new_run: bool = False
    ) -> None:
        """
        Args:
            path: the folder.
            retention: which steps of the run stay.
            run: the run to continue; if another one is the newest, a new run begins.
            new_run: begin a new run in any case.
        """
        self._path = path
        self._retention = retention
        self._attempts = 0
        self._closed = False
        with ExitStack() as resources, failing("write to", path):
            disk.make_folders(path)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            resources.callback(os.close, self._folder)
            self._lock = FolderLock(path, self._folder)
            resources.callback(self._lock.close)
            self._sweep()
            entries = listing.scan(self._folder)
            self._commits = max((e.manifest.commit for e in entries if e.manifest), default=0)
            newest = listing.newest_run(entries)
            self._expect_known(entry for entry in entries if entry.run == newest)
            self._next_run = listing.next_run(self._folder, entries)
            if newest is None or new_run or run not in (None, newest):
                self.run = self._begin_run()
            else:
                self.run = newest
            self._resources = resources.pop_all()

    def write(self, snapshot: Snapshot) -> Path:
        """Write `snapshot` as a step that survives a power cut, then do the retention.

        Returns once the step is on the disk, was read back and is listed. The Python threads of
        the process go on meanwhile: writing, hashing and fsync release the interpreter's lock.

        Returns:
            The step's folder.

        Raises:
            CheckpointError: it could not be written; says which file and why. The steps that
                were there still are, and nothing half is left that would be listed.
            WriterConflict: another process has taken the folder over, because this one had not
                given a sign of life for some time.
            UsageError: the snapshot cannot be written by anyone, such as a dtype that
                safetensors has no name for.
        """
        self._check()
        final = self._commit(snapshot.step, partial(self._write_files, snapshot))
        self._retain()
        return self._path / self._settled(final, snapshot.step)

    def continue_from(self, base: Manifest) -> None:
        """Continue the run of a step that was restored.

        If there are newer steps, a new run begins, with this step as its first. From then on it is
        the newest step. The newer ones stay.

        Args:
            base: of the step.

        Raises:
            CheckpointError: it cannot be written once more.
            WriterConflict: another process has taken the folder over.
        """
        self._check()
        with failing("read", self._path):
            entries = listing.scan(self._folder)
        self._expect_known(entry for entry in entries if entry.step == base.step)
        found = [entry for entry in entries if entry.manifest == base]
        if found and base.run == listing.newest_run(entries) and base.commit >= self._commits:
            self.run = base.run
            return
        self.run = self._begin_run()
        if not found:
            # It is in memory, so there is something to save.
            _log.warning(
                "step %d, which was restored, is not in %s any more; a new run begins there",
                *(base.step, self._path),
            )
            return
        self._commit(base.step, lambda folder, _: self._link_files(found[0].name, base, folder))
        older = [entry for entry in entries if entry.run != self.run]
        _log.warning(
            "a new run begins with step %d, which was restored; the other steps in %s stay, and "
            "belong to older runs (%d steps, %.3g GB; `hvdkit checkpoint prune --older-runs` "
            "deletes them)",
            *(base.step, self._path, len(older), sum(entry.size for entry in older) / 1e9),
        )

    def _expect_known(self, entries: Iterable[listing.Entry]) -> None:
        """Raise if a step may be good and cannot be read now: its commit is not known."""
        for entry in entries:
            if entry.manifest is None and not isinstance(entry.error, Damaged):
                raise CheckpointError(
                    f"{entry.name} in {self._path}: {entry.error}"
                ) from entry.error

    def _begin_run(self) -> int:
        """Return the number of a new run."""
        run, self._next_run = self._next_run, self._next_run + 1
        return run

    def _commit(self, step: int, put_files: PutFiles) -> str:
        """Make a step visible, or nothing.

        Args:
            step: its number.
            put_files: of the step.

        Returns:
            The name of the step's folder.
        """
        # What could not be removed before may be by now, and takes space.
        self._sweep(self._lock.lease.token)
        self._attempts += 1
        name = f"{_WRITING}{self._lock.lease.token}-{self._attempts}"
        try:
            self._make_folder(name, put_files)
            self._read_back(name, step)
            # Another writer may have taken over while a large step was written.
            self._check()
            final = self._show(name, step)
        except BaseException:
            self._discard(name)
            raise
        self._commits += 1
        with failing("fsync", self._path):
            disk.sync_folder(self._folder, self._path.name)
        return final

    def prune(self, names: Iterable[str]) -> None:
        """Delete steps or set-aside ones by their folders' names; a failing delete warns.

        Raises:
            WriterConflict: another process has taken the folder over.
        """
        self._check()
        for name in names:
            self._delete(name)

    def close(self) -> None:
        """Give the lock back. May be called again."""
        self._closed = True
        self._resources.close()

    def _check(self) -> None:
        if self._closed:
            raise CheckpointError(f"the writer of {self._path} is closed; open a new one.")
        with failing("write to", self._path):
            self._lock.check()

    def _make_folder(self, name: str, put_files: PutFiles) -> None:
        """Make the folder `name` of a step: its files, then the manifest, then an fsync of it."""
        path = self._path / name
        with failing("make", path):
            disk.make_folder(name, self._folder)
        with failing("write", path), disk.folder(name, self._folder) as folder:
            made = put_files(folder, path)
            with failing("write", path / manifest.NAME):
                _write_file(manifest.NAME, [memoryview(made.to_bytes())], folder)
            disk.sync_folder(folder, name)

    def _write_files(self, snapshot: Snapshot, folder: int, path: Path) -> Manifest:
        """Write the files of a snapshot. Returns the manifest that belongs to them."""
        files = {}
        for file, pieces in _contents(snapshot):
            with failing("write", path / file):
                files[file] = _write_file(file, pieces, folder)
        return Manifest(
            step=snapshot.step,
            epoch=snapshot.epoch,
            world_size=snapshot.world_size,
            commit=self._commits + 1,
            run=self.run,
            time=time.time(),
            metrics={metric: float(value) for metric, value in snapshot.metrics.items()},
            versions=snapshot.versions,
            files=files,
        )

    def _link_files(self, old: str, base: Manifest, folder: int) -> Manifest:
        """Link the files of the step `old`. Returns the manifest of the same step in this run."""
        with disk.folder(old, self._folder) as source:
            for file in base.files:
                disk.link(file, source, folder)
        return replace(base, run=self.run, commit=self._commits + 1)

    def _read_back(self, name: str, step: int) -> None:
        opened, problems = examine(name, self._folder, step)
        if opened is None:
            raise CheckpointError(
                f"step {step} was written to {self._path} and reads differently: "
                f"{'; '.join(map(str, problems))}. It was given up; check the disk and the memory."
            )
        opened.close()

    def _show(self, name: str, step: int) -> str:
        """Rename the finished folder `name` to that of `step`. Returns the name it has now."""
        with failing("rename", self._path / name):
            made = os.stat(name, dir_fd=self._folder)
            final = listing.free_name(step, self.run, disk.names(self._folder))
            try:
                disk.rename(name, final, self._folder)
            except FileNotFoundError:
                # A server may have done it, lost its answer and been asked once more.
                there = os.stat(final, dir_fd=self._folder)
                if (there.st_dev, there.st_ino) != (made.st_dev, made.st_ino):
                    raise
        return final

    def _discard(self, name: str) -> None:
        """Remove what cannot be finished. What cannot be removed is swept another time."""
        try:
            disk.remove(name, self._folder)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s stays for now: %s", self._path / name, error.strerror)

    def _retain(self) -> None:
        try:
            listed = listing.whole(listing.scan(self._folder))
        except (OSError, CheckpointError) as error:
            _log.warning("no old steps of %s were deleted: %s", self._path, error)
            return
        listed = [(name, made) for name, made in listed if made.run == self.run]
        stay = self._retention.kept([made for _, made in listed])
        for place, (name, _) in enumerate(listed):
            if place not in stay:
                self._delete(name)

    def _settled(self, name: str, step: int) -> str:
        """Give a step that has replaced one of the same number that one's name.

        Returns:
            The name that its folder has now.
        """
        try:
            plain = listing.free_name(step, self.run, disk.names(self._folder))
            if len(plain) >= len(name):
                return name
            disk.rename(name, plain, self._folder)
        except OSError as error:
            _log.warning("%s keeps its name: %s", self._path / name, error.strerror)
            return name
        return plain

    def _delete(self, name: str) -> None:
        """Delete a listed folder, which no longer is one after the first step of that."""
        hidden = f"{_DELETING}{self._lock.lease.token}-{name}"
        try:
            disk.rename(name, hidden, self._folder)
            disk.remove(hidden, self._folder)
        except OSError as error:
            _log.warning("%s could not be deleted: %s", self._path / name, error.strerror)

    def _sweep(self, token: str = "") -> None:
        """Remove what the writer with that token has left behind, or all dead writers have.

        While we hold the lock, all others are dead.
        """
        try:
            names = disk.names(self._folder)
        except OSError as error:
            _log.warning("%s was not swept: %s", self._path, error.strerror)
            return
        for name in names:
            if name.startswith((_WRITING + token, _DELETING + token)):
                _log.info("removing %s, which was not finished", self._path / name)
                self._discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _contents(snapshot: Snapshot) -> Iterator[tuple[str, Iterable[memoryview]]]:
    """The files of a step but its manifest: names and contents, piece by piece."""
    for name, part in snapshot.parts.items():
        if part.tensors:
            yield name + manifest.TENSORS_SUFFIX, tensors.serialize(part.tensors)
    yield (
        manifest.STATE,
        [_json(manifest.STATE, {n: part.tree for n, part in snapshot.parts.items()})],
    )
    yield manifest.RANKS, [_json(manifest.RANKS, list(snapshot.ranks))]


def _json(name: str, content: Any) -> memoryview:
    data = json.dumps(content, allow_nan=False).encode()
    if len(data) > manifest.MAX_JSON_BYTES:
        raise UsageError(
            f"{name} would have {len(data)} bytes; expected at most "
            f"{manifest.MAX_JSON_BYTES}. Keep large data in tensors."
        )
    return memoryview(data)


def _write_file(name: str, pieces: Iterable[memoryview], folder: int) -> FileRecord:
    """Write a new file, hash it on its way, and wait until it is on the disk."""
    descriptor = disk.create(name, folder)
    try:
        state, size = xxhash.xxh3_128(), 0
        for piece in pieces:
            for at in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[at : at + _CHUNK_BYTES]
                state.update(chunk)
                disk.write(descriptor, chunk, name)
            size += len(piece)
        disk.sync(descriptor, name)
        disk.forget(descriptor, size)
    finally:
        os.close(descriptor)
    return FileRecord(size, state.hexdigest())
