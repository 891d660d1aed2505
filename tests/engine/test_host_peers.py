"""Connect many ranks of one host."""

import resource
import subprocess

import pytest


def test_more_ranks_than_files_that_may_be_sent_at_once(build_driver):
    """Files that are being sent count for all processes of the user together, and the soft limit of
    open files holds for them. root has no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 2000:
        pytest.skip(f"the hard limit of open files is {hard}")
    command = [build_driver("host_peers_driver"), "24", "128", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("\n", "", 0)
