"""Steps in an object store: a step exists if its last object exists, `committed.json`.

URL/steps/NAME/manifest.json, …      the files of one step, as in a folder
URL/steps/NAME/committed.json        created after the other files were read back
URL/steps/NAME/damaged.json          marks a damaged step, which is in quarantine
URL/writers/000000042.json           lease and heartbeat of the 42nd writer; the last one counts
URL/writers/TOKEN-probe-0.json       exists shortly, to check that creation is exclusive

A store needs exclusive creation of objects (S3's If-None-Match), and must list an object as soon as
it exists. It needs no rename. The next writer deletes objects that a killed writer has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.checkpoint.objects import earlier, listing
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.objects.files import ObjectFiles, object_name
from hvdkit.checkpoint.objects.writing import ObjectWriter
from hvdkit.checkpoint.storage import Entry, StepFiles

#: How often to list again after a live writer has changed the list.
_LIST_ATTEMPTS = 10


class ObjectStorage:
    """Steps under a URL that fsspec knows."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        """Args:
            url: such as `s3://bucket/run`.
            options: for fsspec's file system.

        Raises:
            UsageError: fsspec is not installed or does not know the protocol.
        """
        self._bucket = Bucket(url, options)

    def __str__(self) -> str:
        return self._bucket.url

    def exists(self) -> bool:
        """Return whether there is a writer or a step."""
        return any(self._bucket.sizes(folder) for folder in ("writers", "steps"))

    def location(self, name: str) -> str:
        """Return the URL of a step."""
        return f"{self._bucket.url}/steps/{name}"

    def entries(self) -> list[Entry]:
        """List all steps."""
        for _ in range(_LIST_ATTEMPTS):
            steps = self._steps()
            entries = listing.scan(self._bucket, steps)
            # List again if a live writer has deleted a step meanwhile, and written another.
            if all(each.error is None for each in entries) or self._steps() == steps:
                break
        return entries

    def quarantined(self) -> list[str]:
        """List the names of steps that are marked as damaged."""
        return [name for name, files in self._steps().items() if listing.MARK in files]

    def open_step(self, entry: Entry) -> StepFiles:
        """Open a step for reading."""
        return ObjectFiles(
            self._bucket, entry.name, listing.file_sizes(self._bucket, entry.name)[entry.name]
        )

    def is_same(self, entry: Entry) -> bool:
        """Return whether the step still exists. Names are never reused."""
        return listing.MARK not in self._steps(entry.name).get(entry.name, {listing.MARK: 0})

    def quarantine(self, entry: Entry) -> str | None:
        """Mark a step as damaged."""
        if not self.is_same(entry):
            return None
        self._bucket.write(object_name(entry.name, listing.MARK), b"{}")
        return entry.name

    def open_for_writing(self) -> ObjectWriter:
        """Become the writer, and remove leftovers."""
        return ObjectWriter(self._bucket)

    def _steps(self, name: str = "") -> dict[str, dict[str, int]]:
        """Return step -> file -> size in bytes, of all steps that exist or of one."""
        # Read the log first: its steps are committed before it is deleted.
        logged = earlier.read(self._bucket).steps
        found = listing.file_sizes(self._bucket, name)
        return {each: files for each, files in found.items() if listing.exists(each, files, logged)}
