"""The writer of an object store: it appends records to the commit log.

A thread renews the writer's heartbeat. If the heartbeat stops, another process can become the
writer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack

from hvdkit.checkpoint.chunks import ChunkHasher, FileRecord
from hvdkit.checkpoint.errors import CheckpointError, Damaged, WriterConflict
from hvdkit.checkpoint.lease import MAX_BYTES, Lease, conflict, taken_over, wait_for_death
from hvdkit.checkpoint.objects import listing, log
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.objects.content import Content
from hvdkit.checkpoint.objects.files import SMALL_BYTES, ObjectFiles, object_name
from hvdkit.checkpoint.objects.log import Head, Listed, Record
from hvdkit.checkpoint.storage import Draft, Entry, StepFiles, step_name

_log = logging.getLogger(__name__)

#: Seconds between two heartbeats.
BEAT_SECONDS = 10.0
#: Seconds without a heartbeat after which a writer is considered dead.
LEASE_TIMEOUT_SECONDS = 60.0

#: URLs and options of the stores that this process writes to.
_held: set[Hashable] = set()
_held_guard = threading.Lock()


class ObjectDraft:
    """The objects of a step that the log does not list yet."""

    written = None

    def __init__(self, bucket: Bucket, listed: Listed) -> None:
        self.listed = listed
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
        target = object_name(self.listed.name, name)
        if len(content) <= SMALL_BYTES:
            self._bucket.write(target, content[:])
        else:
            self._bucket.upload(target, content)
        self._sizes[name] = len(content)
        return hasher.record()

    def copy(self, name: str, entry: Entry) -> None:
        """Copy a file of another step."""
        try:
            self._bucket.copy(object_name(entry.name, name), object_name(self.listed.name, name))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{name} of {entry.name} was deleted while it was copied: save again"
            ) from error

    def files(self) -> StepFiles:
        """Open the draft for reading."""
        return ObjectFiles(self._bucket, self.listed.name, self._sizes)


class ObjectWriter:
    """The writer. The newest record of the log names it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lease = Lease.own()
        self._head = Head()
        self._attempts = 0
        # Steps whose record may exist or not, because the request to create the record failed.
        self._unknown: set[str] = set()
        # Steps whose objects could not be deleted.
        self._left: set[str] = set()
        # Complete steps, by name. No other process changes them.
        self._entries: dict[str, Entry] = {}
        self._stop = threading.Event()
        with ExitStack() as resources:
            self._hold()
            resources.callback(self._let_go)
            left = self._begin()
            resources.callback(self._end)
            thread = threading.Thread(
                target=self._beat, name="hvdkit-checkpoint-lease", daemon=True
            )
            thread.start()
            resources.callback(thread.join)
            resources.callback(self._stop.set)
            self._delete(left)
            self._delete_heartbeats()
            if self._head.number > log.KEPT_RECORDS:
                log.trim(bucket, self._head.number)
            self._resources = resources.pop_all()

    @property
    def commit_number(self) -> int:
        """The commit number of the next record."""
        return self._head.number + 1

    def check(self) -> None:
        """Check that no other writer has appended a record."""
        self._lease.expect_own_process(self._bucket.url)
        self._expect_own_record()
        while (found := log.read(self._bucket, self.commit_number)) is not None:
            self._adopt(found)

    def entries(self) -> list[Entry]:
        """List all steps."""
        entries = listing.scan(self._bucket, self._head, self._entries)
        self._entries = {entry.name: entry for entry in entries if entry.error is None}
        return entries

    def next_run(self, entries: Sequence[Entry]) -> int:
        """Return a number for a new run."""
        listed = [each.run for each in self._head.steps]
        return max([*listed, *(entry.run for entry in entries)], default=0) + 1

    def draft(self, step: int, run: int) -> ObjectDraft:
        """Begin to write a step."""
        self._attempts += 1
        name = f"{step_name(step, run)}-{self._lease.token[:8]}-{self._attempts}"
        return ObjectDraft(self._bucket, Listed(name, step, run))

    def commit(self, draft: Draft) -> str:
        """Append a record that lists the step."""
        assert isinstance(draft, ObjectDraft)
        listed = draft.listed
        self._unknown.add(listed.name)
        self._append(lambda steps: (*steps, listed), self.commit_number)
        return listed.name

    def discard(self, draft: Draft) -> None:
        """Delete the objects of a draft, unless a record that may exist lists the draft."""
        assert isinstance(draft, ObjectDraft)
        name = draft.listed.name
        if name in self._unknown:
            self._left.add(name)
        else:
            self._delete([name])

    def delete(self, names: Sequence[str]) -> None:
        """Append a record without the steps, and then delete their objects."""
        try:
            self._append(lambda steps: tuple(each for each in steps if each.name not in names))
        except CheckpointError as error:
            if isinstance(error, WriterConflict):
                raise
            self._left.update(names)
            _log.warning("%s could not be deleted: %s", ", ".join(names), error)
            return
        self._delete(names)

    def settle(self, name: str) -> str:
        """Return `name`: names are never reused."""
        return name

    def sweep(self) -> None:
        """Try again to delete objects that this writer failed to delete."""
        listed = {each.name for each in self._head.steps}
        self._delete([name for name in self._left if name not in listed | self._unknown])

    def close(self) -> None:
        """Append a record that ends this writer."""
        if os.getpid() == self._lease.pid:
            self._resources.close()

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

    def _begin(self) -> list[str]:
        """Append a record with the same steps and this writer.

        Returns:
            The names of unlisted steps that other writers have left.
        """
        url = self._bucket.url
        # Check first: a store without exclusive creation could overwrite a record.
        self._bucket.expect_exclusive_create(f"writers/{self._lease.token}-probe")
        for _ in range(listing.LIST_ATTEMPTS):
            head = log.read_head(self._bucket)
            if head.record is not None and head.record.is_open:
                writer = head.record.writer
                heartbeat = self._heartbeat_reader(writer)
                wait_for_death(url, self._lease, writer, heartbeat, LEASE_TIMEOUT_SECONDS)
            sizes = listing.file_sizes(self._bucket)
            there = [each for each in head.steps if not listing.is_gone(self._bucket, each, sizes)]
            there += self._lost(head, sizes)
            record = Record(head.number + 1, self._lease, tuple(there))
            if log.append(self._bucket, record):
                break
        else:
            raise conflict(url, None)
        self._head = Head(record.number, record)
        # All other writers are replaced now, so unlisted steps are leftovers.
        return [name for name in sizes if name not in {each.name for each in there}]

    def _lost(self, head: Head, sizes: Mapping[str, Mapping[str, int]]) -> list[Listed]:
        """Return steps that only a damaged record at the end of the log may have listed.

        Raises:
            CheckpointError: there are steps and no records.
        """
        listing.expect_log(self._bucket, head)
        if head.is_whole:
            return []
        names = {each.name for each in head.steps}
        found = []
        for name in sizes.keys() - names:
            step, run = listing.parsed(name)
            entry = listing.look(self._bucket, Listed(name, step, run), sizes[name])
            if entry.manifest is None and not isinstance(entry.error, Damaged):
                raise CheckpointError(f"{name} in {self._bucket.url}: {entry.error}")
            # The lost records have the numbers between the last readable one and the head. A draft
            # that was never committed has another number in its manifest: that of a record which
            # another writer created in its place, or a number after the head.
            if entry.manifest and _readable(head) < entry.manifest.commit <= head.number:
                found.append(Listed(name, step, run))
        return found

    def _end(self) -> None:
        """Append a record that ends this writer, and delete the heartbeat."""
        try:
            record = Record(self.commit_number, self._lease, self._head.steps, is_open=False)
            self._expect_own_record()
            if not log.append(self._bucket, record):
                # Another writer has created this record, which `check` reports. Or it is an
                # earlier record of this writer that arrived late. Then no record says that this
                # writer has ended, so the next writer waits until it counts as dead.
                self.check()
            self._bucket.delete([_heartbeat_object(self._lease)])
        except CheckpointError as error:
            # The next writer on another host waits until the heartbeat counts as stopped.
            _log.warning("%s was not closed: %s", self._bucket.url, error)

    def _expect_own_record(self) -> None:
        """Check that the newest record of this writer still exists.

        Raises:
            WriterConflict: the record was trimmed, because another writer has appended many
                records.
        """
        if self._bucket.size(log.name_of(self._head.number)) is None:
            raise taken_over(self._bucket.url, self._lease, None, LEASE_TIMEOUT_SECONDS)

    def _append(
        self,
        change: Callable[[tuple[Listed, ...]], tuple[Listed, ...]],
        number: int | None = None,
    ) -> None:
        """Append a record.

        Args:
            change: returns the new steps for the old ones.
            number: the number that the record must get; None: any.

        Raises:
            WriterConflict: another writer has appended a record.
            CheckpointError: it is unknown whether the record exists.
        """
        while True:
            record = Record(self.commit_number, self._lease, change(self._head.steps))
            if number not in (None, record.number):
                raise CheckpointError(
                    f"an earlier save to {self._bucket.url}, which had failed, was completed late. "
                    "Save again."
                )
            if log.append(self._bucket, record):
                break
            self.check()
        try:
            self._expect_own_record()
        except WriterConflict:
            # The other writer may have trimmed its own record with this number, so delete this one.
            # Do not delete the step's objects: the other writer may have read this record, and
            # listed the step.
            with contextlib.suppress(CheckpointError):
                self._bucket.delete([log.name_of(record.number)])
            raise
        self._head = Head(record.number, record)
        self._unknown.clear()
        if record.number % log.KEPT_RECORDS == 0:
            log.trim(self._bucket, record.number)

    def _adopt(self, record: Record) -> None:
        """Accept a record that this writer has created, although the store's reply was lost.

        Raises:
            WriterConflict: the record is another writer's.
        """
        self._unknown.clear()
        if record.writer.token != self._lease.token:
            raise taken_over(self._bucket.url, self._lease, record.writer, LEASE_TIMEOUT_SECONDS)
        self._head = Head(record.number, record)

    def _delete(self, names: Sequence[str]) -> None:
        """Delete the objects of unlisted steps. A failure is only logged."""
        self._left.update(names)
        for name in names:
            try:
                files = [
                    object_name(name, file) for file in listing.file_sizes(self._bucket, name)[name]
                ]
                _log.info("removing %s/%s", self._bucket.url, object_name(name, ""))
                self._bucket.delete(files)
                self._left.discard(name)
            except CheckpointError as error:
                _log.warning("%s was not deleted yet: %s", object_name(name, ""), error)
                return

    def _heartbeat_reader(self, writer: Lease) -> Callable[[], bytes | None]:
        """Return a function that reads the heartbeat of `writer`.

        It returns b"" until there is a heartbeat, because a writer appends its record first. It
        returns None after the heartbeat was deleted: the writer has ended, or was replaced. Then
        the next record exists already, so this process cannot create it.
        """
        found = False

        def read() -> bytes | None:
            nonlocal found
            content = self._bucket.read(_heartbeat_object(writer), MAX_BYTES)
            found = found or content is not None
            return content if found else b""

        return read

    def _delete_heartbeats(self) -> None:
        """Delete the heartbeats of dead writers."""
        try:
            names = [
                name
                for name in self._bucket.sizes("writers")
                if name != _heartbeat_object(self._lease)
            ]
            self._bucket.delete(names)
        except CheckpointError as error:
            _log.warning("old heartbeats in %s were not deleted yet: %s", self._bucket.url, error)

    def _beat(self) -> None:
        beat, failing = 0, False
        while True:
            try:
                self._bucket.write_soon(_heartbeat_object(self._lease), self._lease.to_bytes(beat))
                failing = False
            except CheckpointError as error:
                if not failing:
                    _log.warning("cannot write the heartbeat in %s: %s", self._bucket.url, error)
                failing = True
            beat += 1
            if self._stop.wait(BEAT_SECONDS):
                return


def _readable(head: Head) -> int:
    return 0 if head.record is None else head.record.number


def _heartbeat_object(writer: Lease) -> str:
    return f"writers/{writer.token}.json"
