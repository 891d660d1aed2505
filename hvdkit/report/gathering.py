"""Find and read the records of a training in a folder."""

from __future__ import annotations

import os
import re
import time
from calendar import timegm
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.checkpoint.errors import CheckpointError
from hvdkit.checkpoint.storage import Entry, newest_run
from hvdkit.checkpoint.store import Store
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.faults import command as faults
from hvdkit.faults import start_folders
from hvdkit.monitor import History, read
from hvdkit.monitor.history import LONGEST_LINE
from hvdkit.report.numbers import count
from hvdkit.report.training_run import LONGEST_EXPLANATION, StartFolder, TrainingRun
from hvdkit.system.plain_files import Budget, open_regular, parse_json, read_text

#: How many levels of folders below the given folder are searched.
_DEPTH = 4
#: The most files and folders that are looked at.
_MOST_NAMES = 50_000

_START_FOLDER = re.compile(r"(\d{8}-\d{6})(?:-\d+)?")
_STEP_FOLDER = re.compile(r"(?:damaged-)?step-\d{12}\b.*")
_RANK_LOG = re.compile(r"rank\.\d+\.log")


@dataclass
class _Found:
    """The records that a search has found.

    Attributes:
        metrics: files of `JSONLLogger`.
        starts: folders of starts.
        checkpoints: folders of checkpoints.
        looked_at: the number of names that were looked at.
        unreadable: folders that could not be read.
    """

    metrics: list[Path] = field(default_factory=list)
    starts: list[Path] = field(default_factory=list)
    checkpoints: list[Path] = field(default_factory=list)
    looked_at: int = 0
    unreadable: list[Path] = field(default_factory=list)


def gather(
    place: Path,
    *,
    metrics: Path | None = None,
    logs: Path | None = None,
    checkpoints: str | None = None,
    budget: Budget | None = None,
) -> TrainingRun:
    """Read the records of one training.

    Args:
        place: the folder of the training, or the file of a `JSONLLogger`.
        metrics: the file of the `JSONLLogger`; default: the one in `place`.
        logs: the folder of `hvdkit run --output-dir`; default: the one in `place`.
        checkpoints: the folder or URL of the checkpoints; default: the one in `place`.
        budget: the memory for the records. Default: a new budget.

    Raises:
        UsageError: there are no records, or those of several trainings.
        HvdkitError: records cannot be read.
    """
    found = _Found()
    if place.is_file():
        if not _is_metrics(place):
            raise UsageError(
                f"{place} is not a file of hvdkit.monitor.JSONLLogger: its first line is not of "
                f'the type "start". Give such a file, or the folder of a run'
            )
        found.metrics.append(place)
    elif place.is_dir():
        _search(place.resolve(), found)
    else:
        raise UsageError(f"there is no {place}: expected the folder of a run, or its metrics file")
    if metrics is not None:
        if not metrics.is_file() or not _is_metrics(metrics):
            raise UsageError(
                f"--metrics is {metrics}: expected a file of hvdkit.monitor.JSONLLogger"
            )
        found.metrics = [metrics]
    if logs is not None:
        found.starts = []
        if logs.is_dir():
            found.starts = _search(logs.resolve(), _Found()).starts
        if not found.starts:
            raise UsageError(f"--logs is {logs}: expected a folder of `hvdkit run --output-dir`")
    metrics_file = _only(found.metrics, "metrics files", "--metrics", place)
    log_folder = _only({path.parent for path in found.starts}, "log folders", "--logs", place)
    if checkpoints is None:
        folder = _only(found.checkpoints, "folders of checkpoints", "--checkpoints", place)
        checkpoints = "" if folder is None else str(folder)
    hidden = f"Folders that cannot be read: {', '.join(map(str, found.unreadable))}."
    if metrics_file is None and log_folder is None and not checkpoints:
        raise UsageError(
            f"{place} has no records of a training: expected a file of hvdkit.monitor.JSONLLogger, "
            f"a folder of `hvdkit run --output-dir`, or checkpoints. Give the folder of a run, or "
            f"name its records with --metrics, --logs and --checkpoints"
            + (f". {hidden}" if found.unreadable else "")
        )
    notes = [hidden] if found.unreadable else []
    budget = budget or Budget()
    return _read(place, metrics_file, found.starts, checkpoints, notes, budget)


def _search(folder: Path, found: _Found, depth: int = _DEPTH) -> _Found:
    """Add the records in a folder to `found`. Links are not followed."""
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if depth == _DEPTH:
            raise HvdkitError(f"cannot read {folder}: {error.strerror}") from error
        found.unreadable.append(folder)
        return found
    names = {entry.name for entry in inside}
    if start_folders.START in names or (
        _START_FOLDER.fullmatch(folder.name) and any(map(_RANK_LOG.fullmatch, names))
    ):
        found.starts.append(folder)
    if any(_STEP_FOLDER.fullmatch(name) for name in names):
        found.checkpoints.append(folder)
    for entry in inside:
        found.looked_at += 1
        if found.looked_at > _MOST_NAMES:
            raise UsageError(
                f"there are more than {_MOST_NAMES:,} files in the given folder: expected the "
                f"folder of one run. Name the records with --metrics, --logs and --checkpoints"
            )
        path = Path(entry.path)
        if entry.name.startswith(".") or entry.is_symlink() or _STEP_FOLDER.fullmatch(entry.name):
            continue
        if entry.is_dir() and depth:
            _search(path, found, depth - 1)
        elif entry.name.endswith(".jsonl") and entry.is_file() and _is_metrics(path):
            found.metrics.append(path)
    return found


def _is_metrics(path: Path) -> bool:
    """Return whether the first line is that of a `JSONLLogger`."""
    try:
        with open(open_regular(path.resolve()), encoding="utf-8", errors="replace") as file:
            line = parse_json(file.readline(LONGEST_LINE))
    except (OSError, ValueError):
        return False
    return isinstance(line, dict) and line.get("type") == "start" and "version" in line


def _only(paths: Iterable[Path], what: str, option: str, place: Path) -> Path | None:
    """Return the only path; None if there is none.

    Raises:
        UsageError: there are several.
    """
    found = sorted(set(paths))
    if len(found) > 1:
        shown = ", ".join(map(str, found[:4])) + (", …" if len(found) > 4 else "")
        raise UsageError(
            f"{place} has {len(found)} {what}: {shown}. Give the folder of one run, or choose with "
            f"{option}"
        )
    return found[0] if found else None


def _read(
    place: Path,
    metrics_file: Path | None,
    folders: Sequence[Path],
    checkpoints: str,
    notes: list[str],
    budget: Budget,
) -> TrainingRun:
    history = History()
    if metrics_file is None:
        notes.append(
            "There is no file of hvdkit.monitor.JSONLLogger, so the page has no metrics. "
            "hvd.Monitor writes this file if it gets such a logger."
        )
    else:
        try:
            history = read(metrics_file, budget)
        except OSError as error:
            raise HvdkitError(f"cannot read {metrics_file}: {error.strerror}") from error
        if history.skipped:
            lines = count(history.skipped, "line")
            notes.append(f"{lines} of {metrics_file.name} could not be read and are left out.")
        if not history.records:
            notes.append(f"{metrics_file.name} has no records yet.")
    found = list(_starts(folders, notes, budget))
    chosen = _of_this_run(found, history)
    if len(chosen) < len(found):
        notes.append(
            f"The log folder also has {count(len(found) - len(chosen), 'start')} of other jobs, "
            f"made earlier and left out here."
        )
    if not found:
        notes.append(
            "There are no records of the launcher, so the page does not show failures. "
            "`hvdkit run --output-dir` writes them."
        )
    entries = _checkpoints(checkpoints, notes) if checkpoints else []
    if budget.left_out:
        notes.append(budget.note)
    return TrainingRun(
        *(str(place), place, history, metrics_file), chosen, entries, checkpoints, notes
    )


def _starts(folders: Iterable[Path], notes: list[str], budget: Budget) -> Iterator[StartFolder]:
    """Yield the starts in the order of their times."""
    described = []
    for folder in folders:
        if not budget.allows(folder):
            continue
        start = None
        try:
            text = read_text(folder / start_folders.START)
            budget.spend(text)
            start = start_folders.parse(text)
        except FileNotFoundError:
            pass
        except (HvdkitError, OSError) as error:
            notes.append(f"{folder.name}/{start_folders.START} cannot be read: {error}.")
        logs = sum(bool(_RANK_LOG.fullmatch(path.name)) for path in folder.iterdir())
        began = _time_in(folder) if start is None else start.began
        ranks = logs if start is None else start.ranks
        explanation = _explanation(folder, notes)
        described.append(StartFolder(folder, began, start, ranks, explanation))
    yield from sorted(described, key=lambda each: (each.began, each.path.name))


def _time_in(folder: Path) -> float:
    """Return the time in the name of a folder; without such a name, the time of its last change."""
    if match := _START_FOLDER.fullmatch(folder.name):
        try:
            return float(timegm(time.strptime(match[1], "%Y%m%d-%H%M%S")))
        except ValueError:
            pass
    return folder.stat().st_mtime


def _explanation(folder: Path, notes: list[str]) -> str:
    """Return the output of `hvdkit why`; empty if there is nothing to explain."""
    if not (folder / start_folders.ERROR).exists() and not (folder / faults.FOLDER).exists():
        return ""
    try:
        return faults.why(folder)[: LONGEST_EXPLANATION + 1]
    except UsageError:
        return ""
    except HvdkitError as error:
        notes.append(f"The records of the start {folder.name} cannot be read: {error}.")
        return ""


def _of_this_run(found: Sequence[StartFolder], history: History) -> list[StartFolder]:
    """Return the starts of the run that the metrics describe, oldest first.

    Without metrics, return the starts that have the same launcher as the last start.
    """
    if not found:
        return []
    if not history.runs:
        last = found[-1].start
        if last is None:
            return [found[-1]]
        return [each for each in found if each.start and each.start.launcher == last.launcher]
    first = history.runs[0].time
    before = [place for place, each in enumerate(found) if each.began <= first]
    begin = before[-1] if before else 0
    start = found[begin].start
    while start and begin and (other := found[begin - 1].start):
        # The metrics may begin after a restart, if the first start has failed early.
        if other.launcher != start.launcher:
            break
        begin -= 1
    return list(found[begin:])


def _checkpoints(place: str, notes: list[str]) -> list[Entry]:
    store = Store(place)
    if not store.exists():
        raise UsageError(f"--checkpoints is {place}: expected a folder or a URL of checkpoints")
    try:
        entries, quarantined = store.entries(), store.quarantined()
    except CheckpointError as error:
        notes.append(f"The checkpoints cannot be read: {error}.")
        return []
    run = newest_run(entries)
    chosen = [entry for entry in entries if entry.run == run]
    if len(chosen) < len(entries):
        notes.append(
            f"The folder of checkpoints also has {count(len(entries) - len(chosen), 'step')} of "
            f"older runs, left out here."
        )
    if quarantined:
        notes.append(f"Damaged checkpoints in quarantine: {', '.join(quarantined)}.")
    return chosen
