"""Host memory for tensors' contents."""

from collections.abc import Callable

import numpy as np

#: The bytes of a cache line. Copies to unaligned memory take 1.3 times as long.
ALIGNMENT = 64

#: Returns new host memory of the given number of bytes: uint8, one dimension.
Allocate = Callable[[int], np.ndarray]


def allocate(nbytes: int) -> np.ndarray:
    """Return new memory: uint8, aligned to `ALIGNMENT`."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + nbytes]
