"""Jobs under faults at random moments; see command.py."""

import subprocess
import sys

import pytest

from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported


def chaos(*arguments, timeout):
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "chaos"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_jobs_under_random_faults_for_three_minutes():
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    # Another seed each time: a failure prints the seed of its job.
    said = chaos("--minutes", "3", timeout=1800)
    assert ", 0 problems" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "ranks"), [("torch", 4), ("keras-tensorflow", 4), ("keras-torch", 2)]
)
def test_a_job_that_is_killed_very_often_ends_as_one_that_is_not(framework, ranks):
    skip_where_unsupported(Configuration(framework, "gloo", ranks))
    said = chaos(
        *("--faults", "25", "--only", "SIGKILL of all ranks", "--only", "SIGKILL of a rank"),
        *("--framework", framework, "--ranks", str(ranks), "--hosts", "1", "--seed", "1"),
        timeout=3600,
    )
    assert ", 0 problems" in said
