"""Committed elastic states in the memory of a host, which outlive the ranks.

The agent of the host owns the folders (`hvdkit/launch/commit_folder.py`). One rank of the host
writes. A commit becomes visible by a rename, and only then the commit before it is deleted. So a
rank that is killed while it writes leaves the commit before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)\.commit")
#: There is no space in a folder: the next one may have some.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, order=True)
class CommitId:
    """The order of the commits of a job.

    Attributes:
        start: the number of the start of the ranks that made it. A host that was left out may hold
            later commits of an earlier start, which the job has given up.
        number: the number of the commit. All ranks count alike.
    """

    start: int
    number: int


@dataclass(frozen=True)
class Commit:
    """A complete commit on this host."""

    id: CommitId
    path: Path


class CommitStore:
    """The commits of one elastic state on this host.

    Args:
        folders: folders for commits; a folder without space is followed by the next one.
        key: the number of the state in the script.
    """

    def __init__(self, folders: Sequence[Path], key: int) -> None:
        self._folders = folders
        self._key = key

    def newest(self) -> Commit | None:
        """Return the newest commit; None without one."""
        return max(self._all(), key=lambda commit: commit.id, default=None)

    def write(self, identity: CommitId, write: Callable[[IO[bytes]], None]) -> None:
        """Store a commit, and delete the older ones.

        Args:
            identity: the id of the commit.
            write: writes the content to a file. It may be called again for another folder.

        Raises:
            OSError: no folder has enough space, or a folder does not exist any more.
        """
        for folder in self._folders:
            draft = folder / f"{self._key}.draft"
            try:
                with draft.open("wb") as file:
                    write(file)
                path = folder / f"{self._key}-{identity.start}-{identity.number}.commit"
                draft.replace(path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    draft.unlink()
                if error.errno not in _FULL or folder == self._folders[-1]:
                    raise
                continue
            for commit in self._all():
                if commit.path != path:
                    commit.path.unlink(missing_ok=True)
            return

    def _all(self) -> Iterator[Commit]:
        for folder in self._folders:
            for name in os.listdir(folder):
                match = _NAME.fullmatch(name)
                if match is not None and int(match[1]) == self._key:
                    yield Commit(CommitId(int(match[2]), int(match[3])), folder / name)
