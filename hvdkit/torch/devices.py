"""This rank's GPU, and host memory for copies from it."""

import logging
import weakref

import numpy as np
import torch

from hvdkit.checkpoint.memory import allocate

_log = logging.getLogger(__name__)

# cudaHostRegisterPortable: pinned for all GPUs of the process.
_PORTABLE = 1


def use_own_gpu(local_rank: int) -> None:
    """Make the GPU with the local rank's number the one that `cuda` means in this thread.

    Not where CUDA is in use already, because then the script may have chosen, and not where there
    are fewer GPUs, because then a launcher has: `torch.cuda.set_device` is always the last word.
    Nothing happens before the script uses CUDA, so that a script which never does, or which forks
    first, is left alone.
    """
    if torch.cuda.is_initialized():
        return

    def choose() -> None:
        if local_rank < torch.cuda.device_count():
            torch.cuda.set_device(local_rank)

    # Not public, and the only way to wait for a CUDA that nobody has asked for: what
    # `torch.cuda.manual_seed` does.
    torch.cuda._lazy_call(choose)


def host_memory(nbytes: int) -> np.ndarray:
    """Return new host memory: uint8, pinned if this process uses CUDA.

    Copies from a GPU to pinned memory need no second copy inside the driver. Memory that the
    system refuses to pin is ordinary memory. PyTorch's own pinned memory takes a power of two of
    bytes, and is not given back to the system.
    """
    memory = allocate(nbytes)
    if nbytes and torch.cuda.is_available() and torch.cuda.is_initialized():
        runtime = torch.cuda.cudart()
        address = memory.ctypes.data
        status = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        if status:
            _log.info("%d bytes of host memory cannot be pinned: CUDA error %d", nbytes, status)
        else:
            # Before the memory is freed: all arrays in it refer to this one. At the process's end
            # CUDA may be gone before.
            owner = memory if memory.base is None else memory.base
            weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
    return memory
