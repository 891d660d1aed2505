"""Keep the commits of elastic states in the memory of a host, so that they outlive the ranks.

A `Committer` uses a `CommitStore` for each state. The agent of the host owns the folders
(`hvdkit/launch/host_folders.py`). One rank of the host writes. A rename makes a commit visible.
The previous commit is deleted after that, so it is still there if a rank is killed while it writes.
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
#: Errors after which the next folder is tried: this folder has no space.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, order=True)
class CommitId:
    """The order of the commits of a job.

    Attributes:
        start: the number of the start of the ranks that made the commit. It is compared first: a
            host that was left out of a start may have commits of an earlier start with higher
            numbers, which the job does not use.
        number: the number of the commit. All ranks count alike.
    """

    start: int
    number: int


@dataclass(frozen=True)
class Commit:
    """A complete commit on this host."""

    id: CommitId
    path: Path


def newest_of_states(folders: Sequence[Path]) -> dict[int, Commit]:
    """Return the newest commit of each elastic state on this host, by the number of the state."""
    found: dict[int, Commit] = {}
    for key, commit in _commits(folders):
        found[key] = max(found.get(key, commit), commit, key=lambda each: each.id)
    return found


def _commits(folders: Sequence[Path]) -> Iterator[tuple[int, Commit]]:
    """Yield the number of the state and the commit, for each commit in the folders."""
    for folder in folders:
        for name in os.listdir(folder):
            if match := _NAME.fullmatch(name):
                yield int(match[1]), Commit(CommitId(int(match[2]), int(match[3])), folder / name)


class CommitStore:
    """The commits of one elastic state on this host.

    Args:
        folders: folders for commits. If a folder has no space, the next folder is used.
        key: the number of the state, see `Committer`.
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
            except BaseException as error:
                # Also if the state cannot be pickled: the draft would stay in the host's memory.
                with contextlib.suppress(OSError):
                    draft.unlink()
                full = isinstance(error, OSError) and error.errno in _FULL
                if not full or folder == self._folders[-1]:
                    raise
                continue
            for commit in self._all():
                if commit.path != path:
                    commit.path.unlink(missing_ok=True)
            return

    def _all(self) -> Iterator[Commit]:
        return (commit for key, commit in _commits(self._folders) if key == self._key)
