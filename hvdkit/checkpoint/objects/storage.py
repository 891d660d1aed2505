"""Steps in an object store: a step exists once the commit log lists it.

URL/log/00000000000000000042.json    the steps there are after 42 changes; see `log`
URL/steps/NAME/manifest.json, …      the files of one step, as in a folder
URL/steps/NAME/damaged.json          found damaged: not a step any more
URL/writers/TOKEN.json               heartbeat of the process that writes
URL/writers/TOKEN-probe-0.json       for a moment, to check that creation is exclusive

A store needs exclusive creation of objects (S3's If-None-Match), and nothing else: no rename, no
listing that is up to date. What a killed writer has uploaded is deleted by the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from hvdkit.checkpoint import manifest
from hvdkit.checkpoint.chunks import ChunkHasher, FileRecord
from hvdkit.checkpoint.errors import CheckpointError, Damaged, WriterConflict
from hvdkit.checkpoint.lease import Lease, conflict, taken_over, wait_for_death
from hvdkit.checkpoint.objects import log
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.objects.content import Content
from hvdkit.checkpoint.objects.log import Head, Listed, Record
from hvdkit.checkpoint.reading import open_file, read_manifest
from hvdkit.checkpoint.storage import Draft, Entry, StepFiles, in_commit_order, step_name

_log = logging.getLogger(__name__)

#: Seconds between two heartbeats, and without one until a writer counts as dead.
BEAT_SECONDS = 10.0
PATIENCE_SECONDS = 60.0

_NAME = re.compile(r"step-(\d{12})(?:-run(\d{1,9}))?-[0-9a-f]{8}-\d{1,9}")
_FILE = re.compile(r"steps/([^/]+)/([^/]+)")
_MARK = "damaged.json"

# Smaller objects are read and written in one piece.
_SMALL_BYTES = 1_000_000
# Bytes of a read, and how many are under way at once where an object is read front to back.
_BLOCK_BYTES = 8_000_000
_BLOCKS_AT_ONCE = 4

# How often an answer may be shorter than what was asked for.
_SHORT_READS = 3
# How often to look again after a live writer has changed what was listed.
_LOOKS = 10

#: Places that this process writes to.
_held: set[Hashable] = set()
_held_guard = threading.Lock()


class ObjectStorage:
    """Steps under a URL that fsspec knows."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Args:
            url: such as `s3://bucket/run`.
            options: for fsspec's file system.

        Raises:
            UsageError: fsspec is missing, or does not know such a URL.
        """
        self._bucket = Bucket(url, options)

    def __str__(self) -> str:
        return self._bucket.url

    def exists(self) -> bool:
        """Whether there is a log, or a step."""
        return bool(self._bucket.sizes("log") or self._bucket.sizes("steps"))

    def location(self, name: str) -> str:
        """The URL of a step."""
        return f"{self._bucket.url}/steps/{name}"

    def entries(self) -> list[Entry]:
        """List all steps."""
        for _ in range(_LOOKS):
            head = log.read_head(self._bucket)
            entries = _scan(self._bucket, head)
            known = {entry.name for entry in entries if entry.error is None}
            # What a live writer has deleted meanwhile is gone, and another step is there.
            if known == {each.name for each in head.steps} or log.read_head(self._bucket) == head:
                break
        else:
            return entries
        _expect_log(self._bucket, head)
        if head.steps and not entries and not self.quarantined():
            raise CheckpointError(
                f"the log of {self} lists {len(head.steps)} steps, and all their objects are gone. "
                f"Put them back; or delete what is left, to begin anew."
            )
        return entries

    def quarantined(self) -> list[str]:
        """List the names of steps that are marked as damaged."""
        sizes = _sizes(self._bucket)
        return [
            listed.name
            for listed in log.read_head(self._bucket).steps
            if _MARK in sizes[listed.name]
        ]

    def open_step(self, entry: Entry) -> StepFiles:
        """Open a step for reading."""
        return ObjectFiles(self._bucket, entry.name, _sizes(self._bucket, entry.name)[entry.name])

    def is_same(self, entry: Entry) -> bool:
        """Whether the log lists the step. No two steps have the same name."""
        listed = log.read_head(self._bucket).steps
        if all(each.name != entry.name for each in listed):
            return False
        files = _sizes(self._bucket, entry.name)[entry.name]
        return bool(files) and _MARK not in files

    def quarantine(self, entry: Entry) -> str | None:
        """Mark a step as damaged. The log stays as it is, because only the writer changes it."""
        if not self.is_same(entry):
            return None
        self._bucket.write(_object(entry.name, _MARK), b"{}")
        return entry.name

    def open_for_writing(self) -> ObjectWriter:
        """Append the first record of this process to the log, and sweep."""
        return ObjectWriter(self._bucket)


class ObjectFiles:
    """`StepFiles` of a step. Reading front to back reads ahead; small files are read once."""

    # A window is read by several requests at once.
    readers = 1

    def __init__(self, bucket: Bucket, name: str, sizes: Mapping[str, int] | None = None) -> None:
        """Args:
        bucket: where.
        name: of the step.
        sizes: of its files in bytes, as far as they are known.
        """
        self._bucket = bucket
        self._name = name
        self._known = dict(sizes or {})
        self._sizes: dict[str, int] = {}
        self._small: dict[str, bytes] = {}
        self._window = ("", 0, b"")

    def open(self, name: str) -> int:
        """Return the size of the file `name` in bytes."""
        size = self._known.get(name)
        if size is None:
            size = self._bucket.size(_object(self._name, name))
        if size is None:
            raise Damaged(name, "it is missing")
        self._sizes[name] = size
        return size

    def read_into(self, name: str, out: np.ndarray, offset: int) -> None:
        """Fill `out` from `offset` on."""
        size = self._sizes[name]
        if offset + out.size > size:
            raise Damaged(
                name, f"it ends at byte {size}, {offset + out.size - size} bytes too early"
            )
        done = 0
        while done < out.size:
            begin, content = self._read(name, offset + done, out.size - done, size)
            piece = content[offset + done - begin :][: out.size - done]
            out[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)

    def close(self) -> None:
        """Forget what was read."""
        self._small = {}
        self._window = ("", 0, b"")

    def _read(self, name: str, offset: int, wanted: int, size: int) -> tuple[int, memoryview]:
        """Return bytes around `offset`, and where they begin."""
        if size <= _SMALL_BYTES:
            if name not in self._small:
                self._small[name] = self._fetch(name, 0, size)
            return 0, memoryview(self._small[name])
        file, begin, content = self._window
        end = begin + len(content)
        if file != name or not begin <= offset < end:
            ahead = _BLOCKS_AT_ONCE * _BLOCK_BYTES if file == name and offset == end else wanted
            begin, end = offset, min(size, offset + max(ahead, wanted, _SMALL_BYTES))
            # The old window goes before the new one comes.
            self._window = ("", 0, b"")
            content = self._fetch(name, begin, end)
            self._window = (name, begin, content)
        return begin, memoryview(content)

    def _fetch(self, name: str, begin: int, end: int) -> bytes:
        ranges = [(at, min(end, at + _BLOCK_BYTES)) for at in range(begin, end, _BLOCK_BYTES)]
        for _ in range(_SHORT_READS):
            found = self._bucket.read_ranges(_object(self._name, name), ranges)
            if found is None:
                raise Damaged(name, "it is missing")
            content = b"".join(found)
            if len(content) == end - begin:
                break
        else:
            raise Damaged(
                name, f"bytes {begin} to {end} were asked for, and {len(content)} were read"
            )
        return content


class ObjectDraft:
    """Objects that no record of the log lists yet."""

    written = None

    def __init__(self, bucket: Bucket, listed: Listed) -> None:
        self.listed = listed
        self._bucket = bucket
        self._sizes: dict[str, int] = {}

    def write(self, name: str, pieces: Iterable[memoryview]) -> FileRecord:
        """Hash a file and upload it. An object that was uploaded is stored durably."""
        # An upload that is repeated reads them again.
        kept = list(pieces)
        content = Content(kept)
        hasher = ChunkHasher()
        for piece in kept:
            hasher.update(piece)
        target = _object(self.listed.name, name)
        if len(content) <= _SMALL_BYTES:
            self._bucket.write(target, content[:])
        else:
            self._bucket.upload(target, content)
        self._sizes[name] = len(content)
        return hasher.record()

    def copy(self, name: str, entry: Entry) -> None:
        """Let the store copy a file of another step."""
        try:
            self._bucket.copy(_object(entry.name, name), _object(self.listed.name, name))
        except FileNotFoundError as error:
            raise CheckpointError(f"{entry.name} has no {name} any more") from error

    def files(self) -> StepFiles:
        """Open the draft for reading."""
        return ObjectFiles(self._bucket, self.listed.name, self._sizes)


class ObjectWriter:
    """The writer in the newest record of the log."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._lease = Lease.own()
        self._head = Head()
        self._attempts = 0
        # Steps that a record may list which is still on its way; and that could not be deleted.
        self._unknown: set[str] = set()
        self._left: set[str] = set()
        # Steps that were found whole. No other process changes them.
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
        """Of the next record."""
        return self._head.number + 1

    def check(self) -> None:
        """Check that no other writer has appended a record."""
        self._lease.expect_own_process(self._bucket.url)
        self._expect_own_record()
        while (found := log.read(self._bucket, self.commit_number)) is not None:
            self._adopt(found)

    def entries(self) -> list[Entry]:
        """List all steps."""
        entries = _scan(self._bucket, self._head, self._entries)
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
        """Delete the objects of a draft, unless a record may list it."""
        assert isinstance(draft, ObjectDraft)
        name = draft.listed.name
        if name in self._unknown:
            self._left.add(name)
        else:
            self._delete([name])

    def delete(self, names: Sequence[str]) -> None:
        """Append a record without the steps, and delete their objects."""
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
        """Return `name`: names are never used twice."""
        return name

    def sweep(self) -> None:
        """Delete what this writer could not delete before."""
        listed = {each.name for each in self._head.steps}
        self._delete([name for name in self._left if name not in listed | self._unknown])

    def close(self) -> None:
        """Append the last record."""
        if os.getpid() == self._lease.pid:
            self._resources.close()

    def _hold(self) -> None:
        with _held_guard:
            if self._bucket.identity in _held:
                raise WriterConflict(
                    f"{self._bucket.url} is open for writing in this process already; close that "
                    "writer first."
                )
            _held.add(self._bucket.identity)

    def _let_go(self) -> None:
        with _held_guard:
            _held.discard(self._bucket.identity)

    def _begin(self) -> list[str]:
        """Append a record with the same steps and this writer.

        Returns:
            The names of steps that others have left unlisted.
        """
        url = self._bucket.url
        # Before anything is created in the log: the store could overwrite a record.
        self._bucket.expect_exclusive_create(f"writers/{self._lease.token}-probe")
        for _ in range(_LOOKS):
            head = log.read_head(self._bucket)
            if head.record is not None and head.record.is_open:
                writer = head.record.writer
                wait_for_death(
                    *(url, self._lease, writer, partial(self._read_heartbeat, writer)),
                    PATIENCE_SECONDS,
                )
            sizes = _sizes(self._bucket)
            there = [each for each in head.steps if not _is_gone(self._bucket, each, sizes)]
            there += self._lost(head, sizes)
            record = Record(head.number + 1, self._lease, tuple(there))
            if log.append(self._bucket, record):
                break
        else:
            raise conflict(url, None)
        self._head = Head(record.number, record)
        # Every other writer is replaced by now: what is not listed, it has left behind.
        return [name for name in sizes if name not in {each.name for each in there}]

    def _lost(self, head: Head, sizes: Mapping[str, Mapping[str, int]]) -> list[Listed]:
        """The steps that damaged records at the end of the log have listed, and no other has.

        Raises:
            CheckpointError: there are steps, and no record at all.
        """
        _expect_log(self._bucket, head)
        if head.is_whole:
            return []
        names = {each.name for each in head.steps}
        found = []
        for name in sizes.keys() - names:
            step, run = _parsed(name)
            entry = _look(self._bucket, Listed(name, step, run), sizes[name])
            if entry.manifest is None and not isinstance(entry.error, Damaged):
                raise CheckpointError(f"{name} in {self._bucket.url}: {entry.error}")
            # A draft that was not committed has the number of another record, or a later one.
            if entry.manifest and _readable(head) < entry.manifest.commit <= head.number:
                found.append(Listed(name, step, run))
        return found

    def _end(self) -> None:
        """Append a record that lets the next writer begin at once, and delete the heartbeat."""
        try:
            record = Record(self.commit_number, self._lease, self._head.steps, is_open=False)
            self._expect_own_record()
            if not log.append(self._bucket, record):
                # Another writer's, or one of this that is late: then the next one waits a little.
                self.check()
            self._bucket.delete([_heartbeat_object(self._lease)])
        except CheckpointError as error:
            # The next writer on another host waits until it sees that nobody changes the sign.
            _log.warning("%s was not closed: %s", self._bucket.url, error)

    def _expect_own_record(self) -> None:
        """Check that no other writer has gone on so far that it has deleted this one's record.

        Raises:
            WriterConflict: it has.
        """
        if self._bucket.size(log.name_of(self._head.number)) is None:
            raise taken_over(self._bucket.url, self._lease, None, PATIENCE_SECONDS)

    def _append(
        self,
        change: Callable[[tuple[Listed, ...]], tuple[Listed, ...]],
        number: int | None = None,
    ) -> None:
        """Append a record.

        Args:
            change: gives the new steps for the old ones.
            number: the number that it must get.

        Raises:
            WriterConflict: another writer has appended one.
            CheckpointError: it is not known whether the record exists.
        """
        while True:
            record = Record(self.commit_number, self._lease, change(self._head.steps))
            if number not in (None, record.number):
                raise CheckpointError(
                    f"an earlier save to {self._bucket.url}, which had failed, was completed late; "
                    "save once more."
                )
            if log.append(self._bucket, record):
                break
            self.check()
        try:
            self._expect_own_record()
        except WriterConflict:
            # The number was free because the other writer has deleted its record of it, too. Or
            # that writer has taken the record over, with the step: its objects stay.
            with contextlib.suppress(CheckpointError):
                self._bucket.delete([log.name_of(record.number)])
            raise
        self._head = Head(record.number, record)
        self._unknown.clear()
        if record.number % log.KEPT_RECORDS == 0:
            log.trim(self._bucket, record.number)

    def _adopt(self, record: Record) -> None:
        """Take over a record of this writer whose answer was lost.

        Raises:
            WriterConflict: it is another writer's.
        """
        self._unknown.clear()
        if record.writer.token != self._lease.token:
            raise taken_over(self._bucket.url, self._lease, record.writer, PATIENCE_SECONDS)
        self._head = Head(record.number, record)

    def _delete(self, names: Sequence[str]) -> None:
        """Delete the objects of steps that are not listed. A failure only warns."""
        self._left.update(names)
        for name in names:
            try:
                files = [_object(name, file) for file in _sizes(self._bucket, name)[name]]
                _log.info("removing %s/%s", self._bucket.url, _object(name, ""))
                self._bucket.delete(files)
                self._left.discard(name)
            except CheckpointError as error:
                _log.warning("%s stays for now: %s", _object(name, ""), error)
                return

    def _read_heartbeat(self, writer: Lease) -> bytes:
        return self._bucket.read(_heartbeat_object(writer)) or b""

    def _delete_heartbeats(self) -> None:
        """Delete those of dead writers."""
        try:
            names = [
                name
                for name in self._bucket.sizes("writers")
                if name != _heartbeat_object(self._lease)
            ]
            self._bucket.delete(names)
        except CheckpointError as error:
            _log.warning("old signs of life in %s stay for now: %s", self._bucket.url, error)

    def _beat(self) -> None:
        beat, failing = 0, False
        while True:
            try:
                self._bucket.write_soon(_heartbeat_object(self._lease), self._lease.to_bytes(beat))
                failing = False
            except CheckpointError as error:
                if not failing:
                    _log.warning("no sign of life in %s: %s", self._bucket.url, error)
                failing = True
            beat += 1
            if self._stop.wait(BEAT_SECONDS):
                return


def _readable(head: Head) -> int:
    return 0 if head.record is None else head.record.number


def _parsed(name: str) -> tuple[int, int]:
    """The step and the run that a name tells."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _scan(bucket: Bucket, head: Head, known: Mapping[str, Entry] | None = None) -> list[Entry]:
    """All steps that the log lists and that are not marked as damaged.

    Args:
        bucket: where.
        head: of the log.
        known: steps whose manifest need not be read, by name.
    """
    sizes = _sizes(bucket)
    return in_commit_order(
        (known or {}).get(listed.name) or _look(bucket, listed, sizes[listed.name])
        for listed in head.steps
        if _MARK not in sizes[listed.name] and not _is_gone(bucket, listed, sizes)
    )


def _look(bucket: Bucket, listed: Listed, sizes: Mapping[str, int]) -> Entry:
    found = None
    problem: CheckpointError | None = None
    files = ObjectFiles(bucket, listed.name, sizes)
    try:
        found = read_manifest(files, listed.step)
        for file, record in found.files.items():
            open_file(files, file, record)
    except CheckpointError as error:
        problem = error
    return Entry(listed.name, listed.step, listed.run, listed.name, found, problem)


def _expect_log(bucket: Bucket, head: Head) -> None:
    """Check that a log lists the steps, if there are any.

    Raises:
        CheckpointError: there are steps, and no log.
    """
    if head.record is None:
        steps = [name for name, files in _sizes(bucket).items() if manifest.NAME in files]
        if steps:
            raise CheckpointError(
                f"{bucket.url} has {len(steps)} steps, and its log/ is empty or was deleted, so it "
                f"is not known which of them are good. Put log/ back, or give another address."
            )


def _is_gone(bucket: Bucket, listed: Listed, sizes: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether all objects of a listed step were deleted by hand."""
    return not sizes[listed.name] and bucket.size(_object(listed.name, manifest.NAME)) is None


def _sizes(bucket: Bucket, step: str = "") -> dict[str, dict[str, int]]:
    """Step -> file -> size in bytes, of all that is under `steps/`, or of one step."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in bucket.sizes(f"steps/{step}".rstrip("/")).items():
        if (match := _FILE.fullmatch(name)) and _NAME.fullmatch(match[1]):
            found[match[1]][match[2]] = size
    return found


def _object(step: str, file: str) -> str:
    return f"steps/{step}/{file}"


def _heartbeat_object(writer: Lease) -> str:
    return f"writers/{writer.token}.json"
