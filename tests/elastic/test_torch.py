"""Elastic training with PyTorch on one host."""

import os
import signal

import pytest

from tests.elastic.jobs import ElasticJob
from tests.elastic.training import TORCH, check
from tests.parallel.rank_pool import Configuration, skip_where_unsupported

LIMITS = ("--min-np", "1", "--max-np", "2")


@pytest.fixture
def folder(tmp_path):
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    (tmp_path / "train.py").write_text(TORCH)
    return tmp_path


def test_a_job_shrinks_and_grows(folder):
    with ElasticJob(folder, "localhost:2", *LIMITS) as job:
        job.wait_for("batch 0 2 ")
        job.set_hosts("localhost:1")
        job.wait_for(r"begin 0 \d+ size 1 resets \[1\]")
        job.wait_for("batch ")
        job.set_hosts("localhost:2")
        job.wait_for(r"begin \d \d+ size 2 resets \[2\]")
        assert job.finish() == 0
        assert "restart 1" not in job.text
        assert {len(batch) for _, batch in check(job.lines, ranks=2)} >= {4, 8}


def test_a_rank_that_is_killed(folder):
    with ElasticJob(folder, "localhost:2", *LIMITS) as job:
        pid = int(job.wait_for(r"batch 0 3 (\d+)")[1])
        os.kill(pid, signal.SIGKILL)
        job.wait_for("rank 0 on localhost failed: killed by signal 9")
        batch = int(job.wait_for(r"begin 0 (\d+) size 2 resets \[2\]")[1])
        assert batch >= 3
        assert job.finish() == 0
        check(job.lines, ranks=2)
