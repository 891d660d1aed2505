"""A training run, as `gathering` has found it in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.checkpoint.storage import Entry
from hvdkit.faults.start_folders import Start
from hvdkit.monitor import History, Record, metrics
from hvdkit.monitor.records import Run

#: The most characters of an explanation on the page.
LONGEST_EXPLANATION = 20_000


@dataclass(frozen=True)
class StartFolder:
    """One start in a folder of `hvdkit run --output-dir`.

    Attributes:
        path: the folder of the start.
        began: the time of the start, in seconds since 1970.
        start: the description of the start; None if an older hvdkit has started it.
        ranks: the number of ranks.
        explanation: the output of `hvdkit why`, of which one character more than
            `LONGEST_EXPLANATION` is kept; empty without a failure or a stall.
    """

    path: Path
    began: float
    start: Start | None
    ranks: int
    explanation: str = ""

    @property
    def failed(self) -> bool:
        """Whether the start has failed; not if it was stopped on request."""
        if self.start is None:
            return bool(self.explanation)
        return self.start.failed

    @property
    def end(self) -> str:
        """One line about the end of the start."""
        start = self.start
        if start is None:
            return self.explanation.partition("\n")[0] or "no end was recorded"
        if start.ended is not None:
            if start.hosts_changed:
                return "ended to start on other hosts"
            return start.reason or ("succeeded" if start.status == 0 else f"status {start.status}")
        if start.running:
            return "still runs"
        if start.running is None:
            return "no end was recorded: it still runs, or its launcher was killed"
        return "no end was recorded: the launcher was killed"


@dataclass(frozen=True)
class TrainingRun:
    """The records of one training, with all its restarts.

    Attributes:
        name: the name in charts and tables.
        place: the folder or file that was given.
        history: the content of the file of a `JSONLLogger`; empty without such a file.
        metrics_file: the path of this file; None without such a file.
        starts: the starts by `hvdkit run --output-dir`, oldest first; empty if unknown.
        checkpoints: the steps of the newest run in the folder of checkpoints, oldest first.
        checkpoint_folder: the folder or URL; empty without one.
        notes: what the reader should know about the sources, in sentences.
    """

    name: str
    place: Path
    history: History = field(default_factory=History)
    metrics_file: Path | None = None
    starts: Sequence[StartFolder] = ()
    checkpoints: Sequence[Entry] = ()
    checkpoint_folder: str = ""
    notes: Sequence[str] = ()

    @property
    def records(self) -> list[Record]:
        """The valid records, in the order of their steps."""
        return self.history.records

    @property
    def parts(self) -> list[Run]:
        """The parts of the run between restarts, as the monitor has written them."""
        return self.history.runs

    @property
    def began(self) -> float | None:
        """The time of the first start, in seconds since 1970."""
        times = [start.began for start in self.starts] + [part.time for part in self.parts]
        return min(times, default=None)

    @property
    def ended(self) -> float | None:
        """The time of the last event that was recorded."""
        times = [record.time for record in self.records]
        times += [each.start.ended for each in self.starts if each.start and each.start.ended]
        return max(times, default=None)

    @property
    def last_start(self) -> Start | None:
        """The description of the newest start; None if unknown."""
        return self.starts[-1].start if self.starts else None

    @property
    def steps(self) -> int | None:
        """The step of the last record; None without records."""
        return self.records[-1].step if self.records else None

    @property
    def restarts(self) -> list[int]:
        """The steps at which the training has resumed."""
        return [part.step for part in self.parts[1:]]

    @property
    def wire_formats(self) -> list[str]:
        """The names of the wire formats; empty if unknown."""
        return sorted({name for part in self.parts for name in part.wire_formats})

    @property
    def own_names(self) -> list[str]:
        """The names of the user's metrics, losses first."""
        names = {name for record in self.records for name in record.metrics}
        return sorted(names - metrics.METRICS.keys(), key=lambda name: (not is_loss(name), name))

    def has(self, name: str) -> bool:
        """Return whether a record has the metric."""
        return any(name in record.metrics for record in self.records)


def is_loss(name: str) -> bool:
    """Return whether a metric is a loss, by its name."""
    return "loss" in name.lower()
