"""A pytest plugin that writes each result when it is known: `-p gpu_checks.pytest_results`.

pytest's own JUnit file is written when a run ends. A run that is killed, because its time is over
or because a driver does not return, would leave nothing.
"""

import json
from pathlib import Path
from typing import Any, TextIO

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--results", type=Path, required=True, help="a JSON object per line")


def pytest_configure(config: pytest.Config) -> None:
    """Open the file."""
    # A line is in the file as soon as it is written.
    file = open(config.getoption("--results"), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    config.add_cleanup(file.close)
    config.pluginmanager.register(_Writer(file))


class _Writer:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def _write(self, **content: Any) -> None:
        self._file.write(json.dumps(content) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test that passes or fails says so in its call; setup and teardown count when they fail,
        # and setup when it skips.
        if report.when == "call" or report.outcome != "passed":
            text = report.longreprtext if report.failed else ""
            self._write(test=report.nodeid, outcome=report.outcome, text=text)
