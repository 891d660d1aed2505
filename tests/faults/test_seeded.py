"""The rank at fault is named, and a job without a fault is not disturbed; see seeded.py."""

import os
import subprocess
import sys

import pytest

from tests.faults import seeded, seeded_keras
from tests.parallel.rank_pool import Configuration, skip_where_unsupported

#: One of each kind: a verdict of a stall, a lost rank, a parameter.
SAMPLE = ["waits for a lock that it holds", "SIGSEGV", "flips a bit of a weight"]
_NAMED = 0.95


# tests/parallel/torch/test_records.py has shorter tests.
@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLE)
def test_the_rank_at_fault_is_named(name):
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    case = next(case for case in seeded.CASES if case.name == name)
    outcome = seeded.run(case, rank=2)
    assert outcome.named, outcome.text
    assert outcome.status != 0


@pytest.mark.long
@pytest.mark.parametrize("framework", ["torch", "keras-tensorflow"])
def test_the_rank_at_fault_is_named_in_nearly_all_cases(framework):
    skip_where_unsupported(Configuration(framework, "mpi", 4))
    outcomes = seeded.run_all({"torch": seeded.CASES}.get(framework, seeded_keras.CASES))
    assert len(outcomes) >= 40
    wrong = [f"{o.case.name}, rank {o.rank}: {o.text[-3000:]}" for o in outcomes if not o.named]
    assert len(wrong) <= (1 - _NAMED) * len(outcomes), "\n\n".join(wrong)


CLEAN = """
import sys, time
import torch
import hvdkit.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters()), model.named_parameters(), on_nonfinite="raise"
)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    # The last batch of an epoch has another size on each rank.
    size = 8 if step % 50 else 1 + hvd.rank()
    model(torch.rand(size, 32)).square().mean().backward()
    optimizer.step()
    if step == 1 and hvd.rank() == 1:
        time.sleep(10)  # compiles
    if step % 500 == 499 and hvd.rank() == 0:
        with torch.no_grad():  # validation
            for _ in range(200):
                model(torch.rand(64, 32))
            time.sleep(1)
print("trained", flush=True)
"""


@pytest.mark.long
def test_there_is_no_alarm_in_ten_thousand_clean_steps(tmp_path):
    skip_where_unsupported(Configuration("torch", "gloo", 3))
    (tmp_path / "train.py").write_text(CLEAN)
    command = [sys.executable, "-m", "hvdkit", "run", "-np", "3", "--output-dir", "runs"]
    done = subprocess.run(
        [*command, "train.py", "10000"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PWD"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 3
    # On a busy machine a rank may really be slow.
    assert [line for line in done.stderr.splitlines() if "is slow" not in line] == []
    assert not (tmp_path / "runs" / "latest" / "records").exists()
