"""The guard of a rank: a process that stops and continues the rank between its turns.

The rank forks the guard before it starts threads. A rank that is stopped cannot execute commands,
so the guard has a connection of its own. The guard ends with the rank. If the benchmark has ended,
the guard lets the rank end, and kills it after some seconds: the rank may wait for another rank
that does not exist any more.
"""

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil

from hvdkit.bench import control
from hvdkit.system.processes import die_with_parent

_END_SECONDS = 5.0


def fork(spec: Mapping[str, Any], rank: int) -> None:
    """Start the guard of this process."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        die_with_parent()
        if os.getppid() == parent:
            try:
                _serve(control.connect(spec, control.GUARD, rank), psutil.Process(parent))
            finally:
                time.sleep(_END_SECONDS)
                os.kill(parent, signal.SIGKILL)
    finally:
        os._exit(0)


def _serve(runner: control.Peer, rank: psutil.Process) -> None:
    try:
        while (message := runner.receive()) is not None:
            answer: dict[str, Any] = {}
            if message["do"] == "stop":
                rank.send_signal(signal.SIGSTOP)
            elif message["do"] == "continue":
                rank.send_signal(signal.SIGCONT)
            else:
                times = rank.cpu_times()
                answer = {"cpu": times.user + times.system, "memory": rank.memory_full_info().uss}
            runner.send(answer)
    finally:
        # The runner has ended: the rank must notice it, and end.
        rank.send_signal(signal.SIGCONT)
