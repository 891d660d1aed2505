"""Elastic training with Keras and TensorFlow on one host."""

import os
import signal

import pytest

from tests.elastic.jobs import ElasticJob
from tests.elastic.training import KERAS, TENSORFLOW, batches_in_order, check
from tests.parallel.rank_pool import Configuration, skip_where_unsupported

LIMITS = ("--min-np", "1", "--max-np", "2")
KINDS = {
    "keras-torch": KERAS,
    "keras-tensorflow": KERAS,
    "tensorflow": TENSORFLOW,
}


def start(folder, kind):
    skip_where_unsupported(Configuration(kind, "gloo", 2))
    (folder / "train.py").write_text(KINDS[kind])
    env = {"KERAS_BACKEND": kind.removeprefix("keras-"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return ElasticJob(folder, "localhost:2", *LIMITS, env=env)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS])
def test_a_rank_is_killed(tmp_path, kind):
    with start(tmp_path, kind) as job:
        pid = int(job.wait_for(r"batch 0 3 (\d+)")[1])
        os.kill(pid, signal.SIGKILL)
        job.wait_for("rank 0 on localhost failed: killed by signal 9")
        assert int(job.wait_for(r"begin 0 (\d+) size 2 resets \[2\]")[1]) >= 3
        assert job.finish() == 0
        check(job.lines, ranks=2, trained=batches_in_order(2))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_shrinks_and_grows(tmp_path, kind):
    with start(tmp_path, kind) as job:
        job.wait_for("batch 0 2 ")
        job.set_hosts("localhost:1")
        job.wait_for(r"begin 0 \d+ size 1 resets \[1\]")
        job.wait_for("batch ")
        job.set_hosts("localhost:2")
        job.wait_for(r"begin \d \d+ size 2 resets \[2\]")
        assert job.finish() == 0
        check(job.lines, ranks=2)
