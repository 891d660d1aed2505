"""Counters of this process for `hvdkit.monitor`: bytes, wire formats, time in checkpoints."""

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Counters:
    """Numbers and names since the process began; they only grow.

    Attributes:
        payload_bytes: the bytes of the buckets that this rank has reduced, as they were encoded.
        overflows: sums of buckets that did not fit into float16 and were repeated in float32.
        checkpoint_seconds: the time that the training spent in checkpointers. With PyTorch, the
            time that a checkpointer waits in its collectives is measured and left out.
        wire_formats: the names of the wire formats of this rank's optimizers and gradient tapes.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.payload_bytes = 0
        self.overflows = 0
        self.checkpoint_seconds = 0.0
        self.wire_formats: set[str] = set()
        self._clock = clock
        # For each call of a checkpointer that has begun, the seconds of its waits.
        self._waits: list[list[float]] = []

    def count_wait(self, seconds: float) -> None:
        """Exclude the seconds that the training thread waited in a collective of a checkpointer."""
        for waits in self._waits:
            waits.append(seconds)

    def timing_checkpoint(
        self, call: Callable[_Arguments, _Result]
    ) -> Callable[_Arguments, _Result]:
        """Return a function like `call` that adds its time to `checkpoint_seconds`."""

        @functools.wraps(call)
        def timed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if self._waits:
                return call(*args, **kwargs)
            waits: list[float] = []
            self._waits.append(waits)
            began = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                self._waits.pop()
                self.checkpoint_seconds += max(self._clock() - began - sum(waits), 0.0)

        return timed


#: The counters of this process.
counters = Counters()
