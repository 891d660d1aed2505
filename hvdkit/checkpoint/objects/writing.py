"""The writer of an object store.

Each writer has a number, and creates the object `writers/NUMBER.json`. The creation fails if
another process has the same number. The process with the highest number is the writer. A thread
rewrites the object: the heartbeat. If the heartbeat stops, another process can become the writer.

A commit creates `committed.json` in the step. A later writer creates the same object, with the
content `VOID`, before it deletes a step that an earlier one has left unfinished. Only one of the
two creations succeeds, so a commit that arrives late cannot make an incomplete step exist.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Collection, Hashable, Iterable, Sequence
from contextlib import ExitStack

from hvdkit.checkpoint import manifest
from hvdkit.checkpoint.chunks import ChunkHasher, FileRecord
from hvdkit.checkpoint.errors import CheckpointError, WriterConflict
from hvdkit.checkpoint.lease import MAX_BYTES, Lease, conflict, taken_over, wait_for_death
from hvdkit.checkpoint.objects import earlier, listing
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.objects.content import Content
from hvdkit.checkpoint.objects.files import SMALL_BYTES, ObjectFiles, object_name
from hvdkit.checkpoint.objects.listing import COMMITTED, VOID
from hvdkit.checkpoint.storage import Draft, Entry, StepFiles, step_name

_log = logging.getLogger(__name__)

#: Seconds between two heartbeats.
BEAT_SECONDS = 10.0
#: Seconds without a heartbeat after which a writer is considered dead.
LEASE_TIMEOUT_SECONDS = 60.0

# Each writer has so many commit numbers of its own. They are higher than those of earlier writers,
# whose commits may still arrive.
_COMMITS = 10**6

# How often to try to become the writer, while others try the same.
_ATTEMPTS = 10

_WRITER = re.compile(r"writers/(\d{9})\.json")

#: URLs and options of the stores that this process writes to.
_held: set[Hashable] = set()
_held_guard = threading.Lock()


class ObjectDraft:
    """The objects of a step that is not committed yet."""

    written = None

    def __init__(self, bucket: Bucket, name: str, commit: int) -> None:
        self.name = name
        self.commit = commit
        self._bucket = bucket
        self._sizes: dict[str, int] = {}

    def write(self, name: str, pieces: Iterable[memoryview]) -> FileRecord:
        """Hash and upload a file. An uploaded object is stored durably."""
        # Keep the pieces, because a retry of the upload reads them again.
        kept = list(pieces)
        content = Content(kept)
        hasher = ChunkHasher()
        for piece in kept:
            hasher.update(piece)
        target = object_name(self.name, name)
        if len(content) <= SMALL_BYTES:
            self._bucket.write(target, content[:])
        else:
            self._bucket.upload(target, content)
        self._sizes[name] = len(content)
        return hasher.record()

    def copy(self, name: str, entry: Entry) -> None:
        """Copy a file of another step."""
        try:
            self._bucket.copy(object_name(entry.name, name), object_name(self.name, name))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{name} of {entry.name} was deleted while it was copied: save again"
            ) from error

    def files(self) -> StepFiles:
        """Open the draft for reading."""
        return ObjectFiles(self._bucket, self.name, self._sizes)


class ObjectWriter:
    """The writer. Its object in `writers/` has the highest number."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lease = Lease.own()
        self._attempts = itertools.count(1)
        # Complete steps, by name. No other process changes them.
        self._entries: dict[str, Entry] = {}
        self._stop = threading.Event()
        with ExitStack() as resources:
            self._hold()
            resources.callback(self._let_go)
            self._number, left = self._begin()
            resources.callback(self._end)
            thread = threading.Thread(
                target=self._beat, name="hvdkit-checkpoint-lease", daemon=True
            )
            thread.start()
            resources.callback(thread.join)
            resources.callback(self._stop.set)
            self._commit_logged()
            self._delete_unfinished(left)
            self._delete_earlier_writers()
            commits = [each.manifest.commit for each in self.entries() if each.manifest]
            # Steps may have been copied from another store.
            self._commits = max(self._number, max(commits, default=0) // _COMMITS + 1) * _COMMITS
            self._resources = resources.pop_all()

    def check(self) -> None:
        """Check that there is no later writer."""
        self._lease.expect_own_process(self._bucket.url)
        newest = self._newest()
        if newest != self._number:
            found = self._bucket.read(_writer_object(newest), MAX_BYTES)
            raise taken_over(
                *(self._bucket.url, self._lease, Lease.parse(found), LEASE_TIMEOUT_SECONDS)
            )

    def entries(self) -> list[Entry]:
        """List all steps."""
        found = listing.file_sizes(self._bucket)
        steps = {name: files for name, files in found.items() if listing.exists(name, files)}
        entries = listing.scan(self._bucket, steps, self._entries)
        self._entries = {entry.name: entry for entry in entries if entry.error is None}
        return entries

    def next_run(self, entries: Sequence[Entry]) -> int:
        """Return a number for a new run."""
        there = map(listing.run_of, listing.file_sizes(self._bucket))
        return max([*there, *(entry.run for entry in entries)], default=0) + 1

    def draft(self, step: int, run: int) -> ObjectDraft:
        """Begin to write a step."""
        attempt = next(self._attempts)
        name = f"{step_name(step, run)}{self._suffix}{attempt}"
        return ObjectDraft(self._bucket, name, self._commits + attempt)

    def commit(self, draft: Draft) -> str:
        """Create the object that makes the step exist."""
        assert isinstance(draft, ObjectDraft)
        self.check()
        is_committed = self._commit(draft.name)
        # A later writer may not have listed this step.
        self.check()
        if not is_committed:
            raise taken_over(self._bucket.url, self._lease, None, LEASE_TIMEOUT_SECONDS)
        return draft.name

    def discard(self, draft: Draft) -> None:
        """Delete the objects of a draft, unless it was committed."""
        assert isinstance(draft, ObjectDraft)
        try:
            self._delete_unfinished([draft.name])
        except CheckpointError as error:
            self._log_left(error)  # the caller raises the error of the draft

    def delete(self, names: Sequence[str]) -> None:
        """Void the steps, and then delete their objects."""
        try:
            self.check()
            for name in names:
                self._bucket.write(object_name(name, COMMITTED), VOID)
                self._delete(name, listing.file_sizes(self._bucket, name)[name])
        except CheckpointError as error:
            if isinstance(error, WriterConflict):
                raise
            _log.warning("%s was not deleted yet: %s", ", ".join(names), error)

    def settle(self, name: str) -> str:
        """Return `name`: names are never reused."""
        return name

    def sweep(self) -> None:
        """Delete the unfinished steps of this writer, and the rest of deleted steps."""
        self._delete_unfinished()

    def close(self) -> None:
        """Let another process become the writer at once."""
        if os.getpid() == self._lease.pid:
            self._resources.close()

    @property
    def _suffix(self) -> str:
        """The end of the names of this writer's steps, except their number."""
        return f"-{self._lease.token[:8]}-"

    def _hold(self) -> None:
        with _held_guard:
            if self._bucket.identity in _held:
                raise WriterConflict(
                    f"{self._bucket.url} is already open for writing in this process; first close "
                    "the other Checkpointer of this URL."
                )
            _held.add(self._bucket.identity)

    def _let_go(self) -> None:
        with _held_guard:
            _held.discard(self._bucket.identity)

    def _begin(self) -> tuple[int, list[str]]:
        """Become the writer.

        Returns:
            The number of this writer; and the names of all steps before, unfinished ones included.
            No step of a later writer is among them.
        """
        url = self._bucket.url
        # Check first: a store without exclusive creation could overwrite the lease of another.
        self._bucket.expect_exclusive_create(f"writers/{self._lease.token}-probe")
        for _ in range(_ATTEMPTS):
            newest = self._newest()
            if newest:
                self._wait_for_death(_writer_object(newest))
            else:
                self._expect_convertible()
            left = list(listing.file_sizes(self._bucket))
            number = newest + 1
            if not self._bucket.create(_writer_object(number), self._lease.to_bytes(0)):
                continue
            newest = self._newest()
            if newest == number:
                return number, left
            if newest < number:
                raise CheckpointError(
                    f"the listings of {url} are outdated: {_writer_object(number)} was created, "
                    f"and is not listed. Expected a store that lists an object as soon as it "
                    f"exists. Use a store that is listed in docs/object-stores.md, or a folder."
                )
        raise conflict(url, None)

    def _newest(self) -> int:
        """Return the highest number of a writer; 0 if there was none."""
        matches = map(_WRITER.fullmatch, self._bucket.sizes("writers"))
        return max((int(match[1]) for match in matches if match), default=0)

    def _wait_for_death(self, name: str) -> None:
        """Return once the process that rewrites an object in `writers/` is known to be dead."""

        def read() -> bytes | None:
            content = self._bucket.read(name, MAX_BYTES)
            return None if content == VOID else content

        writer = Lease.parse(read())
        wait_for_death(self._bucket.url, self._lease, writer, read, LEASE_TIMEOUT_SECONDS)

    def _expect_convertible(self) -> None:
        """Check that this process may write to a store that no writer of this version has opened.

        Raises:
            WriterConflict: a writer of an earlier version is alive.
            CheckpointError: it is unknown which steps exist.
        """
        log = earlier.read(self._bucket)
        if log.problem is not None:
            raise CheckpointError(
                f"the newest record in the log of {self._bucket.url} is damaged: {log.problem}. "
                f"Only this record may list the newest step. To use the record before it, delete "
                f"the damaged one."
            )
        unknown = [
            name
            for name, files in listing.file_sizes(self._bucket).items()
            if manifest.NAME in files and COMMITTED not in files
        ]
        if unknown and not log.records:
            raise CheckpointError(
                f"{self._bucket.url} has {len(unknown)} steps of an earlier version of hvdkit, but "
                f"its log/ is empty or was deleted. Without the log it is unknown which steps are "
                f"good. Restore log/, or give another address."
            )
        if log.writer is not None:
            self._wait_for_death(f"writers/{log.writer.token}.json")

    def _commit_logged(self) -> None:
        """Commit the steps in the log of an earlier version, and delete the log.

        Raises:
            CheckpointError: a request failed. The next writer does the rest.
        """
        log = earlier.read(self._bucket)
        there = listing.file_sizes(self._bucket) if log.steps else {}
        for name in log.steps & there.keys():
            if COMMITTED not in there[name]:
                self._commit(name)
        # The oldest record first: the last one lists the steps.
        self._bucket.delete(log.records)

    def _commit(self, name: str) -> bool:
        """Make a step exist. Return False if it is void."""
        content = json.dumps(self._lease.fields()).encode()
        return self._bucket.create(object_name(name, COMMITTED), content)

    def _delete_unfinished(self, left: Collection[str] = ()) -> None:
        """Delete the objects of steps that do not exist. That a deletion failed is only logged.

        Do not touch drafts of other writers, except those in `left`: a later one may be live.

        Raises:
            CheckpointError: the steps cannot be listed.
        """
        there = listing.file_sizes(self._bucket)
        try:
            for name, files in there.items():
                if listing.exists(name, files):
                    continue
                is_final = COMMITTED in files
                if not is_final and (name in left or self._suffix in name):
                    is_final = self._bucket.create(object_name(name, COMMITTED), VOID)
                if is_final:
                    self._delete(name, files)
        except CheckpointError as error:
            self._log_left(error)

    def _log_left(self, error: CheckpointError) -> None:
        _log.warning("%s has objects that were not deleted yet: %s", self._bucket.url, error)

    def _delete(self, name: str, files: Iterable[str]) -> None:
        """Delete the objects of a void step."""
        _log.info("removing %s/%s", self._bucket.url, object_name(name, ""))
        # The void object last: a commit that arrives late must not succeed before.
        ordered = [*(set(files) - {COMMITTED}), COMMITTED]
        self._bucket.delete([object_name(name, file) for file in ordered])

    def _delete_earlier_writers(self) -> None:
        """Delete the objects of earlier writers. A failure is only logged."""
        try:
            names = [
                name
                for name in self._bucket.sizes("writers")
                if not (match := _WRITER.fullmatch(name)) or int(match[1]) < self._number
            ]
            self._bucket.delete(names)
        except CheckpointError as error:
            _log.warning("old heartbeats in %s were not deleted yet: %s", self._bucket.url, error)

    def _end(self) -> None:
        """Say that this writer has ended."""
        try:
            self._bucket.write(_writer_object(self._number), VOID)
        except CheckpointError as error:
            # The next writer on another host waits until the heartbeat counts as stopped.
            _log.warning("%s was not closed: %s", self._bucket.url, error)

    def _beat(self) -> None:
        beat, failing = 1, False
        while not self._stop.wait(BEAT_SECONDS):
            try:
                self._bucket.write_soon(_writer_object(self._number), self._lease.to_bytes(beat))
                failing = False
            except CheckpointError as error:
                if not failing:
                    _log.warning("cannot write the heartbeat in %s: %s", self._bucket.url, error)
                failing = True
            beat += 1


def _writer_object(number: int) -> str:
    return f"writers/{number:09d}.json"
