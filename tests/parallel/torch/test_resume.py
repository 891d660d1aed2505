"""Kill and resume a run, which must end with the same bytes; see scripts/chaos_checkpoint."""

import subprocess
import sys

import pytest

from tests.parallel.rank_pool import (
    REPOSITORY,
    Configuration,
    skip_where_unsupported,
    start_ranks_of,
)

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


ORDER = """
import sys
import torch
import hvdkit.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
with hvd.Checkpointer(sys.argv[1], model=model, optimizer=optimizer) as checkpointer:
    found = checkpointer.restore()
    print("at", found and found.step, flush=True)
    checkpointer.save(found.step + 1 if found else 1)
hvd.shutdown()
"""


def test_a_job_that_adds_gradients_in_another_order_says_so(tmp_path):
    """Rank 0 warns, and only when the order changes."""

    def run(**env):
        command = [sys.executable, "-c", ORDER, str(tmp_path / "checkpoints")]
        results = start_ranks_of(Configuration("torch", "gloo", 2), command, env).wait(timeout=60)
        return [result.output for result in results]

    assert run() == ["at None\n"] * 2
    assert run() == ["at 1\n"] * 2
    first, second = run(HVDKIT_COLLECTIVES="flat")
    assert "step 2 was saved by a job that added gradients in another order" in first
    assert "1 host with 2 ranks, gloo, version 1 of the order; this job: no shared memory" in first
    assert second == "at 2\n"
    assert run(HVDKIT_COLLECTIVES="flat") == ["at 3\n"] * 2
