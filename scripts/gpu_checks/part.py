"""Run a part in a process of its own, with a setting and a report."""

import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from gpu_checks.report import Report

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Setting:
    """The input of a part.

    Attributes:
        device: `cuda`, or `cpu` in a dry run.
        folder: where `pack`, `work` and `results` are.
        seconds: how long the part may take.
        pythons: engine (`nccl`, `staged`) -> the interpreter of the environment that has it. In a
            dry run both are the interpreter that runs the script.
        machine: facts about the machine, for the report.
    """

    device: str
    folder: str
    seconds: float
    pythons: Mapping[str, str]
    machine: Mapping[str, Any]

    @property
    def results(self) -> Path:
        """The folder of the reports."""
        return Path(self.folder) / "results"

    @property
    def dry(self) -> bool:
        """Whether this is a dry run: on the CPU, with small sizes."""
        return self.device == "cpu"

    def to_json(self) -> str:
        """Return the setting as a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the setting for a result of `to_json`."""
        return cls(**json.loads(text))


def main(name: str, run: Callable[[Setting, Report], None]) -> None:
    """Run a part as a program: `python -m gpu_checks.NAME SETTING`."""
    # Ranks have sessions of their own, so a signal to the part's process group misses them. A
    # function of `atexit` ends them, and runs only if the signal becomes an ordinary exit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setting = Setting.from_json(sys.argv[1])
    report = Report(setting.results, name, setting.machine)
    run(setting, report)
    report.finish()
    sys.exit(1 if report.failed else 0)
