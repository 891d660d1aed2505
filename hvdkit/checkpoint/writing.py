"""Write steps into a storage.

`Writer.write` writes the files of a `Snapshot` as a draft, reads them back, and makes the step
visible. Then it deletes the steps that retention does not keep.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self

from hvdkit.checkpoint import manifest
from hvdkit.checkpoint.chunks import FileRecord
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import examine
from hvdkit.checkpoint.retention import Retention
from hvdkit.checkpoint.step_files import (
    Snapshot,
    contents,
    interrupted,
    of_tensors,
    until_withdrawn,
)
from hvdkit.checkpoint.storage import Draft, Entry, Storage, expect_manifests, newest_run
from hvdkit.runtime.progress import report_saved

_log = logging.getLogger(__name__)

#: Writes all files of a step except the manifest; returns the manifest.
PutFiles = Callable[[Draft], Manifest]


class Writer:
    """The writer of a storage; `Store.open_for_writing` returns one. A context manager.

    Any thread may call a method, but only one thread at a time.

    Attributes:
        run: the number of the run that is written. Retention deletes steps of this run only, unless
            its rules are for all runs.
        on_progress: called after the write of a step that is higher than all steps of the run.
    """

    def __init__(
        self, storage: Storage, retention: Retention, run: int | None = None, new_run: bool = False
    ) -> None:
        """
        Args:
            storage: where to write.
            retention: which steps of the run are kept.
            run: the run to continue; if another one is the newest, a new run begins.
            new_run: begin a new run in any case.
        """
        self.on_progress: Callable[[], None] = report_saved
        self._storage = storage
        self._retention = retention
        self._closed = False
        self._draft: Draft | None = None
        self._read_back_bytes = 0
        with ExitStack() as resources:
            self._writer = storage.open_for_writing()
            resources.callback(self._writer.close)
            entries = self._writer.entries()
            newest = newest_run(entries)
            expect_manifests((e for e in entries if e.run == newest), str(storage))
            self._new_runs = itertools.count(self._writer.next_run(entries))
            # A step above this one is progress; -1 for every step.
            self._highest = -1
            if newest is None or new_run or run not in (None, newest):
                self.run = self._begin_run(entries)
            else:
                self.run = newest
                self._highest = max(entry.step for entry in entries if entry.run == newest)
            self._resources = resources.pop_all()

    def write(self, snapshot: Snapshot) -> str:
        """Write `snapshot` as a step that survives a power cut, then delete old steps.

        Returns after the step was stored, read back and listed. Writing, hashing and fsync release
        the interpreter's lock, so other Python threads continue.

        Returns:
            The step's path or URL.

        Raises:
            CheckpointError: a file could not be written. The older steps are unchanged, and no
                incomplete step is listed.
            WriterConflict: another process has taken over, because this one had not renewed its
                lease for some time.
            UsageError: the snapshot is invalid, for example has a dtype that safetensors does not
                have.
        """
        self._check()
        name = self._commit(
            *(snapshot.step, partial(self._write_files, snapshot), snapshot.withdrawn)
        )
        # A step that is saved once more is no progress: an elastic job that always fails at the
        # same place may save it after each restart.
        if snapshot.step > self._highest:
            self._highest = snapshot.step
            self.on_progress()
        self._retain()
        return self._storage.location(self._writer.settle(name))

    @property
    def progress(self) -> int | None:
        """Return a number that grows while bytes are written or read back; it is no total.

        Any thread may call this.

        None if the storage does not count them.
        """
        draft = self._draft
        if draft is None:
            return 0
        return None if draft.written is None else draft.written + self._read_back_bytes

    def continue_from(self, base: Manifest) -> None:
        """Continue the run of a step that was restored.

        If there are newer steps, begin a new run, whose first step is a copy of this step. The
        copy is then the newest step. The newer steps of the old run are kept.

        Args:
            base: the manifest of the step.

        Raises:
            CheckpointError: the step cannot be copied.
            WriterConflict: another process has taken over.
        """
        self._check()
        entries = self._writer.entries()
        run = newest_run(entries)
        needed = (e for e in entries if e.step == base.step or e.run == run)
        expect_manifests(needed, str(self._storage))
        found = [entry for entry in entries if entry.manifest == base]
        newest = max((e.manifest.commit for e in entries if e.manifest), default=0)
        if found and base.run == run and base.commit == newest:
            self.run = base.run
            return
        self.run = self._begin_run(entries)
        if not found:
            # The state of the step is in memory, so the training can continue, in a new run.
            _log.warning(
                "step %d, which was restored, was deleted from %s; the next save begins a new run",
                *(base.step, self._storage),
            )
            return
        self._commit(base.step, partial(self._copy_files, found[0], base))
        older = [entry for entry in entries if entry.run != self.run]
        _log.warning(
            "a new run begins with step %d, which was restored; the other steps in %s are kept as "
            "older runs (%d steps, %.3g GB; `hvdkit checkpoint prune --older-runs` deletes them)",
            *(base.step, self._storage, len(older), sum(entry.size for entry in older) / 1e9),
        )

    def write_into(self, run: int) -> None:
        """Write into a run from now on. In another run, each number of a step may be progress.

        Args:
            run: the run.
        """
        if run != self.run:
            self._highest = -1
        self.run = run

    def receive(self, base: Manifest, contents: Iterable[tuple[str, Iterable[memoryview]]]) -> None:
        """Write a step of another storage, and read it back.

        Args:
            base: the manifest of the step.
            contents: name and content of each file.

        Raises:
            CheckpointError: a file could not be written, or its content does not fit the manifest.
            WriterConflict: another process has taken over.
        """
        self._check()
        self.run = base.run
        self._commit(base.step, partial(self._put_files, contents, base))
        self._retain()

    def _begin_run(self, entries: Sequence[Entry]) -> int:
        """Return the number of a new run."""
        # A job that begins a run at each restart makes no progress. It must not restart forever.
        self._highest = max((entry.step for entry in entries), default=-1)
        return next(self._new_runs)

    def _commit(
        self, step: int, put_files: PutFiles, withdrawn: threading.Event | None = None
    ) -> str:
        """Write a step and make it visible.

        Args:
            step: its number.
            put_files: writes the files of the step.
            withdrawn: when set, the step is not made visible.

        Returns:
            The step's name.
        """
        # Files that an earlier attempt failed to remove take space.
        self._writer.sweep()
        draft = self._draft = self._writer.draft(step, self.run)
        try:
            if self.run >= manifest.MAX_RUN or draft.commit >= manifest.MAX_COMMIT:
                raise CheckpointError(
                    f"step {step} would be commit {draft.commit} of run {self.run} in "
                    f"{self._storage}; expected numbers below {manifest.MAX_COMMIT} and "
                    f"{manifest.MAX_RUN}. Another step there has a number that hvdkit does not "
                    f"write: move it away, or give another folder."
                )
            made = put_files(draft)
            draft.write(manifest.NAME, [memoryview(made.to_bytes())])
            self._read_back(draft, step)
            if withdrawn is not None and withdrawn.is_set():
                raise interrupted(step)
            return self._writer.commit(draft)
        except BaseException:
            self._writer.discard(draft)
            raise

    def prune(self, names: Sequence[str]) -> None:
        """Delete steps, quarantined ones included, by name. A failure is only logged.

        Raises:
            WriterConflict: another process has taken over.
        """
        self._check()
        self._writer.delete(names)

    def close(self) -> None:
        """Let another process become the writer. May be called more than once."""
        self._closed = True
        self._resources.close()

    def _check(self) -> None:
        if self._closed:
            raise CheckpointError(f"the writer of {self._storage} is closed; open a new one.")
        self._writer.check()

    def _write_files(self, snapshot: Snapshot, draft: Draft) -> Manifest:
        """Write the files of a snapshot. Return their manifest."""
        files = {
            file: draft.write(file, until_withdrawn(pieces, snapshot))
            for file, pieces in contents(snapshot)
        }
        return Manifest(
            step=snapshot.step,
            epoch=snapshot.epoch,
            world_size=len(snapshot.ranks),
            commit=draft.commit,
            run=self.run,
            time=time.time(),
            metrics=self._metrics(snapshot, files),
            versions=snapshot.versions,
            sum_order=snapshot.sum_order,
            files=files,
        )

    def _metrics(self, snapshot: Snapshot, files: Mapping[str, FileRecord]) -> dict[str, float]:
        """Return the metrics of a snapshot, and those that its step already has.

        A script that saves its last step a second time, without metrics, must not lose them. A step
        of the same number whose tensors differ is another state.
        """
        given = {metric: float(value) for metric, value in snapshot.metrics.items()}
        known: dict[str, float] = {}
        for entry in self._writer.entries():
            made = entry.manifest
            if made is None or (entry.step, entry.run) != (snapshot.step, self.run):
                continue
            if of_tensors(made.files) == of_tensors(files):
                known |= made.metrics
        return known | given

    def _copy_files(self, entry: Entry, base: Manifest, draft: Draft) -> Manifest:
        """Copy the files of a step. Return the manifest of the copy."""
        for file in base.files:
            draft.copy(file, entry)
        return replace(base, run=self.run, commit=draft.commit)

    def _put_files(
        self, contents: Iterable[tuple[str, Iterable[memoryview]]], base: Manifest, draft: Draft
    ) -> Manifest:
        """Write files of another storage. Return their manifest."""
        for name, pieces in contents:
            draft.write(name, pieces)
        return replace(base, commit=draft.commit)

    def _count(self, read: int) -> None:
        self._read_back_bytes += read

    def _read_back(self, draft: Draft, step: int) -> None:
        opened, problems = examine(draft.files, step, self._count)
        if opened is None:
            raise CheckpointError(
                f"step {step} was written to {self._storage}, and reading it back gave other "
                f"content: {'; '.join(map(str, problems))}. It was removed; check the disk "
                f"and the memory."
            )
        opened.close()

    def _retain(self) -> None:
        try:
            entries = self._writer.entries()
        except CheckpointError as error:
            _log.warning("no old steps of %s were deleted: %s", self._storage, error)
            return
        listed = [
            (entry.name, entry.manifest)
            for entry in entries
            if entry.manifest is not None
            and entry.error is None
            and (entry.run == self.run or self._retention.of_all_runs)
        ]
        stay = self._retention.kept([made for _, made in listed])
        deleted = [name for place, (name, _) in enumerate(listed) if place not in stay]
        if deleted:
            self._writer.delete(deleted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
