"""A process beside an agent, which ends the processes of the job if the agent is killed.

The kernel ends ranks whose agent is killed, but not the processes that the ranks have started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Callable

from hvdkit.processes import ProcessGroup
from hvdkit.signals import STOP_SIGNALS

_POLL_SECONDS = 0.1


class Guard:
    """End the processes of `group` when this process ends without calling `close`.

    Args:
        group: the group. Processes that the group starts later are found by the group's id.
        grace: the seconds between SIGTERM and SIGKILL.
        finish: called in the guard's process after the processes of the group have ended.
    """

    def __init__(self, group: ProcessGroup, grace: float, finish: Callable[[], None]) -> None:
        read_end, self._write_end = os.pipe()
        with warnings.catch_warnings():
            # Other threads may exist. The new process uses none of their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            # An exception must not reach the caller, whose code must not run in this process.
            with contextlib.suppress(BaseException):
                _run(read_end, group, grace, finish)
            os._exit(0)
        os.close(read_end)

    def close(self) -> None:
        """End the guard. Call it after the processes of the group have ended."""
        # SIGKILL also ends a guard that is stopped, for which this process would wait without end.
        # Before the pipe is closed, which tells the guard that this process has ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._write_end)


def _run(read_end: int, group: ProcessGroup, grace: float, finish: Callable[[], None]) -> None:
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A signal to the agent's process group must not end this process.
    os.setsid()
    # mpirun, srun and ssh wait for the ends of their pipes.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != read_end:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    os.read(read_end, 1)  # nothing is written: it returns when the other process ends
    try:
        for _ in group.terminate(grace):
            time.sleep(_POLL_SECONDS)
    finally:
        finish()
