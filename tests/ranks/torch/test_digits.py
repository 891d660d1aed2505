"""The PyTorch examples, run as a user runs them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hvdkit.checkpoint.store import Store
from hvdkit.engine.describe import installed
from tests.logs import without_slow_ranks
from tests.ranks.rank_pool import (
    REPOSITORY,
    Configuration,
    skip_where_unsupported,
    start_ranks_of,
)

EXAMPLE = str(REPOSITORY / "examples" / "torch_digits.py")


def accuracy(configuration, *arguments):
    command = [sys.executable, EXAMPLE, *arguments]
    results = start_ranks_of(configuration, command).wait(timeout=180)
    first, *others = [without_slow_ranks(result.output) for result in results]
    assert others == [""] * (configuration.size - 1)
    last = first.splitlines()[-1]
    return float(re.fullmatch(r"accuracy=(0\.\d{4}|1\.0000)", last).group(1))


def minimal_accuracy(configuration, name, environment=None):
    """Return the accuracy that a minimal example prints, on rank 0 only."""
    command = [sys.executable, str(REPOSITORY / "examples" / f"{name}_minimal.py")]
    results = start_ranks_of(configuration, command, environment).wait(timeout=180)
    first, *others = [without_slow_ranks(result.output) for result in results]
    assert others == [""] * (configuration.size - 1)
    line = rf"accuracy=([01]\.\d{{3}}) on {configuration.size} ranks\n"
    return float(re.fullmatch(line, first).group(1))


def test_the_minimal_example_learns():
    assert minimal_accuracy(Configuration("torch", "gloo", 2), "torch") > 0.9


@pytest.mark.long
def test_accuracy_is_the_same_on_one_two_and_four_ranks():
    found = {
        (controller, size): accuracy(Configuration("torch", controller, size))
        for controller, size in (("gloo", 1), ("gloo", 2), ("gloo", 4), ("mpi", 2), ("mpi", 4))
    }
    assert min(found.values()) >= 0.97, found
    assert max(found.values()) - min(found.values()) <= 0.01, found


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.long)])
def test_runs_under_horovods_own_launcher(controller, tmp_path):
    engine = installed()
    if controller == "mpi" and (engine is None or "mpi" not in (engine.controllers or ())):
        # A stock Horovod starts Open MPI 5 with options that Open MPI no longer has.
        pytest.skip("needs a Horovod that `hvdkit build` has built with MPI")
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, hvdkit.torch as hvd\nhvd.init()\n"
        "print('sum', hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum).item())\n"
    )
    done = run_plain(
        *(sys.executable, "-m", "horovod.runner.launch", f"--{controller}", "-np", "2"),
        *(sys.executable, str(script)),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # As if a rank of another job runs the launcher. It must not use that job's rendezvous.
        HVDKIT_RENDEZVOUS_KEY="0123",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 3.0") == 2


_TRAINS_UNTIL_STOPPED = """\
import os, sys, time
from pathlib import Path

import torch

import hvdkit.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
with hvd.Checkpointer(sys.argv[1], model=model, optimizer=optimizer) as checkpointer:
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        step += 1
        checkpointer.maybe_save(step)
        if step == 3:
            Path(sys.argv[1], f"pid-{os.getpid()}").touch()
        time.sleep(0.01)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_horovodrun_over_mpi_reaches_the_ranks(number, tmp_path):
    skip_where_unsupported(Configuration("torch", "mpi", 2))
    bin_folder = Path(sys.executable).parent
    script, folder = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(_TRAINS_UNTIL_STOPPED)
    folder.mkdir()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "horovod.runner.launch", "--mpi", "-np", "2"),
            *(sys.executable, script, folder),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"},
        start_new_session=True,
    ) as job:
        try:
            # The launcher and the ranks import the frameworks one after the other.
            deadline = time.monotonic() + 150
            while len(list(folder.glob("pid-*"))) < 2:
                assert job.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            job.send_signal(number)
            output, _ = job.communicate(timeout=60)
        finally:
            pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
            ranks = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
            _, alive = psutil.wait_procs(ranks, timeout=10)
            for rank in alive:
                rank.kill()
            job.kill()
    assert not alive
    # After SIGTERM, Open MPI 5 kills the ranks after 0.6 s: they may save or not.
    if number == signal.SIGUSR1:
        assert Store(folder).steps(), output
    assert job.returncode != 0


def run_plain(*command, timeout=120, **env):
    if installed() is None:
        pytest.skip("no Horovod here: run `hvdkit build`")
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
