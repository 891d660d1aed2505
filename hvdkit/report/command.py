"""`hvdkit report`: parse its arguments, make the page, and write it and its pictures."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.console.flags import add_options
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.report import theme
from hvdkit.system.plain_files import Budget
from hvdkit.system.whole_files import replacing

if TYPE_CHECKING:
    from hvdkit.report.theme import Chart
    from hvdkit.report.training_run import TrainingRun

HELP = "write a page about a training run, or a comparison of several runs"
EXAMPLE = (
    "  hvdkit report runs/digits                    # writes runs/digits/report.html\n"
    "  hvdkit report runs/fp16 runs/fp32 --compare --out comparison.html\n"
    "  hvdkit report logs/ --metrics run/metrics.jsonl --checkpoints s3://bucket/run"
)
#: The most runs in a comparison: as many as there are colours of lines.
_MOST_RUNS = len(theme.LIGHT.series)


_OPTIONS = """
--compare                 show several runs on the same axes
--out FILE                the page (default: report.html in the folder of the run; comparison.html
                          in the current folder)
--png DIR                 also write each chart as a PNG file into DIR
[records that are not in the folder of the run]
--metrics FILE            the file of a JSONLLogger
--logs DIR                the folder of `hvdkit run --output-dir`
--checkpoints PLACE       the folder of the checkpoints, or a URL
"""


def add_arguments(verb: ArgumentParser) -> None:
    """Add the arguments of `hvdkit report`."""
    verb.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a folder with the records of one run, or the file of a JSONLLogger",
    )
    add_options(verb, _OPTIONS)


def run(options: Namespace) -> int:
    """Run `hvdkit report`, and return its exit status.

    Raises:
        UsageError: the arguments are wrong, or there are no records.
        HvdkitError: matplotlib is not installed, or a file cannot be read or written.
    """
    _check(options)
    theme.check_installed()
    # Imported on use, because every command of hvdkit makes the parser.
    from hvdkit.report import comparison, page, single
    from hvdkit.report.gathering import gather

    if options.compare:
        budget = Budget()
        runs = _named([gather(place, budget=budget) for place in options.runs])
        document = comparison.document(runs)
        out = options.out or Path("comparison.html")
    else:
        (place,) = options.runs
        found = gather(
            place,
            metrics=options.metrics,
            logs=options.logs,
            checkpoints=options.checkpoints,
        )
        document = single.document(found)
        out = options.out or (place if place.is_dir() else place.parent) / "report.html"
    _write(out, page.write(document))
    print(f"wrote {out}")
    if options.png is not None:
        _write_pictures(options.png, document.charts)
        print(f"wrote {len(document.charts)} pictures to {options.png}")
    return 0


def _check(options: Namespace) -> None:
    number = len(options.runs)
    if options.compare and number < 2:
        raise UsageError("--compare was given with one run: expected at least two")
    if not options.compare and number > 1:
        raise UsageError(f"{number} runs were given: add --compare, or give one run")
    if number > _MOST_RUNS:
        raise UsageError(f"{number} runs were given: expected at most {_MOST_RUNS}")
    named = [name for name in ("metrics", "logs", "checkpoints") if getattr(options, name)]
    if options.compare and named:
        raise UsageError(
            f"--{named[0]} was given with --compare: expected each run to have its records in its "
            f"own folder"
        )


def _named(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    """Return the runs with names that differ, without the folders that all of them share."""
    parents = [os.path.dirname(os.path.abspath(run.place)) for run in runs]
    shared = os.path.commonpath(parents)
    short = [os.path.relpath(os.path.abspath(run.place), shared) for run in runs]
    names = Counter(short)
    return [
        replace(run, name=f"{name} ({place})" if names[name] > 1 else name)
        for place, (run, name) in enumerate(zip(runs, short, strict=True), 1)
    ]


def _write(path: Path, text: str) -> None:
    """Write a file in one step, so that a reader never sees a part of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise HvdkitError(
            f"cannot write {path}: {error.strerror}. Choose another file with --out"
        ) from error


def _write_pictures(folder: Path, charts: Sequence[Chart]) -> None:
    used: Counter[str] = Counter()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            name = re.sub(r"[^A-Za-z0-9_.-]+", "-", chart.key).strip("-.")[:80] or "chart"
            used[name] += 1
            number = f"-{used[name]}" if used[name] > 1 else ""
            theme.png(chart, folder / f"{name}{number}.png")
    except OSError as error:
        raise HvdkitError(
            f"cannot write pictures to {folder}: {error.strerror}. Choose another folder with --png"
        ) from error
