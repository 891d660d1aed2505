"""Show records as lines in logs, or as progress on a terminal."""

import sys
from typing import Any, TextIO

from hvdkit.monitor import metrics
from hvdkit.monitor.loggers.logger import Logger
from hvdkit.monitor.records import Record

_OF_MONITOR = metrics.METRICS.keys()
_SHOWN = (metrics.LR, metrics.GRAD_NORM, metrics.LOSS_SCALE)


class ConsoleLogger(Logger):
    """Print a line for each record, on the first rank. On a terminal, show the progress.

    Args:
        total_steps: the number of steps of the run, for the remaining time.
        file: where to print. Default: standard error.
    """

    def __init__(self, total_steps: int | None = None, file: TextIO | None = None) -> None:
        self._total = total_steps
        self._file = file
        # The progress of rich, and its task; None if it is not shown.
        self._bar: tuple[Any, Any] | None = None

    def open(self) -> None:
        """Begin the progress on a terminal."""
        file = self._file or sys.stderr
        if not file.isatty():
            return
        # Imported on use, because it takes as long as the rest of hvdkit.
        import rich.console
        import rich.progress

        progress = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed}"),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.description}"),
            console=rich.console.Console(file=file),
            refresh_per_second=4,
        )
        self._bar = progress, progress.add_task("", total=self._total)
        progress.start()

    def log(self, record: Record) -> None:
        """Show a record."""
        if self._bar is not None:
            # Square brackets are styles of rich.
            text = describe(record).replace("[", "\\[")
            progress, task = self._bar
            progress.update(task, completed=record.step, description=text)
            return
        total = f"/{self._total}" if self._total else ""
        print(
            f"step {record.step}{total}: {describe(record)}",
            file=self._file or sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """End the progress."""
        if self._bar is not None:
            self._bar[0].stop()


def describe(record: Record) -> str:
    """Return a record as one line of text."""
    found = record.metrics
    own = [name for name in found if name not in _OF_MONITOR]
    parts = [f"{name} {_short(found[name].shown)}" for name in (*own, *_SHOWN) if name in found]
    if metrics.SAMPLES in found:
        parts.append(f"{_short(found[metrics.SAMPLES].shown)} samples/s")
    step = found.get(metrics.STEP)
    if step is not None and step.mean:
        shares = [
            f"{name.removeprefix('time/')} {100 * share:.0f} %"
            for name in metrics.SECTIONS
            if name in found and (share := (found[name].mean or 0.0) / step.mean) >= 0.005
        ]
        parts.append(
            f"{1000 * step.mean:.4g} ms/step" + (f" ({', '.join(shares)})" if shares else "")
        )
    slowest = record.slowest
    if slowest is not None and len(record.ranks) > 1 and slowest.median:
        more = 100 * (slowest.seconds / slowest.median - 1)
        where = slowest.section.removeprefix("time/")
        parts.append(f"slowest: rank {slowest.rank} (+{more:.0f} %, mostly {where})")
    return ", ".join(parts)


def _short(number: float) -> str:
    """Return a number with four digits, and large ones without an exponent."""
    return f"{number:,.0f}" if 1e3 <= abs(number) < 1e9 else f"{number:.4g}"
