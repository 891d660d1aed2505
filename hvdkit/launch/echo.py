"""Show the output of a node's ranks without blocking the node's agent.

The reader of this node's output may not read: `less`, or Ctrl-S in a terminal. The agent must
answer node 0 meanwhile, and forward signals.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hvdkit.launch.output import Output

#: With more bytes than this to show, the agent stops reading the ranks' output.
_PENDING_BYTES = 1_000_000


class Echo:
    """Write to an output in a thread of its own.

    Args:
        output: where to write the output of the first start.
        wake: called when the output is not full any more.
    """

    def __init__(self, output: Output, wake: Callable[[], None]) -> None:
        self._output = output
        self._wake = wake
        self._pending = 0
        self._calls: deque[tuple[Callable[[], None], int]] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hvdkit-echo", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether the reader must read before the agent reads more output of the ranks."""
        return self._pending > _PENDING_BYTES

    def start(self, output: Output) -> None:
        """Write further output to `output`: the ranks are started again."""

        def replace() -> None:
            self._output.close()
            self._output = output

        self._add(replace, 0)

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Show output that `rank` wrote to `stream` ("stdout" or "stderr")."""
        self._add(lambda: self._output.write(rank, stream, data), len(data))

    def finish(self, rank: int) -> None:
        """Show the unfinished lines of `rank`, which has ended."""
        self._add(lambda: self._output.finish(rank), 0)

    def close(self) -> None:
        """Show all output, then close it. Waits for the reader, see `readers.give_up_at`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._output.close()

    def _add(self, call: Callable[[], None], size: int) -> None:
        with self._changed:
            self._pending += size
            self._calls.append((call, size))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
                call, size = self._calls.popleft()
            call()
            with self._changed:
                was_full = self.full
                self._pending -= size
            if was_full and not self.full:
                self._wake()
