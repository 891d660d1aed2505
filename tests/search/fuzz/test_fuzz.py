"""The fuzzers in short form, with the seeds of defects; `--long` runs them for an hour."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.search.fuzz.listeners import LISTENERS
from tests.search.fuzz.parsers import PARSERS

ROOT = Path(__file__).parents[3]
TARGETS = [*PARSERS, *(f"listener:{name}" for name in LISTENERS)]
_LONG_SECONDS = 190


def fuzz(*arguments, timeout):
    return subprocess.run(
        [sys.executable, "-m", "tests.search.fuzz", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_seeds_and_a_few_changes_of_them():
    """All targets in one process, because imports take longest."""
    answer = fuzz("--seconds", "0.3", "--seed", "1", timeout=300)
    assert answer.returncode == 0, answer.stdout
    assert answer.stdout.count(" inputs in ") == len(TARGETS)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_many_changes(target):
    answer = fuzz("--seconds", str(_LONG_SECONDS), target, timeout=_LONG_SECONDS + 300)
    assert answer.returncode == 0, answer.stdout


def test_a_defect_is_found(tmp_path):
    """A parser that raises another error, and one that takes too much memory."""
    script = (
        "import sys; from tests.search.fuzz import __main__, parsers\n"
        "from tests.search.fuzz.parsers import Parser, simple\n"
        "seeds = lambda: [b'{\"a\": 1}']\n"
        "parsers.PARSERS.update(\n"
        "    bad=Parser(seeds, simple(lambda f, d: d.decode('ascii')), ()),\n"
        "    large=Parser(seeds, simple(lambda f, d: bytearray(b'x') * 100_000_000), ()),\n"
        ")\n"
        "sys.argv[1:] = ['--seconds', '5', '--seed', '1', 'bad', 'large']\n"
        "sys.exit(__main__.main())\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 1, answer.stdout
    assert "bad: broken by" in answer.stdout
    assert "large: broken by" in answer.stdout
