"""Run the actions of `hvdkit checkpoint` on a `Store`, and print the results.

`command` parses the arguments and calls these functions.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from hvdkit.checkpoint import tensors
from hvdkit.checkpoint.errors import CheckpointError, Damaged
from hvdkit.checkpoint.manifest import Manifest
from hvdkit.checkpoint.pruning import of_older_runs, prunable
from hvdkit.checkpoint.reading import OpenCheckpoint
from hvdkit.checkpoint.retention import Retention
from hvdkit.checkpoint.state import TensorSpec
from hvdkit.checkpoint.storage import Entry
from hvdkit.checkpoint.store import Store
from hvdkit.console.tables import Console
from hvdkit.errors import UsageError
from hvdkit.system.plain_files import printable

_PLAIN_STEP = 10  # percent between two plain lines


def list_steps(store: Store, console: Console) -> None:
    """Print a table of all steps, oldest first; the large files are not read.

    Raises:
        UsageError: the folder does not exist.
        CheckpointError: the folder cannot be read.
    """
    _expect_folder(store)
    entries, quarantined = store.entries(), store.quarantined()
    if not entries and not quarantined:
        inside = store.location.rpartition("/")[2].startswith("step-")
        hint = ": this is a step; give its parent folder" if inside else ""
        _print(console, f"no steps in {store.location}{hint}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    runs = {entry.run for entry in entries}
    for column in ("step", "epoch", "size", "age"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("metrics")
    table.add_column("state")
    if len(runs) > 1:
        table.add_column("run", justify="right")
    for entry in entries:
        cells = (*_row(entry), str(entry.run))
        table.add_row(*cells[: len(table.columns)])
    console.print(table, highlight=False)
    for entry in entries:
        if entry.error is not None:
            _print(console, f"{entry.name} is {_problem_of(entry.error)}: {entry.error}")
    for name in quarantined:
        _print(console, f"{name} is damaged and in quarantine")


def open_step(store: Store, step: int | None, run: int | None = None) -> OpenCheckpoint:
    """Open `step` or the newest good step, of `run` or the newest run.

    Raises:
        UsageError: the folder or the step does not exist, or there are no steps.
        CheckpointError: the step is damaged or cannot be read.
    """
    _expect_folder(store)
    # Do not quarantine: this command changes nothing.
    opened = store.newest_good(step, run, quarantine=False)
    if opened is None:
        raise UsageError(
            f"there are no steps in {store.location}; expected a folder of checkpoints."
        )
    return opened


def show_step(opened: OpenCheckpoint, console: Console) -> None:
    """Print all that a step says of itself: versions, metrics, parts, files."""
    manifest, outline = opened.manifest, opened.outline
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    rows = [
        ("step", str(manifest.step)),
        ("epoch", _epoch(manifest)),
        ("saved", f"{saved} ({_age(manifest)} ago), as commit {manifest.commit}"),
        ("run", str(manifest.run)),
        ("by", f"{_count(manifest.world_size, 'rank')}; {_pairs(manifest.versions)}"),
        ("metrics", _metrics(manifest)),
        ("size", size_text(manifest.size)),
        ("at", opened.location),
        ("state", "good: all hashes match"),
    ]
    for name, value in rows:
        _print(console, f"{name:8} {value}")
    _print(console, "\nparts:")
    for part in outline.trees:
        _print(console, f"  {part:20} {_tensors(outline.specs.get(part, {}))}")
    _print(console, f"  {'of each rank':20} {_count(len(opened.ranks), 'rank')}")
    _print(console, "\nfiles:")
    for name, record in manifest.files.items():
        hashes = f"xxh3_128 {record.hashes[0]}"
        if len(record.hashes) > 1:
            hashes = f"{len(record.hashes)} chunks of {size_text(record.chunk_bytes)}"
        _print(console, f"  {name:28} {size_text(record.size):>9}  {hashes}")


def verify(store: Store, step: int | None, console: Console) -> bool:
    """Read and hash `step`, or all steps, and print the problems. Return whether all are good.

    Raises:
        UsageError: the step does not exist, or there are no steps.
        CheckpointError: the folder cannot be read.
    """
    _expect_folder(store)
    entries = [entry for entry in store.entries() if step in (None, entry.step)]
    if not entries:
        raise UsageError(
            f"there is no step {step} in {store.location}; `hvdkit checkpoint ls {store.location}` "
            "lists them."
            if step is not None
            else f"there are no steps in {store.location}; expected a folder of checkpoints."
        )
    total = sum(entry.manifest.size for entry in entries if entry.manifest)
    verdicts: list[tuple[Entry, list[Damaged]]] = []
    unread: list[tuple[Entry, CheckpointError]] = []
    with _progress(console, "verifying", total) as progress:
        for entry in entries:
            try:
                verdicts.append((entry, store.verify_entry(entry, progress)))
            except CheckpointError as error:
                # A problem of this step only, such as a missing permission.
                unread.append((entry, error))
    for entry, problems in verdicts:
        _print(console, f"{entry.name}: {'damaged' if problems else 'good'}")
        for problem in problems:
            _print(console, f"    {problem}")
    for entry, reason in unread:
        _print(console, f"{entry.name}: not read: {reason}")
    damaged = sum(bool(problems) for _, problems in verdicts)
    summary = f"{len(verdicts) - damaged} good, {damaged} damaged"
    _print(console, summary + (f", {len(unread)} not read" if unread else ""))
    return not damaged and not unread


def prune(
    store: Store,
    retention: Retention,
    console: Console,
    *,
    damaged: bool = False,
    older_runs: bool = False,
    dry_run: bool = False,
) -> None:
    """Delete the steps of the newest run that `retention` does not keep, and print them.

    Args:
        store: where the steps are.
        retention: which steps are kept. They are verified first; a damaged step does not count.
        console: where to print.
        damaged: also delete quarantined steps.
        older_runs: also delete all steps of older runs.
        dry_run: only print what would be deleted.

    Raises:
        UsageError: the folder does not exist.
        WriterConflict: a training is writing to the folder.
        CheckpointError: the folder or a step cannot be read.
    """
    _expect_folder(store)
    _expect_metrics(retention, store)
    with contextlib.ExitStack() as resources:
        if not dry_run:
            # Lock before choosing: a training could write other steps under these names.
            writer = resources.enter_context(store.open_for_writing())
        total = sum(info.manifest.size for info in store.steps())
        with _progress(console, "verifying the steps to keep", total) as progress:
            going = prunable(store, retention, older_runs, progress)
        sizes = {entry.name: entry.size for entry in going}
        if damaged:
            sizes |= dict.fromkeys(store.quarantined(), 0)
        for name, size in sizes.items():
            _print(
                console, f"{'would delete' if dry_run else 'deleting'} {name}" + _in_brackets(size)
            )
        if not dry_run:
            writer.prune(list(sizes))
    hints = [
        hint
        for hint, useful in (
            ("--damaged deletes quarantined steps", not damaged and bool(store.quarantined())),
            (
                "--older-runs deletes steps of older runs",
                not older_runs and bool(of_older_runs(store)),
            ),
        )
        if useful
    ]
    _print(
        console,
        "; ".join(
            [
                f"{len(sizes)} {'would be deleted' if dry_run else 'deleted'}, "
                f"{size_text(sum(sizes.values()))}",
                *hints,
            ]
        ),
    )


def size_text(size: int) -> str:
    """Return a size in bytes as text; 1 MB is 1,000,000 bytes."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _row(entry: Entry) -> Sequence[str]:
    made = entry.manifest
    state = "complete" if entry.error is None else _problem_of(entry.error)
    if made is None:
        return str(entry.step), "", "", "", "", state
    age = _age(made)
    return str(entry.step), _epoch(made), size_text(made.size), age, _metrics(made), state


def _problem_of(error: CheckpointError) -> str:
    return "damaged" if isinstance(error, Damaged) else "unreadable"


def _tensors(specs: Mapping[str, TensorSpec]) -> str:
    if not specs:
        return "no tensors"
    numbers = sum(math.prod(spec.shape) for spec in specs.values())
    size = size_text(sum(map(tensors.nbytes, specs.values())))
    dtypes = ", ".join(sorted({spec.dtype for spec in specs.values()}))
    return f"{_count(len(specs), 'tensor')}, {numbers:,} numbers, {size} ({dtypes})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _epoch(manifest: Manifest) -> str:
    return "-" if manifest.epoch is None else str(manifest.epoch)


def _age(manifest: Manifest) -> str:
    """Return the time since the step was saved, by this machine's clock and the writer's."""
    seconds = time.time() - manifest.time
    if not 0 <= seconds < 10**10:
        return "?"  # One of the two clocks is wrong.
    for factor, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"


def _metrics(manifest: Manifest) -> str:
    return _pairs({name: f"{value:.4g}" for name, value in manifest.metrics.items()}) or "-"


def _pairs(values: Mapping[str, str]) -> str:
    text = ", ".join(f"{name} {value}" for name, value in values.items())
    return printable(text, one_line=True)


def _in_brackets(size: int) -> str:
    return f" ({size_text(size)})" if size else ""


def _expect_folder(store: Store) -> None:
    if not store.exists():
        raise UsageError(
            f"there is no folder {store.location}; expected a folder of checkpoints."
            if "://" not in store.location
            else f"there are no objects at {store.location}; expected the URL of checkpoints."
        )


def _expect_metrics(retention: Retention, store: Store) -> None:
    """Check that a step of the newest run has each metric by which the best step is kept."""
    steps = store.steps_of_newest_run()
    known = {name: 0.0 for info in steps for name in info.manifest.metrics}
    missing = retention.missing(known) if steps else []
    if missing:
        raise UsageError(
            f"--keep-best has the metric {missing[0]!r}; expected a metric of the steps: "
            f"{', '.join(sorted(known)) or 'none, because the steps have no metrics'}"
        )


@contextmanager
def _progress(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a callback that receives the number of bytes read since its previous call.

    On a terminal, show a progress bar. Otherwise print lines, see `_PlainProgress`.
    """
    if not console.is_terminal:
        yield _PlainProgress(console, title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


class _PlainProgress:
    """Prints a line for every tenth of a long operation."""

    #: Smaller operations, in bytes, print no lines.
    _SHORT = 2_000_000_000

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console, self._title, self._total = console, title, total
        self._done = 0

    def __call__(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        if self._total < self._SHORT:
            return
        said, parts = (100 * done // self._total // _PLAIN_STEP for done in (before, self._done))
        if parts > said:
            _print(self._console, f"{self._title}: {_PLAIN_STEP * parts} %")


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False)
