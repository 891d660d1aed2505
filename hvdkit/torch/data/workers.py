"""Protect the worker processes of a `DataLoader` from a SIGTERM to all processes of a job."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader


def shield_workers(loader: Any) -> None:
    """Make the workers of a `DataLoader` ignore SIGTERM, unless their own rank sends it.

    Slurm and container runtimes send SIGTERM to every process of a job. The rank saves a checkpoint
    then, and needs its workers until the step is complete. Workers end with their rank in any case.
    An object that is not a `DataLoader` stays unchanged.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, _ShieldedInit):
        loader.worker_init_fn = _ShieldedInit(loader.worker_init_fn)


class _ShieldedInit:
    """A `worker_init_fn` that calls another one; a class, because `spawn` pickles it."""

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker: int) -> None:
        # A handler in Python does not know the sender, so a thread waits for the blocked signal.
        parent = os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_signal_of, args=(parent,), daemon=True).start()
        if self._inner is not None:
            self._inner(worker)


def _exit_on_signal_of(parent: int) -> None:
    while True:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == parent:
            os._exit(0)
