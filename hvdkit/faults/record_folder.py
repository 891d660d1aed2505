"""The folder on a host to which the host's ranks write their records."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdkit.faults.rank_report import CRASH, LONGEST, REPORT, STARTED, RankReport
from hvdkit.runtime.record_files import (
    COMMITTED,
    CONNECTED,
    ENTERED,
    JOB,
    LEAVING,
    NOTE,
    RECORD,
    REQUEST,
    SAVED,
)
from hvdkit.system.owned_folders import OwnedFolder, temporary
from hvdkit.system.plain_files import parse_json, read_text
from hvdkit.system.whole_files import write

#: The beginning of the folder's name.
PREFIX = "hvdkit-records-"
_CRASH_LINES, _LONGEST_LINE = 200, 1000


class RecordFolder:
    """A folder for records. It is made on the first use of `path`.

    Args:
        job: a text that the folders of the job's other ranks on this host have, too; empty if there
            are no such folders.
    """

    def __init__(self, job: str = "") -> None:
        self._job = job
        # The name of each file that was returned -> its rank, its size and its time.
        self._seen: dict[str, tuple[int, int, int]] = {}

    @cached_property
    def _owned(self) -> OwnedFolder:
        folder = OwnedFolder(temporary(), PREFIX)
        if self._job:
            (folder.path / JOB.format(self._job)).touch()
        return folder

    @property
    def path(self) -> Path:
        """The path of the folder, which only this user can read."""
        return self._owned.path

    @property
    def _is_made(self) -> bool:
        return "_owned" in vars(self)

    def request(self) -> None:
        """Ask the ranks for records."""
        request(self.path)

    def _changed(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield the files with a name that have changed since the last call: rank, text.

        The text is "" for a file that was removed.
        """
        pattern = re.compile(name)
        files = self.path.glob("*") if self._is_made else ()
        found = {file.name: file for file in files if pattern.fullmatch(file.name)}
        for gone in [each for each in self._seen.keys() - found if pattern.fullmatch(each)]:
            yield self._seen.pop(gone)[0], ""
        for file in sorted(found.values()):
            # After an error the next call reads the file again.
            with contextlib.suppress(OSError):
                stamp = self._stamp(file)
                if self._seen.get(file.name) != stamp:
                    text = read_text(file)
                    self._seen[file.name] = stamp
                    yield stamp[0], text

    def _stamp(self, file: Path) -> tuple[int, int, int]:
        facts, rank = file.stat(), re.search("[0-9]+", file.name)
        return int(rank[0]) if rank else 0, facts.st_size, facts.st_mtime_ns

    def changed(self) -> Iterator[str]:
        """Yield the records that were written since the last call."""
        return (text for _, text in self._changed(RECORD.format("[0-9]+")) if text)

    def reports(self) -> Iterator[tuple[int, float, Mapping[str, Any]]]:
        """Yield the ranks' new reports on their ends: rank, age in seconds, and content."""
        changed = list(self._changed(REPORT.format("[0-9]+", "[0-9]+")))
        reported = {rank for rank, text in changed if text}
        for rank, text in changed:
            if not text and rank not in reported:
                yield rank, 0.0, STARTED
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                content = parse_json(text[:LONGEST])
                age = max(0.0, time.monotonic() - RankReport.of(content).time)
                yield rank, age, content

    def crash(self, rank: int) -> list[str]:
        """Return the lines of faulthandler after the crash of a rank; empty for none."""
        files = self.path.glob(CRASH.format(rank, "*")) if self._is_made else ()
        for file in sorted(files):
            with contextlib.suppress(OSError):
                if lines := read_text(file, LONGEST).splitlines():
                    return [line[:_LONGEST_LINE] for line in lines[:_CRASH_LINES]]
        return []

    def saved(self) -> bool:
        """Return whether a new checkpoint or commit was saved since the last call."""
        return any(self._changed(SAVED))

    def committed(self) -> bool:
        """Return whether a rank has reported since the last call that its host has a commit."""
        return any(self._changed(COMMITTED))

    def init_state(self) -> tuple[int, bool, bool]:
        """Return how far Horovod is in the only rank that uses this folder.

        Returns the number of its last start of Horovod (0 if it has not called `hvd.init()`),
        whether this start has connected the rank, and whether the rank shuts Horovod down.
        """
        start = 0
        while self._is_made and (self.path / ENTERED.format(start + 1)).exists():
            start += 1
        connected, leaving = (
            start > 0 and (self.path / name.format(start)).exists() for name in (CONNECTED, LEAVING)
        )
        return start, connected, leaving

    def changed_notes(self) -> Iterator[tuple[int, str]]:
        """Yield the notes of shutdowns that were written since the last call: rank, content.

        The content is "" for a note that was removed.
        """
        return self._changed(NOTE.format("[0-9]+"))

    def write_note(self, rank: int, content: str) -> None:
        """Write the note of a rank on another host, or remove it if the content is ""."""
        path = self.path / NOTE.format(rank)
        with contextlib.suppress(OSError):
            if content:
                write(path, content)
                self._seen[path.name] = self._stamp(path)
            else:
                path.unlink(missing_ok=True)
                self._seen.pop(path.name, None)

    def remove(self) -> None:
        """Delete the folder."""
        if self._is_made:
            self._owned.remove()


def request(folder: Path) -> None:
    """Ask the ranks that write to `folder` for records."""
    with contextlib.suppress(OSError):
        file = folder / REQUEST
        file.touch()
        os.utime(file)
