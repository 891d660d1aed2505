"""The proofs of the fixes, run on an engine without the fixes: each has to fail there.

That engine is the folder HVDKIT_STOCK_ENGINE, or built here, which takes minutes unless the cache
has it.
"""

import contextlib
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hvdkit.engine import fixes
from hvdkit.ranks import RankCommand, RanksFailed, start_ranks
from tests.parallel.rank_pool import REPOSITORY

pytestmark = pytest.mark.long

# These compare with Horovod's own sources by themselves, and look at no installed engine.
ABOUT_SOURCES = ("tests/engine/test_fixes.py", "tests/engine/test_half_arithmetic.py")

PROOFS = sorted(
    proof
    for fix in fixes.FIXES
    if not fix.needed_to_build
    for proof in re.findall(r"tests/\S+?\.py(?:::\w+)?", fix.proof)
    if not proof.startswith(ABOUT_SOURCES)
)


def run(command, timeout, env=None):
    """Run `command` to its end; nothing that it started stays behind, even when time runs out."""
    return start_ranks([RankCommand(command, env or os.environ)], cwd=REPOSITORY).wait(timeout)


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """A folder with an engine that has only the fixes without which it does not build."""
    given = os.environ.get("HVDKIT_STOCK_ENGINE")
    if given:
        return Path(given).resolve()
    target = tmp_path_factory.mktemp("stock")
    build = [sys.executable, "-m", "hvdkit", "build", "--fixes", "minimal", "--target", str(target)]
    run(build, timeout=3600)
    return target


@pytest.fixture
def outcomes_on_stock(stock, tmp_path):
    """Run tests on the engine without fixes: test -> what came of it, and why."""

    def run_tests(tests):
        report = tmp_path / "report.xml"
        path = [str(stock), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "--long", f"--junitxml={report}", tests]
        # That tests fail is seen in their report.
        with contextlib.suppress(RanksFailed):
            run(command, timeout=900, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)})
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            # A test without a verdict of its own passed. An error is not a failure: it is of what
            # surrounds the test.
            verdict = next(
                (part for part in case if part.tag in ("failure", "error", "skipped")), None
            )
            outcomes[case.get("name")] = (
                ("passed", "") if verdict is None else (verdict.tag, verdict.get("message") or "")
            )
        return outcomes

    return run_tests


def test_the_engine_without_fixes_works_otherwise(outcomes_on_stock):
    control = "tests/parallel/torch/test_collectives.py::test_allreduce_averages_by_default"
    outcomes = outcomes_on_stock(control)
    assert {kind for kind, _ in outcomes.values()} == {"passed"}, outcomes


@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_fails_without_its_fix(outcomes_on_stock, proof):
    outcomes = outcomes_on_stock(proof)
    kinds = {kind for kind, _ in outcomes.values()}
    # Not each must fail: some faults are Gloo's alone. Where none did and some could not be run,
    # nothing is known.
    if "failure" not in kinds and "skipped" in kinds:
        pytest.skip(next(why for kind, why in outcomes.values() if kind == "skipped"))
    assert "failure" in kinds, outcomes
    assert "error" not in kinds, outcomes
