"""The commit log of an object store: numbered records, each created exclusively.

A record lists all steps; the record with the highest number is the current list. Each change of
the list creates the next record. The creation fails if another writer has created a record with the
same number, so a replaced writer cannot change the list. The newest record names the process that
is the writer.

    log/00000000000000000042.json   {"writer": …, "steps": [{"name": …, "step": …, "run": …}]}
"""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass
from typing import Any

from hvdkit.checkpoint import manifest
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.lease import Lease
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.plain_files import whole

_log = logging.getLogger(__name__)

_FORMAT, _VERSION = "hvdkit checkpoint log", 1
# At most 10^18 - 1: all numbers of records and commits have less than 64 bits.
_NAME = re.compile(r"log/00(\d{18})\.json")

#: The number of records to keep. A reader with an outdated listing begins at one of these records
#: and reads on to the newest. A replaced writer finds that the next record exists, or that its own
#: record was deleted.
KEPT_RECORDS = 100

# How often to list again after a live writer has deleted a record.
_LIST_ATTEMPTS = 10


@dataclass(frozen=True)
class Listed:
    """A step in the log."""

    name: str
    step: int
    run: int


@dataclass(frozen=True)
class Record:
    """The list of steps after one change.

    Attributes:
        number: the number of the record.
        writer: the process that created it.
        steps: all steps, oldest first.
        is_open: whether `writer` is still the writer; False in its last record.
    """

    number: int
    writer: Lease
    steps: tuple[Listed, ...]
    is_open: bool = True

    def to_bytes(self) -> bytes:
        """Return the content of the object. It has a random ID, so no two results are equal."""
        return manifest.sealed(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "number": self.number,
                "id": secrets.token_hex(8),
                "writer": self.writer.fields(),
                "open": self.is_open,
                "steps": [vars(listed) for listed in self.steps],
            }
        )

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> Record:
        """Parse and check the result of `to_bytes`.

        Raises:
            Damaged: the record is not valid.
            CheckpointError: a later version of hvdkit wrote the record.
        """
        fields = manifest.unsealed(name, data, _FORMAT, (_VERSION,))
        try:
            return cls(
                whole(fields["number"]),
                Lease.from_fields(fields["writer"]),
                tuple(_listed(each) for each in fields["steps"]),
                bool(fields["open"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(name, f"it has wrong entries ({error})") from error


@dataclass(frozen=True)
class Head:
    """The end of the log.

    Attributes:
        number: the highest number of a record; 0 in an empty log.
        record: the newest valid record; None in an empty log.
    """

    number: int = 0
    record: Record | None = None

    @property
    def steps(self) -> tuple[Listed, ...]:
        """The listed steps."""
        return () if self.record is None else self.record.steps

    @property
    def is_whole(self) -> bool:
        """Whether the record with the highest number is valid."""
        return self.number == (0 if self.record is None else self.record.number)


def read_head(bucket: Bucket) -> Head:
    """Find the newest record.

    The records have numbers without gaps. So an object with a higher number is not part of the log
    if the number before it is missing.

    Raises:
        CheckpointError: the log cannot be read, or none of its records is valid.
    """
    for _ in range(_LIST_ATTEMPTS):
        sizes = bucket.sizes("log")
        numbers = sorted(int(match[1]) for name in sizes if (match := _NAME.fullmatch(name)))
        problem: CheckpointError | None = None
        # The listing may be outdated and lack the first record.
        for number in reversed(numbers or [1]):
            try:
                record = _read(bucket, number, sizes.get(name_of(number)))
            except Damaged as error:
                problem = problem or error
                continue
            if record is not None:
                return _read_on(bucket, record, problem)
        if problem is not None:
            raise CheckpointError(
                f"all records in the log of {bucket.url} are damaged: {problem}. Save to another "
                f"URL."
            ) from problem
        if not numbers:
            return Head()
    raise CheckpointError(
        f"the log of {bucket.url} changes faster than it can be read; try again later."
    )


def _read_on(bucket: Bucket, record: Record, problem: CheckpointError | None) -> Head:
    """Return the end of the log, to which a record belongs.

    Args:
        bucket: where the log is.
        record: the newest valid record that is listed. The listing may be outdated.
        problem: of the first damaged record that is listed after it.
    """
    newest = record.number
    while newest < record.number + KEPT_RECORDS:
        try:
            found = _read(bucket, newest + 1)
        except Damaged as error:
            problem = problem or error
        else:
            if found is None:
                break
            record, problem = found, None
        newest += 1
    else:
        raise CheckpointError(
            f"{bucket.url} has more than {KEPT_RECORDS} records in its log that are not listed; "
            f"expected fewer, because older ones are deleted. Check the address: a proxy may "
            f"answer in place of the store."
        )
    if problem is not None:
        _log.warning(
            "the newest record in the log of %s is damaged (%s); using the previous one",
            *(bucket.url, problem),
        )
    return Head(newest, record)


def read(bucket: Bucket, number: int) -> Record | None:
    """Read a record; None if it does not exist.

    Raises:
        Damaged: the record is damaged.
        CheckpointError: the record cannot be read.
    """
    return _read(bucket, number)


def _read(bucket: Bucket, number: int, size: int | None = None) -> Record | None:
    name = name_of(number)
    content = bucket.read(name, manifest.MAX_MANIFEST_BYTES, size)
    if content is None:
        return None
    record = Record.from_bytes(name, content)
    if record.number != number:
        raise Damaged(name, f"it is record {record.number}")
    return record


def append(bucket: Bucket, record: Record) -> bool:
    """Create a record. Return False if another record with its number exists.

    Raises:
        CheckpointError: the request failed, and the record may exist or not.
    """
    return bucket.create(name_of(record.number), record.to_bytes())


def trim(bucket: Bucket, newest: int) -> None:
    """Delete records that are no longer needed. A failure is only logged."""
    try:
        bucket.delete(
            [
                name
                for name in bucket.sizes("log")
                if (match := _NAME.fullmatch(name)) and int(match[1]) <= newest - KEPT_RECORDS
            ]
        )
    except CheckpointError as error:
        _log.warning("old records of the log were not deleted yet: %s", error)


def name_of(number: int) -> str:
    """Return the name of a record's object."""
    return f"log/{number:020d}.json"


def _listed(fields: dict[str, Any]) -> Listed:
    name = fields["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9-]{1,100}", name):
        raise ValueError(f"{name!r:.40} is not the name of a step")
    return Listed(name, whole(fields["step"]), whole(fields["run"]))
