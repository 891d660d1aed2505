"""One rank's process, as the agent of its host sees it."""

from __future__ import annotations

import os
import subprocess

import psutil

from hvdkit.faults.verdict import STOPPED

_STREAMS = ("stdout", "stderr")
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class RankProcess:
    """One rank's process, and the pipes for its output.

    Args:
        rank: the rank.
        process: its process.

    Attributes:
        reported: whether the launcher knows that it has ended.
        pipes: the descriptor of each open pipe -> the name of the stream.
    """

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.reported = False
        self.pipes: dict[int, str] = {}
        for stream, pipe in zip(_STREAMS, (process.stdout, process.stderr), strict=True):
            if pipe is not None:  # None: the rank writes to the user's terminal
                os.set_blocking(pipe.fileno(), False)
                self.pipes[pipe.fileno()] = stream

    def state(self) -> str:
        """Return `STOPPED` if the process or one of its children is stopped; "" otherwise."""
        try:
            process = psutil.Process(self.process.pid)
            family = [process, *process.children(recursive=True)]
            stopped = any(p.status() in _STOPPED for p in family)
        except psutil.Error:
            return ""
        return STOPPED if stopped else ""

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.pipes.clear()
