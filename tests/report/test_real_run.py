"""The page of a real job: a rank is killed, the job restarts at a checkpoint and ends."""

import json
import subprocess
import sys

import pytest

from tests.report.runs import Page, report

pytest.importorskip("matplotlib")

SCRIPT = """
import os, signal, sys, time
import torch
import hvdkit.torch as hvd
from hvdkit.monitor import JSONLLogger

hvd.init()
model = torch.nn.Linear(8, 4)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression="bf16"
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
checkpointer = hvd.Checkpointer("run/saved", model=model, optimizer=optimizer, every_steps=10)
restored = checkpointer.restore()
first = restored.step if restored else 0
with hvd.Monitor([JSONLLogger("run/metrics.jsonl")], every=2) as monitor:
    monitor.steps = first
    for step in range(first + 1, 31):
        optimizer.zero_grad()
        loss = model(torch.ones(16, 8)).square().mean()
        loss.backward()
        if hvd.rank() == 1:
            time.sleep(0.05)
        optimizer.step()
        monitor.step({"loss": loss}, samples=16)
        checkpointer.maybe_save(step)
        if step == 17 and not restored and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
"""


@pytest.mark.long
def test_a_job_with_a_restart(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["run", "-np", "2", "--restarts", "2", "--output-dir", "run/logs"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit", *command, sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert report(tmp_path / "run") == 0
    page = Page(tmp_path / "run" / "report.html")
    for sentence in (
        "The job succeeded.",
        "30 steps are reported, in 15 reports; the training has resumed once.",
        "Rank 1 was the slowest in 100 % of the reports",
        "The wire format is bf16.",
        "The job was started twice, and 1 start failed.",
        "rank 1 on localhost failed: killed by signal 9 (Killed).",
        "The newest one is of step 30; no later step was reported.",
        "Rank 1 on localhost failed first: SIGKILL.",
    ):
        assert sentence in page.text
    assert page.rows["ranks"] == ["2"]
    assert page.rows["hosts"] == ["localhost (2 ranks)"]
    assert page.rows["start 2"][-2:] == ["10", "succeeded"]
    assert {"step 10", "step 20", "step 30"} <= page.rows.keys()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["metrics"]["loss"]["mean"] for line in lines if line["type"] == "record"]
    assert page.rows["loss"][:2] == [losses[0], losses[-1]]
