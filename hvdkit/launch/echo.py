"""Show the output of a node's ranks without blocking the node's agent.

The reader of this node's output may not read: `less`, or Ctrl-S in a terminal. The agent must
answer node 0 meanwhile, and forward signals. A thread could not write instead: a process with
threads cannot start ranks safely.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import IO, Any

from hvdkit.launch import readers
from hvdkit.launch.output import Output

MakeOutput = Callable[[int, IO[bytes], IO[bytes]], Output]
#: With more bytes than this to show, the agent stops reading the ranks' output.
_PENDING_BYTES = 1_000_000


class Echo:
    """Write output to this process's standard output and error, as far as they are read.

    Args:
        make_output: given the number of ranks of the job and two streams, returns an output that
            writes to these streams.
    """

    def __init__(self, make_output: MakeOutput) -> None:
        self._make_output = make_output
        self._streams = _Stream(1), _Stream(2)
        self._output: Output | None = None

    @property
    def full(self) -> bool:
        """Whether the reader must read before the agent reads more output of the ranks."""
        return sum(len(stream.pending) for stream in self._streams) > _PENDING_BYTES

    @property
    def waiting(self) -> Sequence[int]:
        """The descriptors whose readers must read before more is written."""
        return [stream.descriptor for stream in self._streams if stream.pending]

    def start(self, size: int) -> None:
        """Begin a start of the ranks, `size` of them in the whole job."""
        if self._output is not None:
            self._output.close()
        self._output = self._make_output(size, *self._streams)

    def step(self) -> None:
        """Write what the readers take now."""
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
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._error is not None:
            raise self._error
        self.pending += data
        self.step()
        return len(data)

    def step(self) -> None:
        if self.pending:
            try:
                readers.write_ready(self.descriptor, self.pending)
            except OSError as error:
                # The next write raises it, so that the user gets a message.
                self._error = error
                self.pending.clear()

    def write_rest(self) -> None:
        # After the end of the job, a closed terminal or a full disk leads to no message.
        with contextlib.suppress(OSError):
            readers.write(self.descriptor, bytes(self.pending))
        self.pending.clear()
