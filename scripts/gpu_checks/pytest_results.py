"""A pytest plugin that writes each result at once: `-p gpu_checks.pytest_results`.

pytest writes its own JUnit file when a run ends, so a run that is killed would leave no results.
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
        # The phase `call` has the result of a test. Setup and teardown count only if they fail or
        # skip.
        if report.when == "call" or report.outcome != "passed":
            text = report.longreprtext if report.failed else ""
            self._write(test=report.nodeid, outcome=report.outcome, text=text)
