"""What an examination finds, line by line, and how it is shown."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape

OK, WARNING, ERROR = "ok", "warning", "error"

_MARKS = {
    OK: "[green]ok     [/green]",
    WARNING: "[yellow]warning[/yellow]",
    ERROR: "[red]error  [/red]",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: ok, warning or error.
        found: what is there.
        advice: what to do; empty where the status is ok.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.status == ERROR for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """The findings as a JSON object: `status` (the worst) and `findings`."""
    statuses = {finding.status for finding in findings}
    worst = next(status for status in (ERROR, WARNING, OK) if status in statuses)
    return json.dumps({"status": worst, "findings": [asdict(f) for f in findings]}, indent=2)


def show(findings: Sequence[Finding], console: Console) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        console.print(
            f"{_MARKS[finding.status]}  {finding.name:{width}}  {escape(finding.found)}",
            highlight=False,
        )
        if finding.advice:
            console.print(f"{'':9}{'':{width}}  -> {escape(finding.advice)}", highlight=False)
