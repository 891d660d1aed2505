"""The commit log of an object store: numbered records, each created exclusively.

A record lists all steps there are. The one with the highest number counts. Every change of the
listing creates the next number, which fails if another writer has created it: so a writer that was
replaced changes nothing more. The writer in the newest record is the one that may go on.

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

_log = logging.getLogger(__name__)

_FORMAT, _VERSION = "hvdkit checkpoint log", 1
_NAME = re.compile(r"log/(\d{20})\.json")

#: Older records are deleted. A reader with an old listing finds the newest from any of these. A
#: replaced writer is told by the next number; after so many commits, by its own record being gone.
KEPT_RECORDS = 100

# How often to look again after a live writer has deleted the record that was listed.
_LOOKS = 10


@dataclass(frozen=True)
class Listed:
    """A step in the log."""

    name: str
    step: int
    run: int


@dataclass(frozen=True)
class Record:
    """The listing after one change.

    Attributes:
        number: of the record.
        writer: which process made it.
        steps: all that exist, oldest first.
        is_open: whether that process goes on to write. False in its last record.
    """

    number: int
    writer: Lease
    steps: tuple[Listed, ...]
    is_open: bool = True

    def to_bytes(self) -> bytes:
        """The content of the object. No two calls give the same."""
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
        """Read what `to_bytes` has given, checking all of it.

        Raises:
            Damaged: it is not that.
            CheckpointError: it is of a later version of hvdkit.
        """
        fields = manifest.unsealed(name, data, _FORMAT, (_VERSION,))
        try:
            return cls(
                int(fields["number"]),
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
        number: the highest there is; 0 in an empty log.
        record: the newest readable one; None in an empty log.
    """

    number: int = 0
    record: Record | None = None

    @property
    def steps(self) -> tuple[Listed, ...]:
        """The steps that exist."""
        return () if self.record is None else self.record.steps

    @property
    def is_whole(self) -> bool:
        """Whether the newest record is readable."""
        return self.number == (0 if self.record is None else self.record.number)


def read_head(bucket: Bucket) -> Head:
    """Find the newest record.

    Raises:
        CheckpointError: the log cannot be read; or none of its records is whole.
    """
    for _ in range(_LOOKS):
        names = bucket.sizes("log")
        numbers = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
        if not numbers:
            # The listing of a new log may be behind.
            if bucket.read(name_of(1)) is None:
                return Head()
            numbers = [1]
        while bucket.read(name_of(numbers[-1] + 1)) is not None:
            numbers.append(numbers[-1] + 1)
        problem: CheckpointError | None = None
        for number in reversed(numbers):
            content = bucket.read(name_of(number))
            if content is None:
                continue
            try:
                record = Record.from_bytes(name_of(number), content)
            except Damaged as error:
                problem = problem or error
                continue
            if problem is not None:
                _log.warning(
                    "the newest listing of %s is damaged (%s); the one before it is used",
                    *(bucket.url, problem),
                )
            return Head(numbers[-1], record)
        if problem is not None:
            raise CheckpointError(
                f"no listing of the steps in {bucket.url} is whole: {problem}. Give another folder."
            ) from problem
    raise CheckpointError(
        f"the log of {bucket.url} changes faster than it can be read; try again later."
    )


def read(bucket: Bucket, number: int) -> Record | None:
    """Read a record; None if there is none with this number.

    Raises:
        Damaged: it is not as it was written.
        CheckpointError: it cannot be read.
    """
    content = bucket.read(name_of(number))
    return None if content is None else Record.from_bytes(name_of(number), content)


def append(bucket: Bucket, record: Record) -> bool:
    """Create a record. False if there is another one with its number.

    Raises:
        CheckpointError: it is not known whether the record exists.
    """
    return bucket.create(name_of(record.number), record.to_bytes())


def trim(bucket: Bucket, newest: int) -> None:
    """Delete records that nobody needs. A failure only warns."""
    try:
        bucket.delete(
            [
                name
                for name in bucket.sizes("log")
                if (match := _NAME.fullmatch(name)) and int(match[1]) <= newest - KEPT_RECORDS
            ]
        )
    except CheckpointError as error:
        _log.warning("old records of the log stay for now: %s", error)


def name_of(number: int) -> str:
    """The name of a record's object."""
    return f"log/{number:020d}.json"


def _listed(fields: dict[str, Any]) -> Listed:
    name = fields["name"]
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9-]{1,100}", name):
        raise ValueError(f"{name!r:.40} is no name of a step")
    return Listed(name, int(fields["step"]), int(fields["run"]))
