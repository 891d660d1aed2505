"""The newest step in the memory of one host, for the rank that writes it. No collectives.

The folders belong to the agent of the host (`hvdkit/launch/agent/host_folders.py`), so that a step
outlives the ranks. It is an ordinary step, with the same files, hashes and checks as on disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdkit.agreement.consistency import digest
from hvdkit.checkpoint.background import BackgroundWriter
from hvdkit.checkpoint.errors import CheckpointError, Damaged, NoneGood
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.step_files import Snapshot
from hvdkit.checkpoint.store import Search, Store
from hvdkit.checkpoint.tensors import nbytes
from hvdkit.checkpoint.writing import Writer
from hvdkit.system.plain_files import parse_json

_log = logging.getLogger("hvdkit.checkpoint")

_WAIT_SECONDS = 60.0
# The end of the name of a file beside the steps, with the newest step that was restored.
_MARK = ".restored"

#: The run and the number of a step: the order of steps.
Key = list[int]


def key_of(made: Manifest) -> Key:
    """Return the place of a step in the order of steps."""
    return [made.run, made.step]


def content_of(made: Manifest) -> str:
    """Return a digest of the content of a step, without its number."""
    return digest([f"{name} {record}" for name, record in sorted(made.files.items())]).hex()


class HostSteps:
    """The steps of one manager on this host.

    While a step is written, the step before stays. If there is not enough space for both, the next
    folder is used.

    Args:
        folders: the folders for the steps, in the order in which they are tried.
        on_stored: called in the thread that writes, after each step.
    """

    def __init__(
        self, folders: Sequence[Path], on_stored: Callable[[], None] = lambda: None
    ) -> None:
        self._on_stored = on_stored
        self._writers = {
            folder: BackgroundWriter(Store.of_newest(folder), overwrite=True) for folder in folders
        }
        # The folder of the last write.
        self._folder = folders[0]
        # The kinds of failures that were logged.
        self._warned: set[tuple[type, int | None]] = set()

    def is_idle(self) -> bool:
        """Return whether no write is running. If the last one has failed, log why."""
        if self._writers[self._folder].busy:
            return False
        self.wait()
        return True

    def begin(self, snapshot: Snapshot, run: int) -> None:
        """Write a step in the background, after `finish`.

        Args:
            snapshot: the step. It must not change until `settle`, `finish` or `wait` returns.
            run: its run.

        Raises:
            CheckpointError: there is not enough space, or the folder cannot be written to.
        """
        specs = [spec for part in snapshot.parts.values() for spec, _ in part.tensors.values()]
        self._open(sum(map(nbytes, specs)) + sum(map(len, snapshot.ranks)), run)
        self._writers[self._folder].begin(snapshot)

    def write(self, snapshot: Snapshot, run: int) -> None:
        """Write a step in the background as `begin`. A failure is only logged."""
        try:
            self.begin(snapshot, run)
        except Exception as error:
            self._warn(error)

    def receive(self, made: Manifest, contents: Iterable[tuple[str, Iterable[memoryview]]]) -> bool:
        """Write a step of another host. Return whether it is good; if not, log why.

        Args:
            made: its manifest.
            contents: as for `Writer.receive`.
        """
        try:
            self._open(made.size, made.run).receive(made, contents)
        except Exception as error:
            self._warn(error)
            return False
        return True

    def _open(self, size: int, run: int) -> Writer:
        """Open the first folder with enough space, and return its writer.

        Raises:
            CheckpointError: there is not enough space, or the folder cannot be written to.
        """
        for folder in self._writers:
            # The rest is for others: shared memory that is full ends the workers of data loaders.
            if shutil.disk_usage(folder.parent).free >= 2 * size:
                break
        else:
            places = " or ".join(str(folder.parent) for folder in self._writers)
            raise CheckpointError(
                f"a step has {size / 1e6:.0f} MB: expected twice as much free space in {places}"
            )
        for other in self._writers.keys() - {folder}:
            if other.exists() and _newest_key(other) < _newest_key(folder):
                self._writers[other].close()
                shutil.rmtree(other, ignore_errors=True)
        if folder not in (self._folder, next(iter(self._writers))):
            _log.warning(
                "steps of %.0f MB are kept in %s, because %s has less than twice this space",
                *(size / 1e6, folder.parent, self._folder.parent),
            )
        self._folder = folder
        return self._writers[folder].open_at(run, self._on_stored)

    def newest(self, *, whole: bool = False) -> OpenCheckpoint | None:
        """Open the newest step; None without one.

        Args:
            whole: as for `Search.open_next`.
        """
        self.wait()
        found: list[OpenCheckpoint] = []
        for folder in self._writers:
            try:
                opened = Store(folder).search(quarantine=False).open_next(whole=whole)
            except Exception as error:
                # Another step may be good, and the other ranks do not have this error.
                _log.warning("%s", error)
            else:
                found += [opened] if opened else []
        found.sort(key=lambda each: key_of(each.manifest))
        for older in found[:-1]:
            older.close()
        return found[-1] if found else None

    def newest_content(self) -> str:
        """Return the digest of the content of the step that was written last, after `finish`."""
        made = _newest(self._folder)
        assert made is not None
        return content_of(made)

    def restored(self) -> list[Any]:
        """Return what was noted of the step that was restored last on this host; empty for none."""
        for folder in self._writers:
            with contextlib.suppress(OSError, ValueError):
                content = folder.with_suffix(_MARK).read_text(encoding="ascii")
                return list(parse_json(content))
        return []

    def note_restored(self, noted: Sequence[int | str]) -> bool:
        """Note that a step was restored. Return False if there is no space for the note.

        Args:
            noted: its run and number; more may follow.
        """
        for folder in self._writers:
            with contextlib.suppress(OSError):
                folder.with_suffix(_MARK).write_text(json.dumps(noted), encoding="ascii")
                return True
        return False

    def settle(self) -> None:
        """Wait until no write is running. If it has failed, `finish` raises the error."""
        while not self._writers[self._folder].settled(_WAIT_SECONDS):
            pass

    def finish(self) -> None:
        """Wait for the current write.

        Raises:
            CheckpointError: it has failed.
        """
        while not self._writers[self._folder].finished(_WAIT_SECONDS):
            pass

    def wait(self) -> None:
        """Wait for the current write. If it fails, log why."""
        try:
            self.finish()
        except Exception as error:
            self._warn(error)

    def close(self) -> None:
        """Wait for the current write, and release the folders."""
        self.wait()
        for writer in self._writers.values():
            writer.close()

    def _warn(self, error: Exception) -> None:
        kind = (type(error), getattr(error.__cause__, "errno", None))
        if kind not in self._warned:
            _log.warning("a step was not kept in the memory of this host: %s", error)
        self._warned.add(kind)


def _newest(folder: Path) -> Manifest | None:
    """Return the manifest of the newest complete step in a folder; None if it has none."""
    return max((each.manifest for each in Store(folder).steps()), key=key_of, default=None)


def _newest_key(folder: Path) -> Key:
    """Return the place of the newest complete step in a folder; empty if it has none."""
    made = _newest(folder)
    return [] if made is None else key_of(made)


class NewestSearch:
    """A search for the newest good step, on disk and in the memory of this host.

    Args:
        disk: the search on disk.
        kept: the step in memory. `end` closes it.
        restored: the newest step of the job that was restored before; empty if there was none.

    Attributes:
        from_memory: whether the step that was opened last is the one in memory.
        restored: as given.
    """

    def __init__(self, disk: Search, kept: OpenCheckpoint | None, restored: Key) -> None:
        self.from_memory = False
        self.restored = restored
        self._disk = disk
        self._kept = kept

    def open_next(self, *, whole: bool) -> OpenCheckpoint | None:
        """Open the newest step that is not known to be damaged, as `Search.open_next`."""
        kept, self.from_memory = self._kept, False
        try:
            opened = self._disk.open_next(whole=whole)
        except NoneGood as error:
            if kept is None:
                raise
            _log.warning("%s", error)
            opened = None
        if kept is None or (opened and key_of(opened.manifest) >= key_of(kept.manifest)):
            return opened
        if opened is not None:
            opened.close()
        self.from_memory = True
        return kept

    def reject(self, problem: Damaged) -> None:
        """Note that the step that was opened last is damaged."""
        if not self.from_memory:
            self._disk.reject(problem)
            return
        _log.warning("the step in the memory of this host is damaged: %s", problem)
        self._kept = None

    def end(self) -> None:
        """Quarantine damaged steps on disk, as `Search.end`."""
        self._disk.end()
        if self._kept is not None:
            self._kept.close()
