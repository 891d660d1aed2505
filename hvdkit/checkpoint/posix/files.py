"""The files of one step in a folder."""

from __future__ import annotations

import contextlib
import os

import numpy as np

from hvdkit.checkpoint.posix import disk


class PosixFiles:
    """`StepFiles` of a folder. Files stay readable if the step is deleted after they are opened."""

    # With one thread, the disk's queue is empty between two reads.
    readers = 2

    def __init__(self, parent: int, name: str) -> None:
        """Args:
            parent: the descriptor of the checkpoint folder.
            name: the name of the step's folder.

        Raises:
            Damaged: it is missing, or is not a folder.
            CheckpointError: it cannot be opened now; it may be intact.
        """
        with disk.reading(name):
            self._folder: int | None = disk.open_folder(name, parent)
        self._descriptors: dict[str, int] = {}

    def open(self, name: str) -> int:
        """Open the file `name`. Returns its size in bytes."""
        assert self._folder is not None
        self._descriptors[name], size = disk.open_plain(name, self._folder)
        return size

    def read_into(self, name: str, out: np.ndarray, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on."""
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
