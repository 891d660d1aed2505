"""Write the whole output of a rank, also if a signal interrupts a write.

`hvdkit run` sets PYTHONUNBUFFERED, because lines would otherwise appear minutes later. Without a
buffer, Python ignores that a write was shorter than requested, and the rest of the text is lost. A
write to a full pipe is shorter if a signal interrupts it, such as SIGUSR2 for a record, or SIGCHLD
of a `DataLoader`.
"""

import io
import select
import sys
from typing import Any


def write_whole_output() -> None:
    """Make `sys.stdout` and `sys.stderr` write everything, if they have no buffer."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        is_own = isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__")
        if is_own and type(stream.buffer) is io.FileIO:
            whole = io.TextIOWrapper(
                _WholeFile(stream.fileno(), "wb", closefd=False),
                encoding=stream.encoding,
                errors=stream.errors,
                newline="\n",
                line_buffering=stream.line_buffering,
                write_through=True,
            )
            whole.mode = stream.mode  # type: ignore[misc]
            setattr(sys, name, whole)
            setattr(sys, f"__{name}__", whole)


class _WholeFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        """Write all data, and return their size in bytes."""
        rest = memoryview(data).cast("B")
        size = rest.nbytes
        while rest:
            written = super().write(rest)
            if written is None:
                # Another process has made the pipe non-blocking.
                select.select([], [self], [])
            else:
                rest = rest[written:]
        return size
