"""This rank's GPU, and host memory for copies from it."""

import logging

import numpy as np
import torch

_log = logging.getLogger(__name__)


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
    system refuses to pin is ordinary memory.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        try:
            pinned: np.ndarray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        except RuntimeError as error:
            _log.info("%d bytes of host memory cannot be pinned: %s", nbytes, error)
    return np.empty(nbytes, np.uint8)
