"""Interleaved timing: processes that each time one step of a variant when the part tells them to.

Every process holds several variants. In each turn, every variant of every process does one step,
in a random order, so that other load affects all variants alike.
"""

import json
import random
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.jobs import Job

#: A variant of a process: (process, variant).
Key = tuple[str, str]


class Process:
    """A job of one rank that takes turns.

    Args:
        name: of the process, in the results.
        path: of its socket; at most 107 bytes.
        start: starts the job, which gets the socket's path.
    """

    def __init__(self, name: str, path: Path, start: Callable[[str], Job]) -> None:
        self.name = name
        self.variants: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._stream: Any = None
        self._job = start(str(path))

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the process has built its variants and warmed them up.

        Raises:
            RanksFailed: the process ended.
            TimeoutError: it was not ready within `seconds`.
        """
        deadline = time.monotonic() + seconds
        self._listener.settimeout(0.2)
        while self._connection is None:
            try:
                self._connection, _ = self._listener.accept()
            except TimeoutError:
                if not self._job.running():
                    self._failed()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.name} did not start in {seconds:.0f} s") from None
        self._stream = self._connection.makefile("rw")
        self._connection.settimeout(max(deadline - time.monotonic(), 0.1))
        self.variants = self._receive()["variants"]

    def step(self, variant: str, seconds: float) -> float:
        """Return the seconds of one step of `variant`.

        Raises:
            RanksFailed: the process ended.
            TimeoutError: no answer within `seconds`.
        """
        assert self._connection is not None
        self._connection.settimeout(max(seconds, 0.1))
        self._stream.write(variant + "\n")
        self._stream.flush()
        return float(self._receive()["seconds"])

    def finish(self, seconds: float) -> None:
        """Let the process end by itself."""
        self._stream.write("\n")
        self._stream.flush()
        self._job.answers(seconds)

    def close(self) -> None:
        """End the process in any state."""
        self._job.stop()
        for opened in (self._stream, self._connection, self._listener):
            if opened is not None:
                opened.close()

    def _receive(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            self._failed()
        return json.loads(line)

    def _failed(self) -> None:
        self._job.answers(5)
        raise ValueError(f"{self.name} ended by itself; expected it to wait for commands")


def take_turns(path: str, build: Callable[[], Mapping[str, Callable[[], float]]]) -> None:
    """Serve the commands of the part, in the process of a `Process`.

    Args:
        path: of the socket.
        build: returns the variants: functions that do a step and return its seconds.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        # Connect before the build, so that the part notices if the build fails.
        connection.connect(path)
        with connection.makefile("rw") as stream:
            variants = build()
            stream.write(json.dumps({"variants": list(variants)}) + "\n")
            stream.flush()
            for line in map(str.strip, stream):
                if not line:
                    break
                stream.write(json.dumps({"seconds": variants[line]()}) + "\n")
                stream.flush()


def interleave(
    processes: Sequence[Process], turns: int, left: Callable[[], float]
) -> dict[Key, list[float]]:
    """Let all variants take turns.

    Args:
        processes: ready ones.
        turns: how many at most.
        left: returns the seconds left; no turn begins without enough of them.

    Returns:
        The seconds of each turn, for each variant of each process.
    """
    keys = [(process.name, variant) for process in processes for variant in process.variants]
    by_name = {process.name: process for process in processes}
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    longest = 0.0
    for turn in range(turns):
        if left() < 2 * longest:
            break
        began = time.monotonic()
        for process, variant in random.Random(turn).sample(keys, len(keys)):
            taken = by_name[process].step(variant, left())
            seconds[process, variant].append(taken)
        longest = max(longest, time.monotonic() - began)
    return seconds


def ratio(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Compare two variants turn by turn.

    Returns:
        The median of first / second and its quartiles, as `ratio`, `lower quartile` and `upper
        quartile`.
    """
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    if len(ratios) < 2:
        return dict.fromkeys(("ratio", "lower quartile", "upper quartile"), ratios[0])
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": middle, "lower quartile": low, "upper quartile": high}
