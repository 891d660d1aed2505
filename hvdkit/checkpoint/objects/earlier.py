"""The log of a store that an earlier version of hvdkit wrote. The next writer deletes the log.

    log/00000000000000000042.json   {"writer": …, "open": …, "steps": [{"name": …}, …]}

The record with the highest number lists all steps of the store.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from hvdkit.checkpoint import manifest
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.lease import Lease
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.system.plain_files import whole

_log = logging.getLogger(__name__)

_RECORD = re.compile(r"log/(\d{20})\.json")


@dataclass(frozen=True)
class Log:
    """The newest readable record of a log.

    Attributes:
        records: the names of all records, oldest first.
        steps: the names of the steps.
        writer: the process that wrote the record; None if it has ended.
        problem: why a newer record is unreadable.
    """

    records: tuple[str, ...] = ()
    steps: frozenset[str] = frozenset()
    writer: Lease | None = None
    problem: Damaged | None = None


def read(bucket: Bucket) -> Log:
    """Read the log. It is empty in a store of this version.

    Raises:
        CheckpointError: no record is readable.
    """
    sizes = bucket.sizes("log")
    records = tuple(sorted(name for name in sizes if _RECORD.fullmatch(name)))
    problem = None
    for name in reversed(records):
        try:
            content = bucket.read(name, manifest.MAX_MANIFEST_BYTES, sizes[name])
            if content is None:
                continue  # A writer deletes the log.
            steps, writer = _parsed(name, content)
        except Damaged as error:
            problem = problem or error
            continue
        if problem is not None:
            _log.warning(
                "the newest record in the log of %s is damaged (%s); using the previous one",
                *(bucket.url, problem),
            )
        return Log(records, steps, writer, problem)
    if problem is not None:
        raise CheckpointError(
            f"all records in the log of {bucket.url} are damaged: {problem}. Save to another URL."
        ) from problem
    return Log()


def _parsed(name: str, content: bytes) -> tuple[frozenset[str], Lease | None]:
    fields = manifest.unsealed(name, content, "hvdkit checkpoint log", (1,))
    try:
        if name != f"log/{whole(fields['number']):020d}.json":
            raise ValueError(f"it is record {fields['number']}")
        writer = Lease.from_fields(fields["writer"])
        steps = frozenset(str(each["name"]) for each in fields["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(name, f"it has wrong entries ({error})") from error
    return steps, writer if fields.get("open") else None
