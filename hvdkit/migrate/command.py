"""`hvdkit migrate`: show or make the changes that a script of Horovod or DDP needs."""

from __future__ import annotations

import difflib
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.console.flags import add_options
from hvdkit.errors import HvdkitError
from hvdkit.migrate import files
from hvdkit.system.plain_files import printable

if TYPE_CHECKING:
    from hvdkit.migrate.project import Outcome

HELP = "migrate scripts of Horovod or DistributedDataParallel to hvdkit and today's frameworks"
EXAMPLE = (
    "  hvdkit migrate train.py          # what would change, and what is left to you\n"
    "  hvdkit migrate train.py --diff\n"
    "  hvdkit migrate src/ --write\n\n"
    "exit status: 0: nothing is left to do by hand; 1: lines are left to change by hand, or files "
    "could not be read or written; 2: wrong arguments"
)
#: Needed by this command only.
_REQUIREMENT = "libcst>=1.5"


def add_arguments(verb: ArgumentParser) -> None:
    """Add the arguments of `hvdkit migrate`."""
    verb.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file or a folder")
    add_options(
        verb,
        "| --write  change the files\n| --diff  print a unified diff, and advice on standard error",
    )


def run(options: Namespace) -> int:
    """Run `hvdkit migrate`, and return its exit status.

    Raises:
        HvdkitError: LibCST is not installed.
        UsageError: a path does not exist.
    """
    try:
        from hvdkit.migrate import project
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "libcst":
            raise
        raise HvdkitError(
            f"LibCST is not installed, which `hvdkit migrate` needs: install it with\n"
            f"  {sys.executable} -m pip install '{_REQUIREMENT}'"
        ) from error
    found = files.read(options.paths)
    outcomes = project.migrate(found.texts)
    failed: dict[Path, str] = {}
    if options.write:
        failed = _write(found, outcomes)
    out = sys.stderr if options.diff else sys.stdout
    for path, outcome in outcomes.items():
        shown = found.shown[path]
        if options.diff:
            # The bytes of the files, for `patch`. A terminal gets no control characters.
            shape = printable if sys.stdout.isatty() else str
            for line in _diff(shown, outcome):
                sys.stdout.buffer.write(shape(line).encode("utf-8", "surrogateescape"))
            for line in [*_by_hand(shown, outcome), *_notes(outcome)]:
                print(printable(line), file=out)
        else:
            print(printable("\n".join(_report(shown, outcome))), end="\n\n")
    for path, reason in {**found.unreadable, **failed}.items():
        print(printable(f"{path}: {reason}"), file=out)
    left = sum(len(each.advice) for each in outcomes.values())
    changed = [path for path, each in outcomes.items() if each.before != each.after]
    done = len(changed) - len(failed)
    print(printable(_closing(options, done, left, len(found.texts))), file=out)
    return 1 if left or found.unreadable or failed else 0


def _write(found: files.Files, outcomes: dict[Path, Outcome]) -> dict[Path, str]:
    """Write the changed files, and return file -> why it cannot be written."""
    failed = {}
    for path, outcome in outcomes.items():
        if outcome.before == outcome.after:
            continue
        try:
            files.write(path, outcome.after, mark=path in found.marked, read=found.states[path])
        except OSError as error:
            failed[found.shown[path]] = f"cannot be written: {error.strerror}"
    return failed


def _report(path: Path, outcome: Outcome) -> Iterable[str]:
    yield str(path)
    by_rule: dict[tuple[str, str], list[int]] = {}
    for each in outcome.changes:
        by_rule.setdefault((each.rule, each.text), []).append(each.line)
    for (rule, reason), lines in by_rule.items():
        yield f"  {_lines(lines)}: {rule}: {reason}"
    yield from _by_hand(path, outcome)
    yield from _notes(outcome)


def _by_hand(path: Path, outcome: Outcome) -> Iterable[str]:
    if outcome.advice:
        yield "  by hand:"
    for each in outcome.advice:
        yield f"  {path}:{each.line}: {each.text}"


def _notes(outcome: Outcome) -> Iterable[str]:
    for each in outcome.notes:
        yield f"  note, line {each.line}: {each.text}"


def _lines(lines: list[int]) -> str:
    numbers = sorted(set(lines))
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"line{'s' if len(numbers) > 1 else ''} {shown}"


def _diff(path: Path, outcome: Outcome) -> Iterable[str]:
    # Line ends stay as they are. A missing one at the end of the file is marked, as diff does.
    old, new = files.lines_of(outcome.before), files.lines_of(outcome.after)
    for line in difflib.unified_diff(old, new, str(path), str(path)):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _closing(options: Namespace, changed: int, left: int, count: int) -> str:
    """Return the last line: what has happened, and what to do next."""
    would = "changed" if options.write else "to change"
    text = f"{_count(changed, 'file')} {would} of {count} read"
    text += f", {_count(left, 'line')} left to you" if left else ", nothing left to do by hand"
    if changed and not options.write:
        paths = shlex.join(map(str, options.paths))
        text += f". Change: hvdkit migrate --write {paths}"
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
