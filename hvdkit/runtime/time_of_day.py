"""The time of day compared with the monotonic clock, which nobody can set."""

import time


def offset() -> int:
    """Return the nanoseconds since 1970, minus those of this machine's monotonic clock."""
    offsets = []
    for _ in range(5):
        before, day, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        offsets.append((after - before, day - (before + after) // 2))
    # Between two clocks, the thread may have to wait for the processor.
    return min(offsets)[1]
