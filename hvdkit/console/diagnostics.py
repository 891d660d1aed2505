"""The results of `hvdkit doctor` and the preflight check, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

OK, WARNING, ERROR = "ok", "warning", "error"

_COLOURS = {OK: "green", WARNING: "yellow", ERROR: "red"}


@dataclass(frozen=True)
class Diagnostic:
    """One result.

    Attributes:
        name: the thing that was checked.
        status: ok, warning or error.
        found: its state.
        advice: what to do; empty if the status is ok.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def has_error(diagnostics: Sequence[Diagnostic]) -> bool:
    """Return whether the status of one or more diagnostics is ERROR."""
    return any(diagnostic.status == ERROR for diagnostic in diagnostics)


def as_json(diagnostics: Sequence[Diagnostic]) -> str:
    """Return a JSON object with `status` (the worst) and `findings` (the diagnostics)."""
    statuses = {diagnostic.status for diagnostic in diagnostics}
    worst = next(status for status in (ERROR, WARNING, OK) if status in statuses)
    return json.dumps({"status": worst, "findings": [asdict(d) for d in diagnostics]}, indent=2)


def show(diagnostics: Sequence[Diagnostic], console: Console) -> None:
    """Print a line for each diagnostic, and its advice below."""
    width = max(len(diagnostic.name) for diagnostic in diagnostics)
    for diagnostic in diagnostics:
        status = diagnostic.status
        console.print(f"{status:7}", style=_COLOURS[status], end="", highlight=False)
        console.print(f"  {diagnostic.name:{width}}  {diagnostic.found}", highlight=False)
        if diagnostic.advice:
            console.print(f"{'':9}{'':{width}}  -> {diagnostic.advice}", highlight=False)
