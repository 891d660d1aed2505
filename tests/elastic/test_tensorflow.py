"""Elastic training with Keras and TensorFlow on one host."""

import os
import random
import signal

import pytest

from hvdkit.checkpoint.store import Store
from tests.elastic.jobs import ElasticJob
from tests.elastic.training import (
    EPOCHS,
    KERAS,
    TENSORFLOW,
    TENSORFLOW_KERAS,
    batches_in_order,
    check,
)
from tests.ranks.rank_pool import Configuration, skip_where_unsupported

LIMITS = ("--min-np", "1", "--max-np", "2")
KINDS = {
    "keras-torch": KERAS,
    "keras-tensorflow": KERAS,
    "tensorflow": TENSORFLOW,
    "tensorflow-keras": TENSORFLOW_KERAS,
}


def start(folder, kind, **env):
    framework = "tensorflow" if kind == "tensorflow-keras" else kind
    skip_where_unsupported(Configuration(framework, "gloo", 2))
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(KINDS[kind])
    env |= {"KERAS_BACKEND": framework.removeprefix("keras-"), "TF_CPP_MIN_LOG_LEVEL": "3"}
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


#: The magnitude of gradients changes, and sums of fp16 overflow.
FP16 = {"COMPRESSION": "fp16", "MAGNITUDES": "1"}


@pytest.mark.long
@pytest.mark.parametrize("env", [{}, FP16 | {"ACCUMULATION": "2"}], ids=["plain", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_shrinks_and_grows(tmp_path, kind, env):
    with start(tmp_path, kind, **env) as job:
        job.wait_for("batch 0 2 ")
        job.set_hosts("localhost:1")
        job.wait_for(r"begin 0 \d+ size 1 resets \[1\]")
        job.wait_for("batch ")
        job.set_hosts("localhost:2")
        job.wait_for(r"begin \d \d+ size 2 resets \[2\]")
        assert job.finish() == 0
        check(job.lines, ranks=2)


def kill_after(job, epoch, batch):
    """Kill rank 0 after a batch, before the checkpoint of this batch."""
    os.kill(int(job.wait_for(rf"batch {epoch} {batch} (\d+)")[1]), signal.SIGKILL)
    job.wait_for("rank 0 on localhost failed: killed by signal 9")


@pytest.mark.parametrize(
    ("kind", "commit_batches", "checkpoint_steps", "folder"),
    [
        ("keras-torch", 3, 1, "steps-of-rank{0}"),
        pytest.param("keras-tensorflow", 3, 1, "steps", marks=pytest.mark.long),
        pytest.param("keras-torch", 1, 5, "steps", marks=pytest.mark.long),
        pytest.param("keras-torch", 3, 5, "steps-of-start{1}", marks=pytest.mark.long),
        pytest.param("keras-tensorflow", 1, 100, "steps", marks=pytest.mark.long),
    ],
)
def test_fit_with_checkpoints_continues_from_the_commit(
    tmp_path, kind, commit_batches, checkpoint_steps, folder
):
    """The newest checkpoint is newer or older than the commit, or there is none."""
    steps = {"COMMIT_BATCHES": str(commit_batches), "CHECKPOINT_STEPS": str(checkpoint_steps)}
    with start(tmp_path, kind, FOLDER=folder, **steps) as job:
        for epoch in range(EPOCHS):
            kill_after(job, epoch, 5)
            committed = 5 - 5 % commit_batches
            job.wait_for(rf"begin {epoch} {committed} size 2 resets \[2\]")
        assert job.finish() == 0
        check(job.lines, ranks=2, trained=batches_in_order(2))
    if folder == "steps-of-start{1}":
        return  # The folder of the last start has its steps only.
    batches = len(batches_in_order(2))
    assert job.text.count(f"counted {EPOCHS} {batches} {batches}") == 2
    assert Store(tmp_path / folder.format(0)).steps()[-1].step == batches


def drawn(draw):
    """Return the environment of a job."""
    return {
        "COMPRESSION": draw.choice(["none", "bf16", "int8", "fp16", "fp16"]),
        "ACCUMULATION": str(draw.choice([1, 1, 3, 5])),
        "MAGNITUDES": str(draw.choice([0, 1, 1])),
        "COMMIT_BATCHES": str(draw.choice([1, 2, 4])),
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_killed_job_ends_with_the_bits_of_an_undisturbed_job(tmp_path, kind, seed):
    draw = random.Random(f"{kind} {seed}")
    # The settings of which a commit must contain most are among those of each kind.
    env = FP16 | {"ACCUMULATION": "3"} if seed == 0 else drawn(draw)
    with start(tmp_path / "undisturbed", kind, **env) as job:
        assert job.finish() == 0, job.text
        expected = job.text
    with start(tmp_path / "killed", kind, **env) as job:
        job.set_pause(0.3)
        for epoch in range(EPOCHS):
            batch = draw.randrange(4, 11)
            pid = int(job.wait_for(rf"batch {epoch} {batch} (\d+)")[1])
            os.kill(pid, signal.SIGKILL)
            job.wait_for(r"begin \d \d+ size 2 resets \[2\]")
        assert job.finish() == 0, job.text
    assert trained(job.text) == trained(expected), env


def trained(text):
    """Return the final weights of all ranks, with all digits."""
    found = sorted(line for line in text.splitlines() if "] trained " in line)
    assert len(found) == 2
    return found
