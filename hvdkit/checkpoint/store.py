"""List the steps of a storage, find the newest good step, and open the storage for writing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hvdkit.checkpoint.errors import CheckpointError, Damaged, NoneGood
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.places import open_storage
from hvdkit.checkpoint.reading import OpenCheckpoint, examine
from hvdkit.checkpoint.retention import KeepBest, Retention
from hvdkit.checkpoint.storage import Entry, expect_manifests, newest_run
from hvdkit.checkpoint.writing import Writer
from hvdkit.errors import UsageError

_log = logging.getLogger(__name__)

# How often to list again after a live writer has deleted a listed step.
_LIST_ATTEMPTS = 10


@dataclass(frozen=True)
class StepInfo:
    """A complete step in the listing.

    Attributes:
        step: its number.
        location: its path or URL.
        manifest: its description.
    """

    step: int
    location: str
    manifest: Manifest


class Store:
    """The checkpoints in a folder or an object store. The constructor does not access the storage.

    Attributes:
        location: the absolute path of the folder, or the URL.
        retention: which steps are kept.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: KeepBest | Sequence[KeepBest] = (),
        keep_every: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
            folder: a local or shared folder, created by `open_for_writing` if it does not exist;
                or a URL that fsspec knows, such as `s3://bucket/run`.
            keep_last: the number of newest steps to keep, at least 1; None: all.
            keep_best: the best steps to keep as well, see `KeepBest`.
            keep_every: also keep steps whose number is a multiple of this; None: no such steps.
            storage_options: for fsspec's file system, such as `endpoint_url`; for URLs only.

        Raises:
            UsageError: `keep_last` is below 1, or fsspec does not know the URL's protocol.
        """
        self._storage = open_storage(folder, storage_options)
        self.location = str(self._storage)
        best = [keep_best] if isinstance(keep_best, KeepBest | str) else list(keep_best)
        self.retention = Retention(keep_last, best, keep_every)

    @classmethod
    def of_newest(cls, folder: str | os.PathLike[str]) -> Store:
        """Return the store of a folder that keeps only the newest step of all runs."""
        store = cls(folder)
        store.retention = Retention(keep_last=1, of_all_runs=True)
        return store

    def open_for_writing(self, *, run: int | None = None, new_run: bool = False) -> Writer:
        """Become the writer, and remove files that dead writers have left.

        Waits up to a minute to find out whether a writer on another host is alive.

        Args:
            run: the run to continue; if another one is the newest, a new run begins. Default: the
                newest.
            new_run: begin a new run in any case.

        Raises:
            WriterConflict: another live process is the writer.
            CheckpointError: the folder cannot be made or written to.
        """
        return Writer(self._storage, self.retention, run, new_run)

    def steps(self) -> list[StepInfo]:
        """List the complete steps in the order of their commits, oldest first.

        Compares file sizes with the manifests, and does not read the content. If a run has saved
        a step twice, only the later one is listed.

        Raises:
            CheckpointError: the folder cannot be read. A folder that does not exist has no steps.
        """
        return self._infos(self.entries())

    def steps_of_newest_run(self) -> list[StepInfo]:
        """List the complete steps of the newest run, as `steps` does.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        entries = self.entries()
        run = newest_run(entries)
        return self._infos(entry for entry in entries if entry.run == run)

    def _infos(self, entries: Iterable[Entry]) -> list[StepInfo]:
        found: dict[tuple[int, int], StepInfo] = {}
        for entry in entries:
            expect_manifests([entry], self.location)
            if entry.manifest is not None and entry.error is None:
                found.pop((entry.run, entry.step), None)
                location = self._storage.location(entry.name)
                found[entry.run, entry.step] = StepInfo(entry.step, location, entry.manifest)
        return list(found.values())

    def entries(self) -> list[Entry]:
        """List all steps, incomplete ones included, in the order of their commits.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return self._storage.entries()

    def quarantined(self) -> list[str]:
        """List the names of damaged steps that were moved out of the way.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return self._storage.quarantined()

    def exists(self) -> bool:
        """Return whether the folder exists. A URL exists if there is an object under it."""
        return self._storage.exists()

    def verify(self, step: int, progress: Callable[[int], None] | None = None) -> list[Damaged]:
        """Read all files of `step` and compare them with its manifest. Changes nothing.

        Args:
            step: its number.
            progress: called with the number of bytes read since the previous call.

        Returns:
            The problems; empty for a good step.

        Raises:
            UsageError: there is no such step.
            CheckpointError: the step cannot be read now; it may be intact.
        """
        (entry, *_) = self.candidates(step, None)
        return self.verify_entry(entry, progress)

    def verify_entry(
        self, entry: Entry, progress: Callable[[int], None] | None = None
    ) -> list[Damaged]:
        """Verify one of `entries`. Return no problems for a step that was deleted meanwhile."""
        opened, problems = self.examine(entry, progress)
        if opened is not None:
            opened.close()
        return problems if problems and self._storage.is_same(entry) else []

    def newest_good(
        self, step: int | None = None, run: int | None = None, *, quarantine: bool = True
    ) -> OpenCheckpoint | None:
        """Open the newest good step of the newest run, after reading and verifying all of it.

        If a step is damaged and an older one is good, the damaged step is quarantined, and the log
        says which file is damaged and why.

        Args:
            step: open this step only. If the newest run does not have this step, open it in the
                newest run that has it.
            run: search this run instead of the newest.
            quarantine: False: only log which steps are damaged, and do not move them.

        Returns:
            The step; None if the folder has no steps at all.

        Raises:
            CheckpointError: there are steps, and none is good; or `step` is damaged. Then no step
                is quarantined, so a second call raises the same error.
            UsageError: there is no such `step`.
        """
        search = self.search(step, run, quarantine=quarantine)
        opened = search.open_next(whole=True)
        search.end()
        return opened

    def search(
        self,
        step: int | None = None,
        run: int | None = None,
        *,
        quarantine: bool = True,
    ) -> Search:
        """Return a search for the newest good step.

        Args:
            step: see `newest_good`.
            run: see `newest_good`.
            quarantine: see `newest_good`.
        """
        return Search(self, step, run, quarantine)

    def candidates(self, step: int | None, run: int | None) -> list[Entry]:
        """Return the steps of one run that could be restored, newest first.

        Args:
            step: only this step; None: all.
            run: this run; None: the newest.

        Raises:
            UsageError: `step` or `run` is given, and there is none.
        """
        entries = self.entries()[::-1]
        wanted = newest_run(entries) if run is None else run
        found = [e for e in entries if e.run == wanted and step in (None, e.step)]
        if not found and step is not None and run is None:
            older = [e for e in entries if e.step == step]
            found = [e for e in older if e.run == older[0].run]
            if found:
                _log.warning(
                    "step %d in %s belongs to run %d; the newest run, %s, does not have this step",
                    *(step, self.location, found[0].run, wanted),
                )
        if not found and (step is not None or run is not None):
            name = " of ".join(
                f"{noun} {number}"
                for noun, number in (("step", step), ("run", run))
                if number is not None
            )
            there = ", ".join(
                str(e.step) if e.run == 1 and run is None else f"{e.step} of run {e.run}"
                for e in entries
            )
            raise UsageError(
                f"there is no {name} in {self.location}; expected one of: {there or 'none'}."
            )
        return found

    def examine(
        self,
        entry: Entry,
        progress: Callable[[int], None] | None = None,
        *,
        whole: bool = True,
    ) -> tuple[OpenCheckpoint | None, list[Damaged]]:
        """Open one of `entries`, as `reading.examine` does."""
        try:
            opened, problems = examine(
                *(partial(self._storage.open_step, entry), entry.step, progress), whole=whole
            )
        except CheckpointError as error:
            raise CheckpointError(f"{entry.name} in {self.location}: {error}") from error
        if opened is not None:
            opened.location = self._storage.location(entry.name)
        return opened, problems

    def is_same(self, entry: Entry) -> bool:
        """Return whether the step still exists and was not replaced by one of the same name."""
        return self._storage.is_same(entry)

    def quarantine(self, entry: Entry, problems: Sequence[Damaged]) -> None:
        """Move a damaged step out of the way and log why."""
        try:
            name = self._storage.quarantine(entry)
        except CheckpointError as error:
            self.say_damaged(entry.step, problems, f"it could not be quarantined: {error}")
            return
        if name is not None:
            self.say_damaged(entry.step, problems, f"it was quarantined as {name}.")

    def say_damaged(self, step: int, problems: Sequence[Damaged], done: str) -> None:
        """Log that a step is damaged, why, and what was done."""
        why = "; ".join(map(str, problems))
        _log.warning("step %d in %s is damaged (%s); %s", step, self.location, why, done)


class StepSearch(Protocol):
    """A search that `Restoring` uses, such as `Search`."""

    def open_next(self, *, whole: bool) -> OpenCheckpoint | None:
        """See `Search`."""
        ...

    def reject(self, problem: Damaged) -> None:
        """See `Search`."""
        ...

    def end(self) -> None:
        """See `Search`."""
        ...


class Search:
    """A search for the newest good step.

    `open_next` opens the newest step. Its tensors may be verified later, while they are read. If
    they are damaged, call `reject`, and then `open_next` for the next older step. Once a step is
    good, `end` quarantines the damaged steps that are newer.
    """

    def __init__(
        self,
        store: Store,
        step: int | None,
        run: int | None,
        quarantine: bool,
    ) -> None:
        self._store = store
        self._step = step
        self._run = run
        self._quarantine = quarantine
        self._damaged: list[tuple[Entry, list[Damaged]]] = []
        self._opened: Entry | None = None
        self._attempts_left = _LIST_ATTEMPTS

    def _expect_no_quarantine(self) -> None:
        """Raise CheckpointError if all steps are in quarantine.

        Training must not silently begin at step 0.
        """
        names = self._store.quarantined()
        if names:
            raise NoneGood(
                f"{self._store.location} has no good step, only damaged ones in quarantine: "
                f"{', '.join(names)}. To train from the beginning, delete them or give another "
                f"folder."
            )

    def newest(self) -> Sequence[int]:
        """Return run and number of the newest step, which may be damaged; empty if there is none.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        listed = self._store.candidates(self._step, self._run)
        return [listed[0].run, listed[0].step] if listed else []

    def open_next(self, *, whole: bool) -> OpenCheckpoint | None:
        """Open the newest step that is not known to be damaged.

        Args:
            whole: read and check all of it. Otherwise the tensors are checked when they are read:
                call `reject` if they are damaged.

        Returns:
            The step; None if there are no steps at all.

        Raises:
            CheckpointError: there are steps, quarantined ones included, and none is good; or the
                search is for one step, and this step is damaged.
            UsageError: the search is for one step, and there is no such step.
        """
        store = self._store
        while self._attempts_left:
            known = {(entry.name, entry.identity) for entry, _ in self._damaged}
            listed = store.candidates(self._step, self._run)
            if not listed and not self._damaged:
                if self._opened is None:
                    self._expect_no_quarantine()
                    return None
                raise CheckpointError(
                    f"step {self._opened.step} in {store.location} was removed while it was read, "
                    f"and there is no other step. Keep more steps."
                )
            if len(listed) > 1:
                # Any of these steps may be the newest.
                expect_manifests(listed, store.location)
            for entry in listed:
                if (entry.name, entry.identity) in known:
                    continue
                opened, problems = store.examine(entry, whole=whole)
                if opened is not None:
                    self._opened = entry
                    return opened
                if not self._note(entry, problems):
                    break
            else:
                raise self._none_good()
        raise CheckpointError(
            f"the steps in {store.location} are removed faster than they can be read; try again, "
            "and keep more of them."
        )

    def reject(self, problem: Damaged) -> None:
        """Note that the step that was opened last is damaged."""
        assert self._opened is not None
        self._note(self._opened, [problem])

    def _note(self, entry: Entry, problems: list[Damaged]) -> bool:
        """Note a damaged step. Return False if a live writer has deleted it meanwhile.

        Then the writer may have written other steps, and the caller must list them again.
        """
        if self._store.is_same(entry):
            self._damaged.append((entry, problems))
            return True
        self._attempts_left -= 1
        return False

    def end(self) -> None:
        """Quarantine the damaged steps that are newer than the good one."""
        for entry, problems in self._damaged:
            if self._quarantine:
                self._store.quarantine(entry, problems)
            else:
                self._store.say_damaged(entry.step, problems, "it was skipped.")
        self._damaged = []

    def _none_good(self) -> NoneGood:
        (entry, problems), location = self._damaged[0], self._store.location
        why = "; ".join(map(str, problems))
        if self._step is not None:
            return NoneGood(
                f"step {self._step} in {location} is damaged ({why}). Choose another step, or give "
                "no step to get the newest good one."
            )
        return NoneGood(
            f"none of the {len(self._damaged)} steps of run {entry.run} in {location} is good; "
            f"the newest, step {entry.step}, is damaged ({why}). Give another folder; or move "
            f"these steps out of this folder, to start again or to continue an older run."
        )
