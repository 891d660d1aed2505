"""The folders of a host for the commits of an elastic job. An agent owns them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hvdkit.core.committer import HOSTS_FILE
from hvdkit.owned_folders import OwnedFolder

#: The beginning of the folders' names.
PREFIX = "hvdkit-commits-"
_MEMORY = Path("/dev/shm")


class CommitFolders:
    """A folder in shared memory, and one on disk for what does not fit into the memory.

    Args:
        name: the rest of the folders' names, so that an agent that was killed has a successor with
            the same folders.

    Raises:
        OSError: no folder can be made.
    """

    def __init__(self, name: str) -> None:
        parents = [Path(tempfile.gettempdir())]
        if os.access(_MEMORY, os.W_OK):
            parents.insert(0, _MEMORY)
        self._folders = [OwnedFolder(parent, PREFIX, name) for parent in parents]

    @property
    def paths(self) -> Sequence[Path]:
        """The paths of the folders, in the order in which ranks try them."""
        return [folder.path for folder in self._folders]

    def announce(self, version: int) -> None:
        """Tell the ranks the version of the list of hosts."""
        draft = self.paths[0] / f"{HOSTS_FILE}.draft"
        draft.write_text(str(version), encoding="ascii")
        draft.replace(self.paths[0] / HOSTS_FILE)

    def remove(self) -> None:
        """Delete the folders."""
        for folder in self._folders:
            folder.remove()
