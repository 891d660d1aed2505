"""Tensors in the shared memory of the ranks of one host."""

import ctypes
import weakref

import torch

from hvdkit.torch import runtime


def empty(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor of shape [elements] on the CPU.

    The tensor is in shared memory if this host has several ranks, the engine supports it, and
    enough memory is left. The memory is returned when no tensor uses it any more.
    """
    size = elements * dtype.itemsize
    host_collectives = runtime.host_collectives
    address = host_collectives.allocate(size)
    if address is None:
        return torch.empty(elements, dtype=dtype, device="cpu")
    memory = (ctypes.c_char * size).from_address(address)
    # Do not release it at the end of the process: other threads may still use the tensor.
    weakref.finalize(memory, host_collectives.release, address).atexit = False
    return torch.frombuffer(memory, dtype=dtype)
