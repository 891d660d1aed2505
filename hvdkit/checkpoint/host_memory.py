"""Keep the newest step in the memory of each host, where it outlives the ranks.

All ranks call each method alike. One rank of each host writes (`HostSteps`), so each host has a
copy. The order of steps is that of the runs on disk, and of the numbers of steps in a run.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdkit.agreement.collectives import Collectives
from hvdkit.agreement.consistency import digest
from hvdkit.checkpoint.coordination import exchange
from hvdkit.checkpoint.host_steps import HostSteps, NewestSearch, key_of
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.memory import Allocate
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.restoring import NOTHING_RESTORED
from hvdkit.checkpoint.snapshot import SnapshotMemory
from hvdkit.checkpoint.step_files import Snapshot
from hvdkit.checkpoint.store import Search, StepSearch
from hvdkit.errors import UsageError
from hvdkit.runtime import host_folders
from hvdkit.runtime.progress import report_saved

_log = logging.getLogger("hvdkit.checkpoint")

_NO_FOLDERS = (
    "every_steps_in_memory has no effect: the memory of a host keeps steps only in a job of "
    "`hvdkit run --restarts N` or `--elastic`, over Gloo and outside of Slurm allocations. Steps "
    "are kept on disk only"
)


class HostMemory:
    """The steps of one manager in the memory of all hosts.

    Args:
        collectives: of the ranks of the job.
        location: of the steps on disk.
        every_steps: a step is due at the first call at or after each multiple of this number;
            None for no steps in memory.
        allocate: allocates memory for the copy of the state.

    Attributes:
        memory: the memory for the copy of the state.
        others_write: whether ranks other than the first one write. Equal on all ranks after
            `begin`.

    Raises:
        UsageError: `every_steps` is not valid.
    """

    def __init__(
        self,
        collectives: Collectives,
        location: str,
        every_steps: int | None,
        allocate: Allocate,
    ) -> None:
        if every_steps is not None and (not isinstance(every_steps, int) or every_steps < 1):
            raise UsageError(
                f"every_steps_in_memory is {every_steps!r}: expected a whole number >= 1"
            )
        self.memory = SnapshotMemory(allocate)
        self._collectives = collectives
        self._location = location
        self._every_steps = every_steps
        self._folders = host_folders.folders() if every_steps else ()
        # The last step that was kept or restored.
        self._step = 0
        # On the ranks that write; empty on the other ranks. None before `_agree`.
        self._steps: Sequence[HostSteps] | None = None
        self.others_write = False
        if every_steps and not self._folders and self._collectives.is_first:
            _log.warning(_NO_FOLDERS)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the steps of its host."""
        return bool(self._steps)

    def ready(self, step: int, saved: int | None) -> bool:
        """Return whether a step is due, and this rank can keep it. Not a collective.

        Args:
            step: the number of steps trained.
            saved: the newest step that is saved on disk; None if there is none.
        """
        if self._every_steps is None or not self._folders:
            return False
        window = step // self._every_steps
        is_due = all(window != done // self._every_steps for done in (self._step, saved or 0))
        return is_due and all(each.is_idle() for each in self._steps or ())

    def begin(self, step: int) -> None:
        """Begin to keep a step, for which all ranks are ready. A collective.

        Args:
            step: the number of steps trained.
        """
        if self._steps is None:
            told = exchange(self._collectives, {"memory": self.described()})
            self._agree([each["memory"] for each in told])
        self._step = step

    def write(self, snapshot: Snapshot, run: int) -> None:
        """Write a step in the background, on a rank that writes. Not a collective.

        Args:
            snapshot: the step.
            run: its run on disk.
        """
        for each in self._steps or ():
            each.write(snapshot, run)

    def described(self) -> Mapping[str, Any] | None:
        """Return what `search` needs of each rank, in JSON; None without steps in memory."""
        folders = [str(folder) for folder in self._folders]
        return {"folders": folders, "location": self._location} if folders else None

    def search(
        self, disk: Search | None, described: Sequence[Mapping[str, Any] | None], *, whole: bool
    ) -> StepSearch | None:
        """Return a search for the newest step, on disk and in memory. A collective.

        If only another host has it in its memory, the host of the first rank gets a copy. A host
        whose step is damaged does not have it. So with several hosts, each host reads its step
        here. The step of a single host is verified while it is restored.

        Args:
            disk: on the first rank, the search on disk.
            described: what `described` has returned on each rank.
            whole: the `whole` of `open_next` in the search that follows.

        Raises:
            CheckpointError: on all ranks: the folder on disk cannot be read.
        """
        if None in described:
            return disk
        self._agree(described)
        kept: OpenCheckpoint | None = None
        message: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            kept = self._newest(whole=whole or self.others_write)
            message = {
                "kept": key_of(kept.manifest) if kept else [],
                "restored": next((each.restored() for each in self._steps or ()), []),
                "disk": disk.newest() if disk else [],
            }
        except Exception as error:
            problem = error
        told = exchange(self._collectives, message, problem, NOTHING_RESTORED)
        newest = max(each["kept"] for each in told)
        holders = [
            rank
            for rank, each in zip(self._collectives.ranks, told, strict=True)
            if each["kept"] == newest
        ]
        if newest > told[0]["disk"] and holders[0] != self._collectives.ranks[0]:
            kept = self._copied(holders, kept)
        if disk is None:
            if kept is not None:
                kept.close()
            return None
        return NewestSearch(disk, kept, max(each["restored"] for each in told))

    def note_restored(self, made: Manifest, search: StepSearch | None) -> bool:
        """Note which step was restored. Not a collective.

        Args:
            made: the manifest of the step.
            search: on the first rank, the search that has found it.

        Returns:
            On the first rank, whether the step was in memory.
        """
        self._step = made.step
        noted = all(each.note_restored(key_of(made)) for each in self._steps or ())
        if not isinstance(search, NewestSearch) or not search.from_memory:
            return False
        _log.info("step %d was restored from the memory of the hosts", made.step)
        # A step in memory is progress once a restart has used it: before, it may be lost with its
        # host. A job that fails at the same step again and again must not restart forever.
        if noted and key_of(made) > search.restored:
            report_saved()
        return True

    def close(self) -> None:
        """Wait for the current write, and release the folders. Not a collective."""
        for each in self._steps or ():
            each.close()

    def _agree(self, described: Sequence[Mapping[str, Any] | None]) -> None:
        """Choose the rank that writes on each host. Equal on all ranks.

        Args:
            described: what `described` has returned on each rank. All ranks have folders.
        """
        if self._steps is not None:
            return
        told = [each for each in described if each is not None]
        own = [str(folder) for folder in self._folders]
        # An agent gives all ranks of its host the same folders, and no other ranks.
        writer = next(place for place, each in enumerate(told) if each["folders"] == own)
        self.others_write = any(each["folders"] != told[0]["folders"] for each in told)
        name = f"steps-{digest([told[0]['location']]).hex()[:16]}"
        writes = self._collectives.ranks[writer] == self._collectives.rank
        self._steps = [HostSteps([folder / name for folder in self._folders])] if writes else []

    def _copied(self, holders: Sequence[int], kept: OpenCheckpoint | None) -> OpenCheckpoint | None:
        """Copy the newest step to the host of the first rank. A collective.

        Args:
            holders: the ranks whose hosts have the step.
            kept: the newest step of this host.

        Returns:
            The newest step of this host.
        """
        for holder in holders:
            made = Manifest.from_bytes(self._of(holder, kept))
            pieces = self._pieces(holder, made, kept)
            good = False
            if self._collectives.is_first:
                files = itertools.groupby(pieces, key=lambda piece: piece[0])
                contents = ((name, (content for _, content in each)) for name, each in files)
                good = all(each.receive(made, contents) for each in self._steps or ())
            # Also a rank that could not write takes part in the remaining broadcasts.
            deque(pieces, maxlen=0)
            if exchange(self._collectives, {"good": good})[0]["good"]:
                break
        if self._collectives.is_first:
            if kept is not None:
                kept.close()
            # The copy was read back.
            kept = self._newest(whole=False)
        return kept

    def _newest(self, *, whole: bool) -> OpenCheckpoint | None:
        return next((each.newest(whole=whole) for each in self._steps or ()), None)

    def _of(self, holder: int, kept: OpenCheckpoint | None) -> bytes:
        """Return the manifest of the step of a rank. A collective."""
        own = kept.manifest.to_bytes() if kept is not None else b""
        return self._collectives.broadcast(own, holder, "hvdkit.checkpoint.kept")

    def _pieces(
        self, holder: int, made: Manifest, kept: OpenCheckpoint | None
    ) -> Iterator[tuple[str, memoryview]]:
        """Yield the pieces of a step of a rank: name of the file, content. Each is a collective.

        If the rank cannot read a piece, the content is another one, which its hash shows.

        Args:
            holder: the rank.
            made: the manifest of its step.
            kept: the newest step of this host.
        """
        for name, record in made.files.items():
            for _, begin, end in record.pieces(0, record.size):
                piece = np.zeros(end - begin, np.uint8)
                if kept is not None and self._collectives.rank == holder:
                    try:
                        kept.read_raw(name, piece, begin)
                    except Exception as error:
                        _log.warning("the step in the memory of this host: %s", error)
                self._collectives.broadcast_into(piece, holder, "hvdkit.checkpoint.copy")
                yield name, piece.data
