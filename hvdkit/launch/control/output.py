"""Show the ranks' output line by line with the rank, write it to files, and keep the last lines."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import IO, Any, Self

from hvdkit.errors import UsageError
from hvdkit.launch.control import readers
from hvdkit.system.plain_files import printable
from hvdkit.system.whole_files import open_to_write

#: The number of last lines that are kept of each rank, for the report when it fails.
TAIL_LINES = 100
#: With more ranks than this, only rank 0 is shown.
SHOWN_RANKS = 16
#: Bytes. A longer line is shown as several lines.
LONGEST_LINE = 1 << 20

# Bytes. Of an unfinished line that is longer, only the part after the last carriage return is kept.
_LONGEST_BAR = 65536
# Bytes. Longer lines are cut in the report of a failure.
_LONGEST_TAIL_LINE = 4096
_CLEAR = b"\r\x1b[2K"
_DRAW_SECONDS = 0.2
_BARS_SECONDS = 10.0


class RankFiles:
    """Files with the ranks' output in a folder.

    If writing to a file fails (a full disk), further output to it is dropped. One message says so,
    for all files.

    Args:
        option: the user's option with the folder, for messages.
    """

    def __init__(self, option: str, directory: Path) -> None:
        self._directory = directory
        self._where = f"{option} {directory}"
        # None for a file that cannot be written to any more.
        self._files: dict[str, IO[bytes] | None] = {}

    def open(self, names: Iterable[str]) -> None:
        """Make the files that are not open. Files of an earlier job become empty.

        Raises:
            UsageError: a file cannot be made.
        """
        try:
            for name in names:
                if name not in self._files:
                    path = self._directory / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    descriptor = open_to_write(path, os.O_WRONLY | os.O_TRUNC)
                    self._files[name] = os.fdopen(descriptor, "wb", buffering=0)
        except OSError as error:
            self.close()
            raise UsageError(f"{self._where}: {error.strerror}") from error

    def write(self, name: str, data: bytes) -> None:
        file = self._files[name]
        try:
            # The file is unbuffered, so a write to a full disk may write only a part.
            while file is not None and data:
                data = data[file.write(data) :]
        except OSError as error:
            self._drop(name, error)

    def close(self) -> None:
        for name, file in self._files.items():
            try:
                if file is not None:
                    file.close()
            except OSError as error:  # NFS reports some errors of writes only here
                self._drop(name, error)

    def _drop(self, name: str, error: OSError) -> None:
        is_first = None not in self._files.values()
        self._files[name] = None
        if is_first:
            readers.say(
                f"{self._where}: {error.strerror}. From now on, nothing is written to {name}, and "
                f"to other files that fail"
            )


class Output:
    """Show the ranks' output. A context manager.

    If writing to a file or stream fails (a full disk, a closed pipe), there is one warning, and
    further output to it is dropped. The ranks continue.

    Args:
        shown: the ranks whose lines are shown; default all, or rank 0 of a large job.
        directory: the folder for one file per rank; None for no files.
        stdout: the stream for the ranks' standard output; default this process's.
        stderr: the stream for the ranks' standard error; default this process's.
        progress: whether `status` draws a line.

    Attributes:
        directory: the folder for one file per rank; None for no files.

    Raises:
        UsageError: the directory cannot be written to.
    """

    def __init__(
        self,
        size: int,
        shown: Collection[int] | None = None,
        directory: Path | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
        progress: bool = True,
    ) -> None:
        readers.wait()
        if shown is None:
            shown = range(size) if size <= SHOWN_RANKS else (0,)
        self._shown = frozenset(shown)
        self._width = len(str(size - 1))
        self._streams = {
            "stdout": stdout or sys.stdout.buffer,
            "stderr": stderr or sys.stderr.buffer,
        }
        self._unfinished: dict[tuple[int, str], bytes] = {}
        # The states of progress bars that were shown last, and when.
        self._bars: dict[tuple[int, str], bytes] = {}
        self._bars_at = time.monotonic()
        self._tails: list[deque[str]] = [deque(maxlen=TAIL_LINES) for _ in range(size)]
        self._status = _StatusLine(self._streams["stderr"] if progress else io.BytesIO())
        self.directory = directory
        self._names = [f"rank.{rank:0{self._width}}.log" for rank in range(size)]
        self._files = None if directory is None else RankFiles("--output-dir", directory)
        if self._files is not None:
            self._files.open(self._names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        # Of ranks whose end was not reported, or whose helper processes wrote after it.
        for rank, _ in list(self._unfinished):
            self.finish(rank)
        self._status.clear()
        if self._files is not None:
            self._files.close()

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Add output that `rank` wrote to `stream` ("stdout" or "stderr")."""
        if self._files is not None:
            self._files.write(self._names[rank], data)
        *lines, rest = (self._unfinished.pop((rank, stream), b"") + data).split(b"\n")
        if len(rest) > _LONGEST_BAR:
            # A progress bar without line ends: keep its last state only.
            rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]
        if len(rest) > LONGEST_LINE:
            lines.append(rest)
        elif rest:
            self._unfinished[rank, stream] = rest
        self._show(rank, stream, lines)

    def finish(self, rank: int) -> None:
        """Show the unfinished lines of `rank`, which has ended."""
        for stream in self._streams:
            if rest := self._unfinished.pop((rank, stream), b""):
                self._show(rank, stream, [rest])

    def tail(self, rank: int) -> list[str]:
        """Return the last lines of `rank`, of both streams."""
        return list(self._tails[rank])

    def status(self, text: str) -> None:
        """Draw the state of the job below the ranks' output, on a terminal.

        Elsewhere, such as in a file, show the states of progress bars every few seconds.
        """
        self.show_bars()
        progress = self._unfinished.get((0, "stderr")) or self._unfinished.get((0, "stdout"))
        shown = f"{text}  {_decoded(_visible(progress))}" if progress else text
        self._status.draw(shown)

    def show_bars(self) -> None:
        """Show the present states of progress bars, every few seconds, unless on a terminal.

        A bar is a line that its rank overwrites with carriage returns, and that has no end yet.
        """
        now = time.monotonic()
        if now < self._bars_at + _BARS_SECONDS:
            return
        self._bars_at = now
        before, self._bars = self._bars, {}
        for (rank, stream), rest in self._unfinished.items():
            state = _visible(rest)
            if b"\r" in rest and state.strip() and not self._streams[stream].isatty():
                self._bars[rank, stream] = state
                if before.get((rank, stream)) != state:
                    self._print(rank, stream, state)

    def _show(self, rank: int, stream: str, lines: list[bytes]) -> None:
        # A rank may write many short lines: no work for each line.
        text = b"\n".join(lines)
        if b"\r" in text:
            lines = [_visible(line) for line in lines]
            text = b"\n".join(lines)
        last = lines[-TAIL_LINES:]
        self._tails[rank].extend(_decoded(line[:_LONGEST_TAIL_LINE]) for line in last)
        if lines:
            self._print(rank, stream, text)

    def _print(self, rank: int, stream: str, text: bytes) -> None:
        """Show lines of `rank`, if its lines are shown."""
        if rank not in self._shown:
            return
        prefix = self._prefix(rank, stream)
        self._show_lines(rank, stream, prefix + text.replace(b"\n", b"\n" + prefix) + b"\n")

    def _prefix(self, rank: int, stream: str) -> bytes:  # noqa: ARG002
        return b"[%*d] " % (self._width, rank)

    def _show_lines(self, rank: int, stream: str, lines: bytes) -> None:  # noqa: ARG002
        self._status.clear()
        try:
            _write_all(self._streams[stream], lines)
        except OSError as error:
            self._drop(stream, error)

    def _drop(self, stream: str, error: OSError) -> None:
        """Drop further output to a stream that cannot be written to. Warn of it."""
        with contextlib.suppress(OSError, ValueError):
            # Without this, Python tries to write the stream's buffer again when it exits.
            readers.discard(self._streams[stream].fileno())
        self._streams[stream] = _NullStream(error)
        # EIO: the terminal is closed.
        if error.errno not in (errno.EPIPE, errno.EIO):
            names = {"stdout": "standard output", "stderr": "standard error"}
            readers.say(
                f"{names[stream]}: {error.strerror}. The ranks' output to it is not shown any more"
            )

    @property
    def stdout_closed(self) -> bool:
        """Whether the reader of standard output has closed it, as `| head` does."""
        stream = self._streams["stdout"]
        return isinstance(stream, _NullStream) and stream.error.errno == errno.EPIPE


def _write_all(out: IO[bytes], data: bytes) -> None:
    out.flush()
    try:
        descriptor = out.fileno()
    except OSError:  # a stream in memory
        out.write(data)
    else:
        readers.write(descriptor, data)


class _NullStream(io.BytesIO):
    """A stream that discards its data, because of an error."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, data: Any) -> int:
        return len(data)


def _visible(line: bytes) -> bytes:
    """Return the part of a line that a terminal shows after all carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _decoded(line: bytes) -> str:
    return line.decode(errors="replace")


class _StatusLine:
    """A line below the output, if the stream is a terminal."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream if stream.isatty() else None
        self._drawn = False
        self._at = 0.0

    def draw(self, text: str) -> None:
        now = time.monotonic()
        if self._stream is None or now < self._at + _DRAW_SECONDS:
            return
        self._at = now
        width = shutil.get_terminal_size().columns - 1
        self._write(_CLEAR + printable(text, one_line=True)[:width].encode())
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._write(_CLEAR)
            self._drawn = False

    def _write(self, data: bytes) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # the terminal is closed
                _write_all(self._stream, data)


class TaggedOutput(Output):
    """Show the ranks' output as Horovod's horovodrun does, such as `[0]<stdout>:`.

    Args:
        others: arguments of `Output`.
        over_mpi: whether to use the prefix of Open MPI 4, such as `[1,0]<stdout>:`.
        with_time: whether the prefix begins with the time.
        files: get the same lines, as `rank.N/stdout` and `rank.N/stderr`; None for no files.
        width: the digits of N.
        more: arguments of `Output`.

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
        width: int = 1,
        **more: Any,
    ) -> None:
        super().__init__(size, *others, **more)
        self._job = b"1," if over_mpi else b""
        self._with_time = with_time
        self._same_lines = files
        self._name = f"rank.{{:0{width}}}/{{}}"
        if files is not None:
            names = itertools.product(range(size), self._streams)
            files.open(self._name.format(*each) for each in names)

    def _prefix(self, rank: int, stream: str) -> bytes:
        now = time.asctime().encode() if self._with_time else b""
        return b"%s[%s%d]<%s>:" % (now, self._job, rank, stream.encode())

    def _show_lines(self, rank: int, stream: str, lines: bytes) -> None:
        super()._show_lines(rank, stream, lines)
        if self._same_lines is not None:
            self._same_lines.write(self._name.format(rank, stream), lines)
