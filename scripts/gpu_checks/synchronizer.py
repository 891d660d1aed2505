"""The part `synchronizer`: the tests with the marker `device`, on the device, in several jobs."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.jobs import ASYNC, FULL_PATH, SHARED_GPU, Clock
from gpu_checks.part import REPOSITORY, Setting, main
from gpu_checks.report import Report
from hvdkit.system.processes import ProcessGroup

FOLDER = "tests/ranks/torch"

#: The most important modules run first, because a run may be ended early. The others follow.
FIRST = ("device", "exactness", "dropin", "compression", "amp")

#: The tests of a dry run, as pytest's -k: one about timing, one about shapes.
DRY = "late_packing and bf16 or without_dimensions and fp16"

#: After this many failed tests a run ends. Each of them has its own line in the report.
FAILURES = 20


@dataclass(frozen=True)
class Job:
    """One run of the tests.

    Attributes:
        engine: `staged` or `nccl`.
        job: controller and number of ranks, as HVDKIT_TEST_JOBS has it.
        share: the share of the part's time. Later runs also get the time that earlier ones leave.
        full_path: whether one rank takes the full path through Horovod.
        asynchronous: whether the host continues before the GPU has completed a collective.
        only: the modules to run; all if empty.
    """

    engine: str
    job: str
    share: float
    full_path: bool = False
    asynchronous: bool = False
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        path = ", full path" if self.full_path else ""
        completion = ", asynchronous" if self.asynchronous else ""
        return f"{self.engine} engine, {self.job}{path}{completion}"


JOBS = (
    # The ranks share the GPU.
    Job("nccl", "gloo-2", 0.35),
    Job("nccl", "gloo-2", 0.25, asynchronous=True),
    Job("staged", "gloo-2", 0.15),
    Job("nccl", "mpi-2", 0.1, only=FIRST),
    Job("nccl", "gloo-1", 0.1, full_path=True, asynchronous=True, only=FIRST),
)


def run(setting: Setting, report: Report) -> None:
    """Run the tests in each job; report each test that failed, and the counts."""
    # A signal must become an ordinary exit, which also ends the tests and their ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    clock = Clock(setting.seconds)
    for i, job in enumerate(JOBS):
        if job.engine not in setting.pythons:
            report.add(str(job), "failed", "no environment has this engine: see the part build")
            continue
        share = job.share / sum(other.share for other in JOBS[i:])
        _run(setting, report, job, share * clock.left())


def _run(setting: Setting, report: Report, job: Job, seconds: float) -> None:
    name = re.sub(r"\W+", "-", f"synchronizer {job}")
    lines, log = setting.results / f"{name}.jsonl", setting.results / f"{name}.log"
    lines.unlink(missing_ok=True)
    tests = [f"{FOLDER}/test_{module}.py" for module in job.only or FIRST]
    if not job.only:
        tests.append(FOLDER)
    command = [
        *(setting.pythons[job.engine], "-m", "pytest", *tests, "-m", "device", "-v"),
        *("-p", "no:cacheprovider", "-p", "gpu_checks.pytest_results", f"--results={lines}"),
        *("--maxfail", str(FAILURES), *(("-k", DRY) if setting.dry else ())),
    ]
    env = os.environ | {
        "HVDKIT_TEST_DEVICE": setting.device,
        "HVDKIT_TEST_JOBS": job.job,
        # A rank that waits for one that has failed gives up sooner than the test's minute.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "15",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "40",
        **SHARED_GPU,
        **(FULL_PATH if job.full_path else {}),
        **(ASYNC if job.asynchronous else {}),
    }
    began = time.monotonic()
    group = ProcessGroup()
    with open(log, "wb") as output:
        try:
            process = group.start(command, env, REPOSITORY, stdout=output)
            while process.poll() is None and time.monotonic() < began + seconds:
                time.sleep(0.1)
            cut = process.poll() is None
        finally:
            # The ranks have sessions of their own; the group finds them.
            for _ in group.terminate(grace=2.0):
                time.sleep(0.05)
    took = time.monotonic() - began
    _report(report, job, Results(_read(lines)), took, f"ended after {took:.0f} s" if cut else "")


def _report(report: Report, job: Job, results: "Results", seconds: float, ending: str) -> None:
    for test, text in list(results.failed.items())[:FAILURES]:
        report.add(f"{job}: {test.rpartition('/')[2]}", "failed", error_line(text))
    if results.collected is None:
        ending = ending or f"collected no tests: see the log in {report.path.parent}"
    elif ending and results.running:
        ending += f" in {results.running.rpartition('/')[2]}"
    elif not ending and results.not_run:
        ending = f"given up after {FAILURES} failures" if results.failed else "ended too early"
    # A run that was ended early passes if its tests passed. Any other run must be complete.
    complete = results.not_run == 0 or ending.startswith("ended after")
    failed = bool(results.failed) or not results.passed or not complete
    report.add(
        str(job),
        "failed" if failed else "passed",
        ending,
        passed=results.passed,
        failed=len(results.failed),
        skipped=results.skipped,
        not_run=results.not_run,
        seconds=seconds,
    )


class Results:
    """The results of one run.

    Args:
        lines: the objects that `pytest_results` wrote.

    Attributes:
        collected: the number of tests; None if the run did not get as far.
        failed: test -> the text of its failure.
        passed: the number of tests that passed.
        skipped: the number of tests that were skipped.
        running: the test that was running when the run ended; empty if none was.
    """

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.collected: int | None = None
        self.failed: dict[str, str] = {}
        self.running = ""
        others: dict[str, str] = {}
        for line in lines:
            if "collected" in line:
                self.collected = line["collected"]
                continue
            self.running = line.get("started", "")
            if self.running:
                continue
            if line["outcome"] == "failed":
                self.failed.setdefault(line["test"], line["text"])
            else:
                others[line["test"]] = line["outcome"]
        rest = [outcome for test, outcome in others.items() if test not in self.failed]
        self.passed = rest.count("passed")
        self.skipped = rest.count("skipped")

    @property
    def not_run(self) -> int:
        """The number of tests that were collected and have no result."""
        return max((self.collected or 0) - self.passed - self.skipped - len(self.failed), 0)


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line may have been cut.
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


#: In a failed test's text: headings of the ranks' tracebacks and of their output.
_HEADING = re.compile(r"^(?:===|---) (.*) (?:===|---)$", re.MULTILINE)


def error_line(text: str) -> str:
    """Return the error of the first rank that has a traceback, in one line.

    Without a traceback: the headings, which name the ranks that died or hang, or the last line.

    Args:
        text: of a failed test, as `RankPool` composes it, or any traceback.
    """
    for section in _HEADING.split(text):
        if "Traceback (most recent call last)" in section:
            lines = section.splitlines()
            # The message follows the last indented line, and may have several lines itself.
            last = max(i for i, line in enumerate(lines) if line.startswith("  "))
            message = " / ".join(line.strip() for line in lines[last + 1 :] if line.strip())
            return (message or lines[-1].strip())[:400]
    headings = _HEADING.findall(text) or text.strip().splitlines()[-1:]
    return "; ".join(headings)[:400]


if __name__ == "__main__":
    main("synchronizer", run)
