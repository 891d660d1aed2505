"""Steps in an object store: a step exists once the commit log lists it.

URL/log/00000000000000000042.json    the list of steps after 42 changes; see `log`
URL/steps/NAME/manifest.json, …      the files of one step, as in a folder
URL/steps/NAME/damaged.json          marks a damaged step, which is in quarantine
URL/writers/TOKEN.json               heartbeat of the writer
URL/writers/TOKEN-probe-0.json       exists shortly, to check that creation is exclusive

A store needs exclusive creation of objects (S3's If-None-Match). It needs no rename and no
consistent listing. The next writer deletes objects that a killed writer has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.objects import listing, log
from hvdkit.checkpoint.objects.bucket import Bucket
from hvdkit.checkpoint.objects.files import ObjectFiles, object_name
from hvdkit.checkpoint.objects.writing import ObjectWriter
from hvdkit.checkpoint.storage import Entry, StepFiles


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
        """Return whether there is a log or a step."""
        return bool(self._bucket.sizes("log") or self._bucket.sizes("steps"))

    def location(self, name: str) -> str:
        """Return the URL of a step."""
        return f"{self._bucket.url}/steps/{name}"

    def entries(self) -> list[Entry]:
        """List all steps."""
        for _ in range(listing.LIST_ATTEMPTS):
            head = log.read_head(self._bucket)
            entries = listing.scan(self._bucket, head)
            known = {entry.name for entry in entries if entry.error is None}
            # List again if a live writer has deleted a step meanwhile, and written another.
            if known == {each.name for each in head.steps} or log.read_head(self._bucket) == head:
                break
        else:
            return entries
        listing.expect_log(self._bucket, head)
        if head.steps and not entries and not self.quarantined():
            raise CheckpointError(
                f"the log of {self} lists {len(head.steps)} steps, and all their objects are "
                f"missing. Restore the objects; or delete the log to start anew."
            )
        return entries

    def quarantined(self) -> list[str]:
        """List the names of steps that are marked as damaged."""
        sizes = listing.file_sizes(self._bucket)
        return [
            listed.name
            for listed in log.read_head(self._bucket).steps
            if listing.MARK in sizes[listed.name]
        ]

    def open_step(self, entry: Entry) -> StepFiles:
        """Open a step for reading."""
        return ObjectFiles(
            self._bucket, entry.name, listing.file_sizes(self._bucket, entry.name)[entry.name]
        )

    def is_same(self, entry: Entry) -> bool:
        """Return whether the log still lists the step. Names are never reused."""
        listed = log.read_head(self._bucket).steps
        if all(each.name != entry.name for each in listed):
            return False
        files = listing.file_sizes(self._bucket, entry.name)[entry.name]
        return bool(files) and listing.MARK not in files

    def quarantine(self, entry: Entry) -> str | None:
        """Mark a step as damaged. The log stays as it is, because only the writer changes it."""
        if not self.is_same(entry):
            return None
        self._bucket.write(object_name(entry.name, listing.MARK), b"{}")
        return entry.name

    def open_for_writing(self) -> ObjectWriter:
        """Append the first record of this process to the log, and remove leftovers."""
        return ObjectWriter(self._bucket)
