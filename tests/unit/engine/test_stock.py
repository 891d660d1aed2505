"""The tests of the patches fail on an engine with the minimal patches only.

HVDKIT_STOCK_ENGINE names the folder of such an engine. Without it, the test builds one, which takes
minutes if the cache has none.
"""

import contextlib
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hvdkit.engine import patches
from hvdkit.ranks import RankCommand, RanksFailed, start_ranks
from tests.ranks.rank_pool import REPOSITORY

pytestmark = pytest.mark.long

# These compare patched sources with unpatched ones, without an installed engine.
ABOUT_SOURCES = ("tests/unit/engine/test_patches.py", "tests/unit/engine/test_half_arithmetic.py")

FAILURES = 3

# A test that shows a defect only "(under valgrind…)" may pass on a stock engine.
SHOWING_TEST = r"tests/\S+?\.py(?:::\w+)?(?![\w:]| \(under)"

TESTS = sorted(
    test
    for patch in patches.series()
    if not patch.minimal
    for test in re.findall(SHOWING_TEST, patch.test)
    if not test.startswith(ABOUT_SOURCES)
)


def run(command, timeout, env=None):
    """Run `command` with a timeout, and end all its processes."""
    return start_ranks([RankCommand(command, env or os.environ)], cwd=REPOSITORY).wait(timeout)


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """A folder with an engine that has the minimal patches only."""
    given = os.environ.get("HVDKIT_STOCK_ENGINE")
    if given:
        return Path(given).resolve()
    target = tmp_path_factory.mktemp("stock")
    build = [
        sys.executable,
        "-m",
        "hvdkit",
        "build",
        "--patches",
        "minimal",
        "--target",
        str(target),
    ]
    run(build, timeout=3600)
    return target


@pytest.fixture
def outcomes_on_stock(stock, tmp_path):
    """Run tests on the stock engine; return test -> outcome and reason."""

    def run_tests(tests):
        report = tmp_path / "report.xml"
        path = [str(stock), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Some failures are enough. On a stock engine, a file of tests with timeouts takes long.
        few = f"--maxfail={FAILURES}"
        command = [sys.executable, "-m", "pytest", "--long", few, f"--junitxml={report}", tests]
        # The report has the failed tests.
        with contextlib.suppress(RanksFailed):
            run(command, timeout=900, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)})
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            # A test without such an element passed. An error is a failure of a fixture.
            verdict = next(
                (part for part in case if part.tag in ("failure", "error", "skipped")), None
            )
            outcomes[case.get("name")] = (
                ("passed", "") if verdict is None else (verdict.tag, verdict.get("message") or "")
            )
        return outcomes

    return run_tests


def test_the_stock_engine_works(outcomes_on_stock):
    control = "tests/ranks/torch/test_collectives.py::test_allreduce_averages_by_default"
    outcomes = outcomes_on_stock(control)
    assert {kind for kind, _ in outcomes.values()} == {"passed"}, outcomes


@pytest.mark.parametrize("test", TESTS)
def test_the_test_of_a_patch_fails_without_it(outcomes_on_stock, test):
    outcomes = outcomes_on_stock(test)
    kinds = {kind for kind, _ in outcomes.values()}
    # Not each case must fail: some defects are in Gloo only. If none failed and some were skipped,
    # the test decides nothing.
    if "failure" not in kinds and "skipped" in kinds:
        pytest.skip(next(why for kind, why in outcomes.values() if kind == "skipped"))
    assert "failure" in kinds, outcomes
    assert "error" not in kinds, outcomes
