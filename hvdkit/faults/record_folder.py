"""The folder on a host to which the host's ranks write their records."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from hvdkit.faults.rank_report import RankReports, crash_stack
from hvdkit.owned_folders import OwnedFolder
from hvdkit.record_files import (
    COMMITTED,
    CONNECTED,
    ENTERED,
    JOB,
    LEAVING,
    NOTE,
    RECORD,
    REQUEST,
    SAVED,
    SCRIPT_ENDED,
)
from hvdkit.whole_files import replacing

#: The beginning of the folder's name.
PREFIX = "hvdkit-records-"
_NOTE = re.compile(NOTE.format(r"(\d+)"))
_SCRIPT_ENDED = re.compile(SCRIPT_ENDED.format(*[r"(\d+)"] * 3))


class RecordFolder:
    """A folder for records. It is made on the first use of `path`.

    Args:
        job: a text that the folders of the job's other ranks on this host have, too; empty if there
            are no such folders.
    """

    def __init__(self, job: str = "") -> None:
        self._job = job
        self._folder: OwnedFolder | None = None
        # The size and time of each file that `changed` has returned.
        self._seen: dict[str, tuple[int, int]] = {}
        # The notes that `changed_notes` has returned, or `write_note` has written.
        self._notes: dict[int, str] = {}
        self._reports = RankReports()

    @property
    def path(self) -> Path:
        """The path of the folder, which only this user can read."""
        if self._folder is None:
            self._folder = OwnedFolder(Path(tempfile.gettempdir()), PREFIX)
            if self._job:
                (self._folder.path / JOB.format(self._job)).touch()
        return self._folder.path

    def request(self) -> None:
        """Ask the ranks for records."""
        request(self.path)

    def changed(self) -> Iterator[str]:
        """Yield the records that were written since the last call."""
        if self._folder is None:
            return
        for file in sorted(self._folder.path.glob(RECORD.format("*"))):
            # After an error the next call reads the file again.
            with contextlib.suppress(OSError):
                facts = file.stat()
                stamp = facts.st_size, facts.st_mtime_ns
                if self._seen.get(file.name) != stamp:
                    text = file.read_text(encoding="utf-8", errors="replace")
                    self._seen[file.name] = stamp
                    yield text

    def reports(self) -> Iterator[tuple[int, float, Mapping[str, Any]]]:
        """Yield the ranks' reports on their ends, see `RankReports.new`."""
        if self._folder is not None:
            yield from self._reports.new(self._folder.path)

    def crash(self, rank: int) -> list[str]:
        """Return the lines of faulthandler after the crash of a rank; empty for none."""
        return [] if self._folder is None else crash_stack(self._folder.path, rank)

    def saved(self) -> bool:
        """Return whether a new checkpoint or commit was saved since the last call."""
        return self._was_touched(SAVED)

    def committed(self) -> bool:
        """Return whether a rank has reported since the last call that its host has a commit."""
        return self._was_touched(COMMITTED)

    def _was_touched(self, name: str) -> bool:
        if self._folder is None:
            return False
        try:
            stamp = 0, (self._folder.path / name).stat().st_mtime_ns
        except OSError:
            return False
        before = self._seen.get(name)
        self._seen[name] = stamp
        return before != stamp

    def init_state(self) -> tuple[int, bool, bool]:
        """Return how far Horovod is in the only rank that uses this folder.

        Returns the number of its last start of Horovod (0 if it has not called `hvd.init()`),
        whether this start has connected the rank, and whether the rank shuts Horovod down.
        """
        start = 0
        if self._folder is None:
            return start, False, False
        while (self._folder.path / ENTERED.format(start + 1)).exists():
            start += 1
        connected, leaving = (
            (self._folder.path / name.format(start)).exists() for name in (CONNECTED, LEAVING)
        )
        return start, connected, leaving

    def script_ends(self, ranks: Collection[int] = ()) -> dict[int, int]:
        """Return rank -> exit status, of scripts that have ended in processes that still run.

        Args:
            ranks: the numbers of the ranks' own processes. A note of one of them also counts after
                the end of the process, because no other script can follow.
        """
        found: dict[int, int] = {}
        if self._folder is None:
            return found
        for file in self._folder.path.glob(SCRIPT_ENDED.format("*", "*", "*")):
            if match := _SCRIPT_ENDED.fullmatch(file.name):
                rank, status, pid = map(int, match.groups())
                if pid in ranks or psutil.pid_exists(pid):
                    found[rank] = status
        return found

    def changed_notes(self) -> Iterator[tuple[int, str]]:
        """Yield the notes of shutdowns that were written since the last call: rank, content.

        The content is "" for a note that was removed.
        """
        if self._folder is None:
            return
        found = {}
        for file in self._folder.path.glob(NOTE.format("*")):
            if match := _NOTE.fullmatch(file.name):
                with contextlib.suppress(OSError):
                    found[int(match[1])] = file.read_text(encoding="utf-8", errors="replace")
        before, self._notes = self._notes, found
        for rank in sorted(before.keys() | found.keys()):
            if before.get(rank) != found.get(rank):
                yield rank, found.get(rank, "")

    def write_note(self, rank: int, content: str) -> None:
        """Write the note of a rank on another host, or remove it if the content is ""."""
        path = self.path / NOTE.format(rank)
        with contextlib.suppress(OSError):
            if content:
                with replacing(path) as draft:
                    draft.write_text(content, encoding="utf-8")
                self._notes[rank] = content
            else:
                path.unlink(missing_ok=True)
                self._notes.pop(rank, None)

    def remove(self) -> None:
        """Delete the folder."""
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def request(folder: Path) -> None:
    """Ask the ranks that write to `folder` for records."""
    with contextlib.suppress(OSError):
        file = folder / REQUEST
        file.touch()
        os.utime(file)
