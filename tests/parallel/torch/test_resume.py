"""Kill and resume a run, which must end with the same bytes; see scripts/chaos_checkpoint."""

import subprocess
import sys

import pytest

from tests.parallel.rank_pool import REPOSITORY, Configuration, skip_where_unsupported

KILLS = 2
MANY = 25


def chaos(*arguments, timeout):
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "chaos_checkpoint"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_a_job_that_is_killed_ends_as_one_that_is_not(wire):
    said = chaos("--wire", wire, "--kills", str(KILLS), timeout=600)
    assert f"the same bytes after {KILLS} kills" in said


@pytest.mark.long
@pytest.mark.parametrize("wire", ["fp32", "fp16"])
def test_a_job_that_is_killed_very_often_ends_as_one_that_is_not(wire):
    said = chaos("--wire", wire, "--kills", str(MANY), timeout=3000)
    assert f"the same bytes after {MANY} kills" in said
