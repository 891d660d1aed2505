"""Show the ranks' output line by line with the rank, write it to files, and keep the last lines."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any, Self

from hvdkit.errors import UsageError
from hvdkit.launch import readers
from hvdkit.plain_files import printable

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


def _ignore(text: str) -> None:
    pass


class Output:
    """Show the ranks' output. A context manager.

    If writing to a file or stream fails (a full disk, a closed pipe), there is one warning, and
    further output to it is dropped. The ranks continue.

    Args:
        size: the number of ranks.
        shown: the ranks whose lines are shown; default all, or rank 0 of a large job.
        directory: the folder for one file per rank; None for no files.
        stdout: the stream for the ranks' standard output; default this process's.
        stderr: the stream for the ranks' standard error; default this process's.
        say: prints a message for the user.
        progress: whether `status` draws a line.

    Attributes:
        directory: the folder for one file per rank; None for no files.
        stdout_closed: whether the reader of standard output has closed it, as `| head` does.

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
        say: Callable[[str], None] = _ignore,
        progress: bool = True,
    ) -> None:
        readers.wait()
        self.stdout_closed = False
        self._say = say
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
        # None for a file that cannot be written to any more.
        self._files: list[IO[bytes] | None] = []
        self.directory = directory
        self._warned_of_files = False
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for rank in range(size):
                    name = f"rank.{rank:0{self._width}}.log"
                    self._files.append((directory / name).open("ab", buffering=0))
            except OSError as error:
                self.close()
                raise UsageError(f"--output-dir {directory}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        # Of ranks whose end was not reported, or whose helper processes wrote after it.
        for rank, _ in list(self._unfinished):
            self.finish(rank)
        self._status.clear()
        for rank, file in enumerate(self._files):
            if file is not None:
                try:
                    file.close()
                except OSError as error:  # NFS reports some errors of writes only here
                    self._drop_file(rank, error)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Add output that `rank` wrote to `stream` ("stdout" or "stderr")."""
        self._keep(rank, data)
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

    def _keep(self, rank: int, data: bytes) -> None:
        """Write output of `rank` to its file."""
        file = self._files[rank] if self._files else None
        if file is None:
            return
        try:
            # The file is unbuffered, so a write to a full disk may write only a part.
            while data := data[file.write(data) :]:
                pass
        except OSError as error:
            self._drop_file(rank, error)
            with contextlib.suppress(OSError):
                file.close()

    def _drop_file(self, rank: int, error: OSError) -> None:
        """Write no more to the file of `rank`. Warn, but once for all files."""
        self._files[rank] = None
        if not self._warned_of_files:
            self._warned_of_files = True
            self._say(
                f"--output-dir {self.directory}: {error.strerror}. From now on, the output of "
                f"rank {rank}, and of other ranks whose files fail, is not kept"
            )

    def _drop(self, stream: str, error: OSError) -> None:
        """Drop further output to a stream that cannot be written to. Warn of it."""
        out = self._streams[stream]
        self._streams[stream] = _NullStream()
        with contextlib.suppress(OSError, ValueError):
            # Without this, Python tries to write the stream's buffer again when it exits.
            descriptor = out.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        if error.errno == errno.EPIPE and stream == "stdout":
            self.stdout_closed = True
        elif error.errno not in (errno.EPIPE, errno.EIO):
            # EIO: the terminal is closed.
            names = {"stdout": "standard output", "stderr": "standard error"}
            self._say(
                f"{names[stream]}: {error.strerror}. The ranks' output to it is not shown any more"
            )


def _write_all(out: IO[bytes], data: bytes) -> None:
    out.flush()
    try:
        descriptor = out.fileno()
    except OSError:  # a stream in memory
        out.write(data)
    else:
        readers.write(descriptor, data)


class _NullStream(io.BytesIO):
    """A stream that discards its data."""

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
            try:
                _write_all(self._stream, data)
            except OSError:
                self._stream = None  # the terminal is closed
