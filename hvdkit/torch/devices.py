"""Select this rank's GPU, and allocate host memory for copies from it."""

import logging
import weakref

import numpy as np
import torch

from hvdkit.checkpoint.memory import allocate
from hvdkit.core.shared_gpus import gpu_of

_log = logging.getLogger(__name__)

# cudaHostRegisterPortable: pinned for all GPUs of the process.
_PORTABLE = 1


def use_own_gpu(local_rank: int) -> None:
    """Make the GPU of the local rank the current device of this thread (`gpu_of`).

    Do nothing if CUDA is in use, because the script may have chosen a GPU. Do nothing if this
    process sees no GPU with that number, because then the launcher has chosen a GPU for it. A later
    `torch.cuda.set_device` takes precedence.
    The selection happens when the script first uses CUDA, so a script that does not use CUDA, or
    forks before, is unaffected.
    """
    if torch.cuda.is_initialized():
        return

    def choose() -> None:
        number = gpu_of(local_rank, torch.cuda.device_count())
        if number is not None:
            torch.cuda.set_device(number)

    # `_lazy_call` is private, but there is no other way to wait for the first use of CUDA.
    # `torch.cuda.manual_seed` uses it, too.
    torch.cuda._lazy_call(choose)


def host_memory(nbytes: int) -> np.ndarray:
    """Return new host memory: uint8, pinned if this process uses CUDA.

    Copies from a GPU to pinned memory need no second copy inside the driver. If the memory cannot
    be pinned, it stays ordinary memory. PyTorch's pinned memory is not used, because its size is a
    power of two and it is never returned to the system.
    """
    memory = allocate(nbytes)
    if nbytes and torch.cuda.is_available() and torch.cuda.is_initialized():
        runtime = torch.cuda.cudart()
        address = memory.ctypes.data
        status = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        if status:
            _log.info("%d bytes of host memory cannot be pinned: CUDA error %d", nbytes, status)
        else:
            # Unregister before the memory is freed: all arrays in it refer to this owner. Not at
            # the end of the process, when CUDA may be shut down.
            owner = memory if memory.base is None else memory.base
            weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
    return memory
