"""The folders of a host for what outlives its ranks. An agent owns them.

They contain the commits of an elastic job, or the steps that a `Checkpointer` keeps in memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from hvdkit.runtime.elastic_start import HOSTS_FILE
from hvdkit.system.owned_folders import OwnedFolder, remove_abandoned, temporary

#: The beginning of the folders' names: of an elastic job, and of another job.
PREFIX = "hvdkit-commits-"
STEPS_PREFIX = "hvdkit-steps-"
_MEMORY = Path("/dev/shm")


def _parents() -> list[Path]:
    parents = [temporary()]
    if os.access(_MEMORY, os.W_OK) and _MEMORY not in parents:
        parents.insert(0, _MEMORY)
    return parents


def remove_abandoned_steps() -> None:
    """Delete the folders for steps whose agents have been killed."""
    for parent in _parents():
        remove_abandoned(parent, STEPS_PREFIX)


class HostFolders:
    """A folder in shared memory, and one on disk for what does not fit into the memory.

    Args:
        commits: the rest of the folders' names in an elastic job. If an agent is killed, the next
            agent uses the same name, and so the same folders. "" for the folders of another job,
            which end with the agent.

    Raises:
        OSError: no folder can be made.
    """

    def __init__(self, commits: str = "") -> None:
        prefix = PREFIX if commits else STEPS_PREFIX
        #: Whether the folders are those of an elastic job, which the next agent of the host gets.
        self.has_commits = bool(commits)
        self._folders = [OwnedFolder(parent, prefix, commits) for parent in _parents()]
        self._pending: int | None = None

    @property
    def paths(self) -> Sequence[Path]:
        """The paths of the folders, in the order in which ranks try them."""
        return [folder.path for folder in self._folders]

    def announce(self, version: int) -> None:
        """Tell the ranks the version of the list of hosts, as soon as there is space for it."""
        self._pending = version
        self.announce_pending()

    def announce_pending(self) -> None:
        """Announce the last version if that was not possible before. Call it now and then."""
        if self._pending is None:
            return
        draft = self.paths[0] / f"{HOSTS_FILE}.draft"
        # While a rank writes a commit, the memory may be full for a moment.
        with contextlib.suppress(OSError):
            draft.write_text(str(self._pending), encoding="ascii")
            draft.replace(self.paths[0] / HOSTS_FILE)
            self._pending = None

    def leave(self) -> None:
        """Leave the folders to the next agent with the same name."""
        for folder in self._folders:
            folder.leave()

    def remove(self) -> None:
        """Delete the folders."""
        for folder in self._folders:
            folder.remove()
