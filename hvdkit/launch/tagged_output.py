"""The ranks' output as Horovod's horovodrun shows and stores it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hvdkit.errors import UsageError
from hvdkit.launch.output import Output


class RankFiles:
    """The files `rank.N/stdout` and `rank.N/stderr` of a job, for all its starts.

    Args:
        directory: the folder.
        size: the number of ranks, for the width of N.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self._width = len(str(max(0, size - 1)))
        # None for a file that cannot be written to any more.
        self._files: dict[tuple[int, str], IO[bytes] | None] = {}

    def open(self, size: int) -> None:
        """Make the files of `size` ranks. Files of an earlier job become empty.

        Raises:
            UsageError: a file cannot be made.
        """
        try:
            for rank in range(size):
                for stream in ("stdout", "stderr"):
                    if (rank, stream) not in self._files:
                        folder = self.directory / f"rank.{rank:0{self._width}}"
                        folder.mkdir(parents=True, exist_ok=True)
                        self._files[rank, stream] = (folder / stream).open("wb", buffering=0)
        except OSError as error:
            raise UsageError(f"--output-filename {self.directory}: {error.strerror}") from error

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Write to a file.

        Raises:
            OSError: the file cannot be written to. Later calls for this file do nothing.
        """
        if (file := self._files[rank, stream]) is None:
            return
        try:
            # The file is unbuffered, so a write to a full disk may write only a part.
            while data := data[file.write(data) :]:
                pass
        except OSError:
            self._files[rank, stream] = None
            with suppress(OSError):
                file.close()
            raise


class TaggedOutput(Output):
    """Show the ranks' output with prefixes such as `[0]<stdout>:`. A context manager.

    Args:
        size: the number of ranks.
        over_mpi: whether to use the prefix of Open MPI 4, such as `[1,0]<stdout>:`.
        with_time: whether the prefix begins with the time.
        files: the files that get the same lines; None for no files.
        others: arguments of `Output`.

    Raises:
        UsageError: a file cannot be made.
    """

    def __init__(
        self,
        size: int,
        *others: Any,
        over_mpi: bool = False,
        with_time: bool = False,
        files: RankFiles | None = None,
        **more: Any,
    ) -> None:
        super().__init__(size, *others, **more)
        self._job = b"1," if over_mpi else b""
        self._with_time = with_time
        self._rank_files = files
        self._warned = False
        if files is not None:
            files.open(size)

    def _prefix(self, rank: int, stream: str) -> bytes:
        now = time.asctime().encode() if self._with_time else b""
        return b"%s[%s%d]<%s>:" % (now, self._job, rank, stream.encode())

    def _show_lines(self, rank: int, stream: str, lines: bytes) -> None:
        super()._show_lines(rank, stream, lines)
        if self._rank_files is None:
            return
        try:
            self._rank_files.write(rank, stream, lines)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._say(
                    f"--output-filename {self._rank_files.directory}: {error.strerror}. From now "
                    f"on, the output of rank {rank}, and of other ranks whose files fail, is not "
                    f"kept"
                )
