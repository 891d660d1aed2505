"""A folder of checkpoints: what is listed in it is whole.

DIR/step-000000001200/    one step, made visible by one rename
    manifest.json         step, epoch, world size, versions, size and hash of each file
    state.json            the trees, with marks where tensors are
    ranks.json            what each rank has for itself
    PART.safetensors      the tensors of each part that has some
DIR/damaged-step-…        found damaged and set aside
DIR/.writing-…            being written; swept once its writer is dead
DIR/.deleting-…           being deleted
DIR/.lock, DIR/.writer    who writes here
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdkit.checkpoint import disk, listing
from hvdkit.checkpoint.errors import CheckpointError, failing
from hvdkit.checkpoint.listing import Entry
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.reading import OpenCheckpoint, Problem, examine
from hvdkit.checkpoint.retention import KeepBest, Retention
from hvdkit.checkpoint.writing import Writer
from hvdkit.errors import UsageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInfo:
    """A whole step that the folder lists.

    Attributes:
        step: its number.
        path: its folder.
        manifest: what it says of itself.
    """

    step: int
    path: Path
    manifest: Manifest


class Store:
    """A folder of checkpoints. Making one touches nothing.

    Attributes:
        folder: its absolute path.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_best: KeepBest | Sequence[KeepBest] = (),
    ) -> None:
        """Args:
            folder: local or shared; made by `open_for_writing` if need be.
            keep_last: how many steps stay, newest first, at least 1; None: all.
            keep_best: which stay besides.

        Raises:
            UsageError: `keep_last` is below 1, or `folder` is a URL.
        """
        if "://" in os.fspath(folder):
            raise UsageError(
                f"the folder for checkpoints is {os.fspath(folder)!r}, which is a URL; expected a "
                f"path. Object stores have to be mounted as a folder."
            )
        self.folder = Path(folder).absolute()
        best = (keep_best,) if isinstance(keep_best, KeepBest) else tuple(keep_best)
        self._retention = Retention(keep_last, best)

    def open_for_writing(self, *, run: int | None = None, new_run: bool = False) -> Writer:
        """Make the folder if need be, take its lock and sweep what dead writers left.

        Waits up to a minute where it takes that long to see whether a writer on another host is
        alive.

        Args:
            run: the run to continue; if another one is the newest, a new run begins. Default: the
                newest.
            new_run: begin a new run in any case.

        Raises:
            WriterConflict: another process, which is alive, writes here.
            CheckpointError: the folder cannot be made or written to.
        """
        return Writer(self.folder, self._retention, run, new_run)

    def steps(self) -> list[StepInfo]:
        """The whole steps, oldest first: in the order in which they were committed.

        Their files have the sizes that the manifests say; the content is not read. If a run has
        saved a step again, only the later is listed.

        Raises:
            CheckpointError: the folder cannot be read. One that is not there has no steps.
        """
        found: dict[tuple[int, int], StepInfo] = {}
        for name, manifest in listing.whole(self.entries()):
            found.pop((manifest.run, manifest.step), None)
            found[manifest.run, manifest.step] = StepInfo(
                manifest.step, self.folder / name, manifest
            )
        return list(found.values())

    def entries(self) -> list[Entry]:
        """All that is listed as a step, also what is not whole, in the same order.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        with self._open() as folder:
            return [] if folder is None else listing.scan(folder)

    def set_aside(self) -> list[str]:
        """Names of the folders of damaged steps that were set aside.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        with self._open() as folder:
            return [] if folder is None else listing.set_aside(folder)

    def verify(self, step: int, progress: Callable[[int], None] | None = None) -> list[Problem]:
        """Read all files of `step` and compare them with its manifest. Changes nothing.

        Args:
            step: its number.
            progress: called with the number of bytes read since the call before.

        Returns:
            What is wrong; empty if the step is good.

        Raises:
            UsageError: there is no such step.
            CheckpointError: it cannot be read, for a reason that says nothing about the step.
        """
        with self._open() as folder:
            (entry, *_) = self._candidates(folder, step, None)
        return self.verify_entry(entry, progress)

    def verify_entry(
        self, entry: Entry, progress: Callable[[int], None] | None = None
    ) -> list[Problem]:
        """The same for one of `entries`; nothing is wrong with one that was deleted meanwhile."""
        with self._open() as folder:
            if folder is None:
                return [Problem(entry.name, "it is missing")]
            opened, problems = self._examine(folder, entry, progress)
            if opened is not None:
                opened.close()
            return problems if problems and listing.is_same(folder, entry) else []

    def newest_good(
        self, step: int | None = None, run: int | None = None, *, set_aside: bool = True
    ) -> OpenCheckpoint | None:
        """Open the newest step of the newest run that is good, having read all of it.

        Damaged ones that are newer are set aside (renamed, with a message in the log that says
        which file and why) as soon as an older good one is found.

        Args:
            step: open this one and no other. Where the newest run has none of this number, that of
                the newest run that has one.
            run: look at this run alone, instead of the newest.
            set_aside: False: only say which ones are damaged, and leave them where they are.

        Returns:
            The step; None if the folder has no steps at all.

        Raises:
            CheckpointError: there are steps, and none is good; or `step` is damaged. None is set
                aside then: the same question has the same answer.
            UsageError: there is no such `step`.
        """
        with self._open() as folder:
            for _ in range(listing.LOOKS):
                candidates = self._candidates(folder, step, run)
                if not candidates or folder is None:
                    return None
                damaged: list[tuple[Entry, list[Problem]]] = []
                for entry in candidates:
                    opened, problems = self._examine(folder, entry)
                    if opened is not None:
                        for other, reasons in damaged:
                            if set_aside:
                                self._set_aside(folder, other, reasons)
                            else:
                                self._say_damaged(other.step, reasons, "it was passed over")
                        return opened
                    if not listing.is_same(folder, entry):
                        break  # a live writer has deleted it, and written others: look again
                    damaged.append((entry, problems))
                else:
                    raise self._none_good(damaged, step)
        raise CheckpointError(
            f"the steps in {self.folder} are removed faster than they can be read; try again, and "
            "keep more of them."
        )

    def prunable(
        self,
        retention: Retention,
        older_runs: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> list[Entry]:
        """The whole steps of the newest run that `retention` lets go, oldest first.

        Those that stay are read and verified; a damaged one does not count as staying, nor as
        one that may go. So at least one good step stays.

        Args:
            retention: which of them stay.
            older_runs: all steps of older runs go, too, if the newest has a good one.
            progress: called with the number of bytes read since the call before.

        Raises:
            CheckpointError: the folder or a step cannot be read.
        """
        with self._open() as folder:
            if folder is None:
                return []
            entries = listing.scan(folder)
            run = listing.newest_run(entries)
            listed = [e for e in entries if e.run == run and e.error is None]
            good: list[Entry] = []
            while True:
                stay = [
                    listed[place]
                    for place in retention.kept([e.manifest for e in listed if e.manifest])
                ]
                unread = [entry for entry in stay if entry not in good]
                if not unread:
                    break
                opened, problems = self._examine(folder, unread[0], progress)
                if opened is not None:
                    opened.close()
                    good.append(unread[0])
                else:
                    listed.remove(unread[0])
                    self._say_damaged(unread[0].step, problems, "it stays, and does not count")
            older = [entry for entry in entries if entry.run != run and older_runs and good]
            return [entry for entry in [*older, *listed] if entry not in good]

    def of_older_runs(self) -> list[Entry]:
        """All that is listed as a step of another run than the newest, oldest first.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        entries = self.entries()
        newest = listing.newest_run(entries)
        return [entry for entry in entries if entry.run != newest]

    @contextmanager
    def _open(self) -> Iterator[int | None]:
        """The folder's descriptor; None if it is not there."""
        with failing("read", self.folder):
            try:
                descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                descriptor = None
        try:
            with failing("read", self.folder):
                yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _candidates(self, folder: int | None, step: int | None, run: int | None) -> list[Entry]:
        """Return the steps that could be loaded, newest first, all of one run.

        Raises:
            UsageError: `step` or `run` is given, and there is none.
        """
        entries = [] if folder is None else listing.scan(folder)[::-1]
        wanted = listing.newest_run(entries) if run is None else run
        found = [e for e in entries if e.run == wanted and step in (None, e.step)]
        if not found and step is not None and run is None:
            older = [e for e in entries if e.step == step]
            found = [e for e in older if e.run == older[0].run]
            if found:
                _log.warning(
                    "step %d in %s is one of run %d; the newest run, %s, has none of this number",
                    *(step, self.folder, found[0].run, wanted),
                )
        if not found and (step is not None or run is not None):
            name = " of ".join(
                f"{noun} {number}"
                for noun, number in (("step", step), ("run", run))
                if number is not None
            )
            there = ", ".join(
                str(e.step) if e.run == 1 else f"{e.step} of run {e.run}" for e in entries
            )
            raise UsageError(
                f"there is no {name} in {self.folder}; expected one of: {there or 'none'}."
            )
        return found

    def _examine(
        self, folder: int, entry: Entry, progress: Callable[[int], None] | None = None
    ) -> tuple[OpenCheckpoint | None, list[Problem]]:
        try:
            return examine(entry.name, folder, entry.step, progress)
        except CheckpointError as error:
            raise CheckpointError(f"{entry.name} in {self.folder}: {error}") from error

    def _set_aside(self, folder: int, entry: Entry, problems: Sequence[Problem]) -> None:
        new = listing.set_aside_name(entry.name, disk.names(folder))
        if not listing.is_same(folder, entry):
            return
        try:
            disk.rename(entry.name, new, folder)
        except FileNotFoundError:
            return  # another process has done it
        except OSError as error:
            done = f"it could not be set aside: {error.strerror}"
        else:
            done = f"it was set aside as {new}"
        self._say_damaged(entry.step, problems, done)

    def _say_damaged(self, step: int, problems: Sequence[Problem], done: str) -> None:
        why = "; ".join(map(str, problems))
        _log.warning("step %d in %s is damaged (%s); %s.", step, self.folder, why, done)

    def _none_good(
        self, damaged: Sequence[tuple[Entry, Sequence[Problem]]], step: int | None
    ) -> CheckpointError:
        entry, problems = damaged[0]
        why = "; ".join(map(str, problems))
        if step is not None:
            return CheckpointError(
                f"step {step} in {self.folder} is damaged ({why}). Choose another step, or none "
                "for the newest good one."
            )
        return CheckpointError(
            f"none of the {len(damaged)} steps of run {entry.run} in {self.folder} is good; the "
            f"newest, step {entry.step}, is damaged ({why}). Move them away to start anew or to "
            f"continue an older run, or give another folder."
        )
