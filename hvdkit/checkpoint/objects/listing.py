"""List the steps in an object store: the steps of the commit log, and the objects of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from hvdkit.checkpoint import manifest
from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.objects.files import ObjectFiles, object_name
from hvdkit.checkpoint.objects.log import Head, Listed
from hvdkit.checkpoint.reading import open_file, read_manifest
from hvdkit.checkpoint.storage import Entry, bounded, in_commit_order

#: The file that marks a damaged step.
MARK = "damaged.json"
#: How often to list again after a live writer has changed the list.
LIST_ATTEMPTS = 10

_NAME = re.compile(r"step-(\d{12})(?:-run(\d{1,9}))?-[0-9a-f]{8}-\d{1,9}")
_FILE = re.compile(r"steps/([^/]+)/([^/]+)")


def scan(bucket: Bucket, head: Head, known: Mapping[str, Entry] | None = None) -> list[Entry]:
    """Return all listed steps that are not marked as damaged.

    Args:
        bucket: where the steps are.
        head: the end of the log.
        known: name -> entry, for steps whose manifest need not be read.
    """
    sizes = file_sizes(bucket)
    found = (
        (known or {}).get(listed.name) or look(bucket, listed, sizes[listed.name])
        for listed in head.steps
        if MARK not in sizes[listed.name] and not is_gone(bucket, listed, sizes)
    )
    return in_commit_order(entry for entry in bounded(found) if entry is not None)


def file_sizes(bucket: Bucket, step: str = "") -> dict[str, dict[str, int]]:
    """Return step -> file -> size in bytes, of all steps or of one."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in bucket.sizes(f"steps/{step}".rstrip("/")).items():
        if (match := _FILE.fullmatch(name)) and _NAME.fullmatch(match[1]):
            found[match[1]][match[2]] = size
    return found


def look(bucket: Bucket, listed: Listed, sizes: Mapping[str, int]) -> Entry:
    """Describe a step. The error in the result says which object is missing or unreadable."""
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


def expect_log(bucket: Bucket, head: Head) -> None:
    """Check that there is a log if there are steps.

    Raises:
        CheckpointError: there are steps and no log.
    """
    if head.record is None:
        steps = [name for name, files in file_sizes(bucket).items() if manifest.NAME in files]
        if steps:
            raise CheckpointError(
                f"{bucket.url} has {len(steps)} steps, but its log/ is empty or was deleted. "
                f"Without the log it is unknown which steps are good. Restore log/, or give "
                f"another address."
            )


def is_gone(bucket: Bucket, listed: Listed, sizes: Mapping[str, Mapping[str, int]]) -> bool:
    """Return whether all objects of a listed step were deleted by hand."""
    return not sizes[listed.name] and bucket.size(object_name(listed.name, manifest.NAME)) is None


def parsed(name: str) -> tuple[int, int]:
    """Return the step and the run in a name."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
