"""Select this rank's GPU, place tensors that are read on it, and allocate memory for copies."""

import io
import logging
import pickle
import weakref
from typing import Any

import numpy as np
import torch
from torch.serialization import default_restore_location

from hvdkit.checkpoint.memory import allocate
from hvdkit.runtime.shared_gpus import gpu_of

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


def on_own_gpu(storage: Any, location: str) -> Any:
    """Place a storage that is read: on this rank's GPU if it was on any GPU.

    A `map_location` of `torch.load`. The rank that wrote the storage may have another GPU. On a
    host without a GPU, the storage stays in host memory.
    """
    if location.startswith("cuda"):
        available = torch.cuda.is_available()
        location = f"cuda:{torch.cuda.current_device()}" if available else "cpu"
    return default_restore_location(storage, location)


def loads_on_own_gpu(content: Any) -> Any:
    """Unpickle objects of another rank. Their tensors on a GPU arrive on this rank's GPU."""
    return _OwnGpuUnpickler(io.BytesIO(content)).load()


class _OwnGpuUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        """Return a global object that the pickle names."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_on_own_gpu
        return super().find_class(module, name)


def _load_on_own_gpu(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location=on_own_gpu, weights_only=False)


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
