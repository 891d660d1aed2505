"""Read the files of one step from its folder."""

from __future__ import annotations

import contextlib
import os

import numpy as np

from hvdkit.checkpoint.posix import disk


class PosixFiles:
    """The `StepFiles` of a step's folder.

    Files stay readable if the step is deleted after they were opened.

    Args:
        parent: the descriptor of the checkpoint folder.
        name: the name of the step's folder.

    Raises:
        Damaged: the step's folder is missing, or is not a folder.
        CheckpointError: the folder cannot be opened now. It may be intact.
    """

    # Threads that read. With one thread, the disk has no work between two reads.
    readers = 2

    def __init__(self, parent: int, name: str) -> None:
        with disk.reading(name):
            self._folder: int | None = disk.open_folder(name, parent)
        self._descriptors: dict[str, int] = {}

    def open(self, name: str) -> int:
        """Open the file `name`. Return its size in bytes."""
        assert self._folder is not None
        self._descriptors[name], size = disk.open_plain(name, self._folder)
        return size

    def read_into(self, name: str, out: np.ndarray, offset: int) -> None:
        """Fill `out` with the bytes of file `name` that begin at `offset`."""
        disk.read_into(self._descriptors[name], out, offset, name)

    def close(self) -> None:
        """Close all files. May be called more than once."""
        descriptors = list(self._descriptors.values())
        if self._folder is not None:
            descriptors.append(self._folder)
        self._descriptors, self._folder = {}, None
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
