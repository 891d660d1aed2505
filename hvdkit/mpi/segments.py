"""The shared memory of MPI's ranks.

Each rank of Open MPI makes a file of 16 MB in /dev/shm, through which the other ranks of its host
send to it. A rank that is killed cannot delete this file. Open MPI 5 also leaves the file of a
process that it did not start. Lightning's Trainer makes such a file in each rank, because it
imports mpi4py.

The ranks of MPICH share one file on each host, whose folder cannot be chosen.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from hvdkit.system.owned_folders import OwnedFolder, remove_abandoned

_PARENT = Path("/dev/shm")
_PREFIX = "hvdkit-mpi-"
#: The variables for the folder of the files: of Open MPI 5, and of Open MPI 4.
VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
# A file of MPICH or Intel MPI in /proc/PID/maps. A deleted one has more text in its line.
_MAPPED = re.compile(r" (/dev/shm/(?:mpich_shm_|Intel_MPI_)\S*)$", re.MULTILINE)


def mpich_files(pid: int) -> set[Path]:
    """Return the files of MPICH or Intel MPI that a process shares with other ranks."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:  # it has ended
        return set()
    return {Path(name) for name in _MAPPED.findall(maps)}


def remove_abandoned_folders() -> None:
    """Delete the folders of `SegmentFolder` whose owners were killed."""
    remove_abandoned(_PARENT, _PREFIX)


class SegmentFolder:
    """A folder in /dev/shm for the files of ranks that this process starts.

    Without a writable /dev/shm there is no folder, and `variables` is empty. Open MPI then chooses
    another place.

    Attributes:
        variables: environment variables, with which the ranks use the folder.
    """

    def __init__(self) -> None:
        self._folder: OwnedFolder | None = None
        with contextlib.suppress(OSError):
            self._folder = OwnedFolder(_PARENT, _PREFIX)
        self.variables: Mapping[str, str] = {}
        if self._folder is not None:
            self.variables = dict.fromkeys(VARIABLES, str(self._folder.path))

    def remove(self) -> None:
        """Delete the folder and the files. The ranks have ended."""
        if self._folder is not None:
            self._folder.remove()
