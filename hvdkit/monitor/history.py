"""Read the file of a `JSONLLogger`.

The file has one JSON object in each line, of one of two types.

A line of type "start" begins the file, and each part of the run after a restart:

- version: the version of the file, 1.
- step: the number of steps before this part. Records of later steps that stand before this line are
  void, because the job has resumed from this step.
- time: seconds since the epoch.
- ranks: the ranks of the job; every: steps per record; host: the hostname of the first rank.
- framework, hvdkit: versions.
- wire_formats: names of the wire formats that the first rank has used.
- units: name of a metric -> "s", "B", "1/s", "ratio" or "", for the metrics of `Monitor` itself.

A line of type "record" is one report:

- step: the number of steps since the beginning of the run.
- steps: the number of steps that the record covers. 0: only values that were logged after the last
  step.
- time: seconds since the epoch, by the clock of the first rank.
- samples: the number of samples of all ranks in these steps; 0 if unknown.
- ranks: the ranks that made these steps; the others were in `hvd.join()`.
- slowest: the fields of `hvdkit.monitor.Slowest`: rank, seconds, median, section; or null.
- metrics: name -> mean, min, max over the ranks with a finite value, or null. `by_rank` has the
  values in the order of `ranks`, in jobs of 2 to 64 ranks; null: the rank has no finite value.
  `nonfinite`, if it exists, lists the ranks whose value is NaN or infinite.

Readers ignore unknown keys, unknown types, and lines that are not JSON: the last line of a job that
was killed may be cut.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.monitor.loggers.jsonl import VERSION
from hvdkit.monitor.records import Record, Run, Slowest, Statistic
from hvdkit.system.plain_files import Budget, open_regular, parse_json, rank_number, seconds, whole

#: The longest line that is read, in characters.
LONGEST_LINE = 1_000_000


@dataclass
class History:
    """The content of a file.

    Attributes:
        runs: the parts of the run, in the order of their starts.
        records: the valid records, in the order of their steps.
        void: the records of steps that the job has made again after a restart, in the order of the
            file.
        units: metric -> unit, as in `hvdkit.monitor.metrics`.
        skipped: the number of lines that could not be read.
    """

    runs: list[Run] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    void: list[Record] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    skipped: int = 0


def read(path: str | os.PathLike[str], budget: Budget | None = None) -> History:
    """Return the history in a file of a `JSONLLogger`. The job may still be running.

    Args:
        path: the file.
        budget: the memory for the history. The rest of the file is left out. Default: no limit.

    Raises:
        OSError: the file cannot be read.
        HvdkitError: a newer hvdkit wrote it.
    """
    history = History()
    with open(open_regular(Path(path).resolve()), encoding="utf-8", errors="replace") as file:
        # A longer line is read as several ones, which are not JSON.
        while line := file.readline(LONGEST_LINE):
            if budget is not None:
                if not budget.allows(Path(path)):
                    break
                budget.spend(line)
            try:
                _add(history, parse_json(line), path)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                history.skipped += bool(line.strip())
    return history


def _add(history: History, line: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    if line["type"] == "start":
        version = int(line["version"])
        if version > VERSION:
            raise _newer(path, version)
        run = Run(
            whole(line["step"]),
            seconds(line["time"]),
            [rank_number(each) for each in line["ranks"]],
            whole(line["every"]),
            str(line["framework"]),
            tuple(str(name) for name in line.get("wire_formats", ())),
            str(line.get("host", "")),
            str(line.get("hvdkit", "")),
        )
        history.runs.append(run)
        history.units.update((name, str(unit)) for name, unit in line["units"].items())
        history.void += [each for each in history.records if each.step > run.step]
        history.records = [each for each in history.records if each.step <= run.step]
    elif line["type"] == "record":
        history.records.append(_record(line))


def _newer(path: str | os.PathLike[str], version: int) -> HvdkitError:
    return HvdkitError(
        f"{os.fspath(path)} has version {version} of the format, and this hvdkit reads version "
        f"{VERSION}: update hvdkit"
    )


def _record(line: Mapping[str, Any]) -> Record:
    ranks = [rank_number(each) for each in line["ranks"]]
    slowest = line["slowest"]
    return Record(
        whole(line["step"]),
        whole(line["steps"]),
        seconds(line["time"]),
        whole(line["samples"]),
        ranks,
        {name: _statistic(each, ranks) for name, each in line["metrics"].items()},
        slowest
        and Slowest(
            rank_number(slowest["rank"]),
            float(slowest["seconds"]),
            float(slowest["median"]),
            str(slowest["section"]),
        ),
    )


def _statistic(numbers: Mapping[str, Any], ranks: list[int]) -> Statistic:
    values = zip(ranks, numbers.get("by_rank", ()), strict=False)
    by_rank = {place: float(value) for place, value in values if value is not None}
    by_rank.update((rank_number(each), math.nan) for each in numbers.get("nonfinite", ()))
    mean, low, high = (
        None if numbers[key] is None else float(numbers[key]) for key in ("mean", "min", "max")
    )
    return Statistic(mean, low, high, by_rank)
