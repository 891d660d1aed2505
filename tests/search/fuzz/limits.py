"""Measure what one input costs: processor time and memory of this process."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The most processor time of an input, in seconds. The time of day depends on other processes.
MOST_SECONDS = 5.0
#: The most memory that an input needs, in bytes, beside its own.
MOST_MEMORY = 64_000_000
# An input that waits for this many seconds hangs.
_HANG_SECONDS = 60.0


@dataclass
class Cost:
    """The cost of the most expensive inputs.

    Attributes:
        seconds: of processor time, of the most expensive input.
        memory: bytes, of the most expensive input.
    """

    seconds: float = 0.0
    memory: int = 0


@contextlib.contextmanager
def measured(cost: Cost) -> Iterator[None]:
    """Measure a block, add it to `cost`, and end the process if the block hangs.

    Raises:
        AssertionError: the block needs too much time or memory.
    """
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True, file=sys.__stderr__)
    # Reset the peak of resident memory.
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _memory("VmRSS"), time.process_time()
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        seconds, memory = time.process_time() - began, _memory("VmHWM") - before
        cost.seconds, cost.memory = max(cost.seconds, seconds), max(cost.memory, memory)
        assert seconds < MOST_SECONDS, f"{seconds:.1f} s of processor time"
        assert memory < MOST_MEMORY, f"{memory / 1e6:.0f} MB"


def _memory(name: str) -> int:
    """Return a field of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)
