"""Which GPU is a rank's."""

import torch


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
