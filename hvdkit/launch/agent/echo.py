"""Show the output of a node's ranks without blocking the node's agent.

The reader of this node's output may not read: `less`, or Ctrl-S in a terminal. The agent must
answer node 0 meanwhile, and forward signals. A thread could not write instead: a process with
threads cannot start ranks safely.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any

from hvdkit.launch.control import readers
from hvdkit.launch.control.output import Output

#: With more bytes than this to show, the agent stops reading the ranks' output.
_PENDING_BYTES = 1_000_000


class Echo:
    """Write output to this process's standard output and error, as far as they are read."""

    def __init__(self) -> None:
        out = _Stream(1)
        # A terminal, or `2>&1`: with two streams, one could write within a line of the other.
        self._streams = (out, out) if _is_same_file(1, 2) else (out, _Stream(2))
        self._output: Output | None = None

    @property
    def full(self) -> bool:
        """Whether the reader must read before the agent reads more output of the ranks."""
        return sum(len(stream.pending) for stream in set(self._streams)) > _PENDING_BYTES

    @property
    def waiting(self) -> Sequence[int]:
        """The descriptors whose readers must read before more is written."""
        return [stream.descriptor for stream in set(self._streams) if stream.pending]

    def start(self, size: int) -> None:
        """Begin a start of the ranks, `size` of them in the whole job."""
        if self._output is not None:
            self._output.close()
        out, errors = self._streams
        self._output = Output(size, range(size), stdout=out, stderr=errors, progress=False)

    def step(self) -> None:
        """Show the states of progress bars, and write what the readers take now."""
        if self._output is not None:
            self._output.show_bars()
        for stream in self._streams:
            stream.step()

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Show output that `rank` wrote to `stream` ("stdout" or "stderr")."""
        assert self._output is not None
        self._output.write(rank, stream, data)

    def finish(self, rank: int) -> None:
        """Show the unfinished lines of `rank`, which has ended."""
        assert self._output is not None
        self._output.finish(rank)

    def close(self) -> None:
        """Show the rest. Waits for the readers, see `readers.give_up_at`."""
        for stream in self._streams:
            stream.write_rest()


class _Stream(io.BytesIO):
    """A stream that keeps what its reader does not take yet.

    Attributes:
        descriptor: where to write.
        pending: what is kept.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.pending = bytearray()
        self._errors: list[OSError] = []

    def isatty(self) -> bool:
        return os.isatty(self.descriptor)

    def write(self, data: Any) -> int:
        if self._errors:
            raise self._errors.pop()
        self.pending.extend(data)
        self.step()
        return len(data)

    def step(self) -> None:
        if self.pending:
            try:
                readers.write_ready(self.descriptor, self.pending)
            except OSError as error:
                # The next write raises it, so that the user gets a message. Later ones succeed: the
                # outputs of later starts would warn of it again.
                self._errors.append(error)
                self.pending.clear()
                readers.discard(self.descriptor)

    def write_rest(self) -> None:
        # After the end of the job, a closed terminal or a full disk leads to no message.
        with contextlib.suppress(OSError):
            readers.write(self.descriptor, bytes(self.pending))
        self.pending.clear()


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one is closed
        return False
