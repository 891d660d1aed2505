"""The results of a benchmark: kept in files while it runs, and read again for a comparison."""

import argparse
import contextlib
import csv
import datetime
import io
import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import hvdkit
from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.agent.host_facts import usable_cores
from hvdkit.system.plain_files import read_json
from hvdkit.system.whole_files import replacing

_FORMAT = 1
# Their versions are among the conditions.
_LIBRARIES = ("torch", "tensorflow", "keras", "mpi4py", "numpy")


@dataclass
class Results:
    """The measurements of one run.

    Attributes:
        benchmark: `allreduce` or `step`.
        conditions: where and with what it was measured.
        expected: the number of units that a complete run measures.
        unit: the name of a unit, in the plural: `results` or `turns`.
        done: the number of units that have been measured.
        rows: a row for each variant and case. `turns` has the seconds of each turn.
        complete: whether the run has ended as planned.
    """

    benchmark: str
    conditions: Mapping[str, Any]
    expected: int = 0
    unit: str = "results"
    done: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def save(
        self,
        options: argparse.Namespace,
        columns: Callable[[], Sequence[Mapping[str, Any]]],
    ) -> None:
        """Write the files of `--json` and `--csv`.

        Args:
            options: the command line.
            columns: returns the rows of the table, for `--csv`.

        Raises:
            HvdkitError: a file cannot be written.
        """
        if options.json is not None:
            rows = [row for row in self.rows if row["turns"]]
            content = {"format": _FORMAT, **vars(self), "rows": rows}
            write(options.json, json.dumps(content) + "\n")
        if options.csv is not None and (found := columns()):
            write_csv(options.csv, found)

    def kept(self, options: argparse.Namespace) -> str:
        """Return a sentence about the results of a run that ended early."""
        count = f"{self.done} of {self.expected} {self.unit} were measured"
        files = [str(path) for path in (options.json, options.csv) if path is not None]
        if not self.done:
            return "nothing was measured."
        if files:
            return f"{count}; they are in {' and '.join(files)}."
        return f"{count}; they are printed above."


@contextlib.contextmanager
def kept_on_failure(
    results: Results, options: argparse.Namespace, save: Callable[[], None]
) -> Iterator[None]:
    """If the benchmark fails or is interrupted, save the results, and report how many there are."""
    try:
        yield
    except KeyboardInterrupt:
        if results.done:
            save()
        options.when_ended = results.kept(options)
        raise
    except UsageError:
        raise
    except HvdkitError as error:
        if results.done:
            save()
        raise HvdkitError(f"{error}\n{results.kept(options)}") from error


def conditions(**further: Any) -> dict[str, Any]:
    """Return where and when this run measures."""
    return {
        "hvdkit": hvdkit.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": usable_cores(),
        "processor": _processor(),
        "versions": {name: found for name in _LIBRARIES if (found := _version(name))},
        "load_before": round(psutil.getloadavg()[0], 2),
        **further,
    }


def _processor() -> str:
    """Return the name of the processor, as Linux knows it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def load(path: Path, benchmark: str, option: str) -> Results:
    """Return the results of an earlier run.

    Args:
        path: the file.
        benchmark: the expected benchmark.
        option: the option that names the file, for errors.

    Raises:
        UsageError: the file was not written by `--json`, or another benchmark wrote it.
    """
    with damaged(path, option):
        try:
            content = read_json(path)
        except OSError as error:
            raise UsageError(f"{option} {path} cannot be read: {error.strerror}") from error
        version, of = content.pop("format"), content["benchmark"]
        found = Results(**content) if version == _FORMAT else None
    if found is None or found.benchmark != benchmark:
        raise UsageError(
            f"{option} {path} is of `hvdkit bench {of}`, format {version}; expected "
            f"`hvdkit bench {benchmark}`, format {_FORMAT}"
        )
    return found


@contextlib.contextmanager
def damaged(path: Path, option: str) -> Iterator[None]:
    """Convert errors of a damaged file into a UsageError that names the file."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UsageError(
            f"{option} {path} is damaged ({type(error).__name__}: {error}), or no file of `hvdkit "
            f"bench`; expected a file of --json"
        ) from error


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same columns.

    Raises:
        HvdkitError: the file cannot be written.
    """
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write(path, stream.getvalue())


def write(path: Path, text: str) -> None:
    """Write a file, see `replacing`.

    Raises:
        HvdkitError: the file cannot be written.
    """
    try:
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise HvdkitError(f"cannot write {path}: {error.strerror}") from error
