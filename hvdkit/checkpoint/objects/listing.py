"""List the steps in an object store. One listing of objects says which steps exist."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.objects.files import ObjectFiles
from hvdkit.checkpoint.reading import open_file, read_manifest
from hvdkit.checkpoint.storage import Entry, bounded, in_commit_order

#: The object that makes a step exist.
COMMITTED = "committed.json"
#: The content of `COMMITTED` if the step does not exist: its writer has ended before the commit, or
#: the step is being deleted. No other content has this size.
VOID = b"{}"
#: The object that marks a damaged step.
MARK = "damaged.json"

_NAME = re.compile(r"step-(\d{12})(?:-run(\d{1,9}))?-[0-9a-f]{8}-\d{1,9}")
_FILE = re.compile(r"steps/([^/]+)/([^/]+)")


def file_sizes(bucket: Bucket, step: str = "") -> dict[str, dict[str, int]]:
    """Return step -> file -> size in bytes, of all steps or of one, unfinished ones included."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size in bucket.sizes(f"steps/{step}".rstrip("/")).items():
        if (match := _FILE.fullmatch(name)) and _NAME.fullmatch(match[1]):
            found[match[1]][match[2]] = size
    return found


def exists(name: str, files: Mapping[str, int], logged: Collection[str] = ()) -> bool:
    """Return whether a step exists.

    Args:
        name: of the step.
        files: the sizes of its objects in bytes.
        logged: the names of steps that an earlier version of hvdkit has committed.
    """
    if COMMITTED not in files:
        return name in logged and bool(files)
    # A commit may arrive after all other objects of the step were deleted.
    return files[COMMITTED] != len(VOID) and len(files) > 1


def scan(
    bucket: Bucket,
    steps: Mapping[str, Mapping[str, int]],
    known: Mapping[str, Entry] | None = None,
) -> list[Entry]:
    """Return all steps that are not marked as damaged.

    Args:
        bucket: where the steps are.
        steps: name -> file -> size in bytes, of steps that exist.
        known: name -> entry, for steps whose manifest need not be read.
    """
    found = (
        (known or {}).get(name) or _look(bucket, name, files)
        for name, files in steps.items()
        if MARK not in files
    )
    return in_commit_order(entry for entry in bounded(found) if entry is not None)


def run_of(name: str) -> int:
    """Return the run in the name of a step."""
    return _parsed(name)[1]


def _look(bucket: Bucket, name: str, sizes: Mapping[str, int]) -> Entry:
    """Describe a step. The error in the result says which object is missing or unreadable."""
    step, run = _parsed(name)
    found = None
    problem: CheckpointError | None = None
    files = ObjectFiles(bucket, name, sizes)
    try:
        found = read_manifest(files, step)
        for file, record in found.files.items():
            open_file(files, file, record)
    except CheckpointError as error:
        problem = error
    return Entry(name, step, run, name, found, problem)


def _parsed(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
