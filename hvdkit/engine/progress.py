"""Show the progress of a build: a bar on a terminal, otherwise some lines."""

from __future__ import annotations

import re
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

#: Lines of CMake's Makefiles (`[ 42%] Building…`) and of Ninja (`[12/230] Building…`).
_PERCENT = re.compile(r"\[ *(\d+)%\]")
_STEPS = re.compile(r"\[(\d+)/(\d+)\]")

_PLAIN_STEP = 10  # Percent between two lines.


def percent(line: str) -> int | None:
    """Return the progress in `line` of a build's output, in percent; None if it has none."""
    if match := _PERCENT.match(line):
        return int(match[1])
    if match := _STEPS.match(line):
        return 100 * int(match[1]) // int(match[2])
    return None


class BuildProgress:
    """Show how much of a build is done (percent) and its elapsed time. Use it in a `with` block."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._percent = 0
        self._started = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=100)

    def update(self, line: str) -> None:
        """Process one line of the build's output."""
        now = percent(line)
        # Two libraries are compiled at the same time, so the numbers may decrease: ignore that.
        if now is None or now <= self._percent:
            return
        before, self._percent = self._percent, now
        if self._bar is not None:
            self._bar.update(self._task, completed=now)
        elif now // _PLAIN_STEP > before // _PLAIN_STEP:
            elapsed = int(time.monotonic() - self._started)
            self._console.print(f"{self._title}: {now} %, {elapsed // 60}:{elapsed % 60:02d}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
