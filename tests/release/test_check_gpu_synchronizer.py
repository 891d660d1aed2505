"""The results of a test run in scripts/check_gpu; see gpu_checks.synchronizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

TESTS = """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError("in the teardown")

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_fails_late(broken): pass
@pytest.mark.skip
def test_skips(): pass
def test_ends_the_process():
    import os
    os._exit(3)
def test_never_runs(): pass
"""

ON_RANKS = """on torch-gloo-2:
=== rank 0 died ===
=== rank 1 failed ===
Traceback (most recent call last):
  File "test_x.py", line 3, in test_x
    torch.testing.assert_close(a, b)
AssertionError: Tensor-likes are not close!

Mismatched elements: 1 / 6
--- last output of rank 1 ---
[rank 1] a warning
"""


@pytest.fixture
def synchronizer(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from gpu_checks import synchronizer

    return synchronizer


def test_a_run_that_ends_in_the_middle_leaves_its_results(synchronizer, tmp_path):
    (tmp_path / "test_x.py").write_text(TESTS)
    lines = tmp_path / "lines"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_x.py"),
            *("-p", "gpu_checks.pytest_results", f"--results={lines}"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == 3, ended.stdout
    results = synchronizer.Results(json.loads(line) for line in lines.read_text().splitlines())
    assert results.collected == 6
    assert results.passed == 1
    assert results.skipped == 1
    assert list(results.failed) == ["test_x.py::test_fails", "test_x.py::test_fails_late"]
    assert results.running == "test_x.py::test_ends_the_process"
    assert results.not_run == 2
    texts = [synchronizer.error_line(text) for text in results.failed.values()]
    assert "test_x.py" in texts[0]
    assert "AssertionError" in texts[0]
    assert "OSError" in texts[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ON_RANKS, "AssertionError: Tensor-likes are not close! / Mismatched elements: 1 / 6"),
        (
            "on torch-gloo-2:\n=== rank 1 died ===\n--- last output of rank 1 ---\nx",
            "rank 1 died; last output of rank 1",
        ),
        ("torch-gloo-1 did not start\nImportError: libnccl", "ImportError: libnccl"),
        ("", ""),
    ],
    ids=["ranks", "died", "start", "nothing"],
)
def test_an_error_in_one_line(synchronizer, text, expected):
    assert synchronizer.error_line(text) == expected
