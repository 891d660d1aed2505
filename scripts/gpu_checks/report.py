"""The results of the parts: a JSON file per part, and all of them as Markdown."""

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: "measured" is a figure without a limit, which cannot fail.
OUTCOMES = ("passed", "failed", "skipped", "measured")

SUMMARY = "gpu.md"


class Skip(Exception):
    """Raised inside `Report.check`: the machine lacks what the check needs."""


@dataclass
class Check:
    """One result.

    Attributes:
        name: what was checked.
        outcome: one of `OUTCOMES`.
        detail: one line for a reader.
        values: figures, with units in their names (`seconds`, `bytes_per_second`).
    """

    name: str
    outcome: str
    detail: str = ""
    values: dict[str, Any] = field(default_factory=dict)


class Report:
    """The results of one part. Each is on disk as soon as it is known.

    Args:
        folder: where `PART.json` is written.
        part: the part's name.
        machine: facts about the machine, as `command.machine` returns them.
    """

    def __init__(self, folder: Path, part: str, machine: Mapping[str, Any]) -> None:
        self.path = folder / f"{part}.json"
        self.checks: list[Check] = []
        self._part = part
        self._machine = dict(machine)
        self._began = time.time()
        self._write(finished=False)

    def add(self, name: str, outcome: str, detail: str = "", **values: Any) -> None:
        """Record one result, print it and write the file."""
        assert outcome in OUTCOMES, outcome
        self.checks.append(Check(name, outcome, detail, values))
        self._write(finished=False)
        print(line(self.checks[-1]), flush=True)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Record how the block ends: passed, failed with its exception, or skipped.

        Yields:
            A dict for figures; its item "detail" is the line for the reader.
        """
        values: dict[str, Any] = {}
        try:
            yield values
        except Skip as skip:
            self.add(name, "skipped", str(skip))
        except Exception as error:
            traceback.print_exc()
            values.pop("detail", None)
            self.add(name, "failed", f"{type(error).__name__}: {error}"[:1500], **values)
        else:
            detail = values.pop("detail", "")
            self.add(name, "passed", detail, **values)

    def finish(self) -> None:
        """Mark the part as complete: `check_gpu all` does not repeat it."""
        self._write(finished=True)

    @property
    def failed(self) -> bool:
        """Whether any check has failed."""
        return any(check.outcome == "failed" for check in self.checks)

    def _write(self, finished: bool) -> None:
        content = {
            "part": self._part,
            "machine": self._machine,
            "began": self._began,
            "seconds": round(time.time() - self._began, 1),
            "finished": finished,
            "checks": [asdict(check) for check in self.checks],
        }
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self.path)


def read(path: Path) -> dict[str, Any] | None:
    """Return the content of a part's file; None if it is missing or incomplete."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def line(check: Check) -> str:
    """Return the result as a line of a Markdown list."""
    figures = ", ".join(
        f"{name} {_figure(value)}"
        for name, value in check.values.items()
        if not isinstance(value, list | dict)  # whole outputs are in the JSON file only
    )
    said = "; ".join(filter(None, [check.detail.replace("\n", " / "), figures]))
    return f"- {check.outcome}: {check.name}" + (f": {said}" if said else "")


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_summary(folder: Path, parts: tuple[str, ...]) -> Path:
    """Write the results of the parts in `folder` as Markdown, for docs/gpu.md. Return the file."""
    lines: list[str] = []
    for part in parts:
        content = read(folder / f"{part}.json")
        if content is None:
            continue
        if not lines:
            lines += [f"{name}: {value}  " for name, value in content["machine"].items()]
        state = "" if content["finished"] else ", not finished"
        lines += ["", f"## {part} ({content['seconds']:.0f} s{state})", ""]
        lines += [line(Check(**check)) for check in content["checks"]]
    path = folder / SUMMARY
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
