"""`hvdkit run` in the allocations of a real Slurm on two hosts. See also `test_launchers.py`."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import pytest

from hvdkit.errors import RESUMABLE
from tests.hosts.launches import HVDKIT, UNEVEN, describe, python, wait_for
from tests.hosts.test_launchers import REDUCE
from tests.hosts.test_lightning import SCRIPT as LIGHTNING
from tests.hosts.test_lightning import results as lightning_results
from tests.hosts.test_nodes import FAIL_ONCE
from tests.hosts.test_run import link_down
from tests.ranks.rank_pool import REPOSITORY, Configuration, skip_where_unsupported
from tests.unit.launch.commands import wait_until

pytestmark = pytest.mark.long


@pytest.fixture
def start(jobs):
    """Yield a function that starts a command. Fail if its processes outlive the test."""
    with jobs.starting() as begin:
        yield begin


def needs(jobs, kind):
    if kind not in jobs.slurm.run("srun", "--mpi=list").split():
        pytest.skip(f"this srun has no --mpi={kind}: apt-get install libpmix-dev")


def test_ranks_reduce_over_mpi(jobs):
    skip_where_unsupported(Configuration("torch", "mpi", 3))
    needs(jobs, "pmix")
    done = jobs.run(*UNEVEN, *HVDKIT, "run", "--mpi", "pmix", sys.executable, "-c", REDUCE)
    assert done.returncode == 0, done.stderr
    assert [line[-7:] for line in done.stdout.splitlines()] == ["sum 6.0"] * 3


def test_slurm_ends_the_ranks_over_mpi_after_one_was_killed(jobs):
    skip_where_unsupported(Configuration("torch", "mpi", 3))
    needs(jobs, "pmix")
    kill = "import os, time\nos.kill(os.getpid(), 9) if hvd.rank() == 2 else time.sleep(60)"
    command = (sys.executable, "-c", REDUCE + kill)
    done = jobs.run(*UNEVEN, *HVDKIT, "run", "--mpi", "pmix", *command)
    # Slurm may kill the agent before the agent reports the end of the rank.
    reports = {
        128 + 9: "rank 2 on host1 failed: killed by signal 9 (Killed). srun then ended",
        1: "srun has ended all ranks of the job step",
    }
    assert reports[done.returncode] in done.stderr
    assert "lost host" not in done.stderr


def test_the_rank_variables_of_pmi2_are_kept(jobs):
    needs(jobs, "pmi2")
    code = "print(os.environ['PMI_SIZE'], os.environ['HOROVOD_CONTROLLER'], rank)"
    done = jobs.run(*UNEVEN, *HVDKIT, "run", "--mpi", "pmi2", *python(code))
    assert sorted(done.stdout.splitlines()) == [f"[{n}] 3 mpi {n}" for n in range(3)], done.stderr


def test_nodes_that_srun_starts_connect(jobs):
    skip_where_unsupported(Configuration("torch", "gloo", 4))
    hosts = jobs.cluster.hosts
    nodes = ("run", "--nodes", "2", "--rdzv", f"{hosts[0].address}:29400", "-np", "4")
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1")
    key = "0123456789abcdef"
    done = jobs.run(*srun, *HVDKIT, *nodes, sys.executable, "-c", REDUCE, HVDKIT_JOB_KEY=key)
    assert done.returncode == 0, done.stderr
    # Node 0 shows all ranks, the other node its own.
    lines = [f"[{n}] place {n} {n % 2} 2 {n // 2} 2 sum 10.0" for n in range(4)]
    assert sorted(done.stdout.splitlines()) == sorted([*lines, *lines[2:]])


def test_a_missing_program_is_reported_once_per_node(jobs):
    done = jobs.run(*UNEVEN, *HVDKIT, "run", "no-such-program")
    assert done.returncode == 1
    assert "2 of 2 hosts cannot take part; nothing was started" in done.stderr
    assert done.stderr.count("no program 'no-such-program'") == 2


def test_inside_a_step_of_srun(jobs):
    done = jobs.run(*("srun", "--ntasks=1", *HVDKIT, "run", *python("print('up')")))
    assert done.stdout == "[0] up\n", done.stderr
    done = jobs.run("srun", "--ntasks=2", *HVDKIT, "run", *python("print('up')"))
    assert "srun has started hvdkit run 2 times" in done.stderr
    assert done.stdout == ""


def test_the_commands_of_a_dry_run_work(jobs, tmp_path):
    shown = jobs.run(
        *UNEVEN, *HVDKIT, "run", "--dry-run", *python(f"open(f'{tmp_path}/{{rank}}', 'w')")
    ).stdout
    assert "3 ranks over Gloo, started by srun" in shown
    assert not list(tmp_path.iterdir())
    ranks = [line for line in shown.splitlines() if " HOROVOD_RANK=" in line]
    jobs.run(*UNEVEN, "sh", "-c", "\n".join(ranks))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_a_job_is_restarted_in_its_allocation(jobs, tmp_path):
    code = FAIL_ONCE.format(folder=str(tmp_path))
    done = jobs.run(*UNEVEN, *HVDKIT, "run", "--restarts", "1", *python(code))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 on host0 failed: exit status 1") == 1
    assert "restart 1 of 1" in done.stderr
    assert done.stdout.count("again") == 3


TRAIN = """
import sys, time
import torch
import hvdkit.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
with hvd.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, every_steps=1000) as saver:
    restored = saver.restore()
    step = restored.step if restored else 0
    if hvd.rank() == 0:
        print("begins at", step, flush=True)
    while step < 2000:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        step += 1
        saver.maybe_save(step)
        # Slow, to be stopped in the middle.
        time.sleep(0 if restored else 0.05)
if hvd.rank() == 0:
    print("ended at", step, flush=True)
"""


@pytest.fixture
def script(jobs, tmp_path, monkeypatch):
    """Yield the job of a script of `hvdkit generate slurm`, and its output file."""
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    (tmp_path / "train.py").write_text(TRAIN)
    command = tmp_path / "bin" / "hvdkit"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hvdkit "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    training = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "saved")]
    path = tmp_path / "job.sh"
    subprocess.run(
        [*HVDKIT, "generate", "slurm", "--nodes=2", "--time=10", "-o", path, *training],
        timeout=60,
        check=True,
    )
    job = jobs.slurm.run("sbatch", "--parsable", f"--chdir={tmp_path}", str(path)).strip()
    yield job, tmp_path / f"train-{job}.out"
    if jobs.slurm.state(job) in ("PENDING", "RUNNING"):
        jobs.slurm.run("scancel", job)
    jobs.check_nothing_is_left(40)


@pytest.mark.parametrize(
    "signalled",
    [
        ["--batch", "--signal=USR1"],  # like `#SBATCH --signal=B:USR1@…`
        ["--signal=TERM"],  # like a preemption with GraceTime, to the steps
    ],
)
def test_a_job_that_was_signalled_resumes_after_it_was_requeued(jobs, script, signalled):
    job, output = script
    wait_until(lambda: output.exists() and "begins at 0" in output.read_text(), 60)
    jobs.slurm.run("scancel", *signalled, job)
    wait_until(lambda: jobs.slurm.state(job) == "PENDING", 60)
    assert "\nrequeueing (restart 1)" in output.read_text()
    # Slurm delays the job by two minutes once the first run is cleaned up.
    wait_until(lambda: "Reason=BeginTime" in jobs.slurm.run("scontrol", "show", "job", job), 60)
    jobs.slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")
    # Slurm may not use a node for minutes after a job.
    wait_until(lambda: jobs.slurm.state(job) == "COMPLETED", seconds=400)
    steps = [int(step) for step in re.findall(r"(?:begins|ended) at (\d+)", output.read_text())]
    assert steps[0] == 0
    assert 0 < steps[1] < 2000
    assert steps[2] == 2000


def test_a_cancelled_job_saves_and_is_not_requeued(jobs, script):
    job, output = script
    wait_until(lambda: output.exists() and "begins at 0" in output.read_text(), 60)
    jobs.slurm.run("scancel", job)
    wait_until(lambda: "start the job again to resume it" in output.read_text(), 60)
    jobs.check_nothing_is_left(40)
    wait_until(lambda: jobs.slurm.state(job) == "CANCELLED", 60)
    assert "requeueing" not in output.read_text()


# --- Lightning, which has its own support for Slurm -----------------------------------------------


@pytest.fixture
def lightning(tmp_path):
    """Return a function that returns the command of a rank with a Lightning Trainer."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("no lightning here")
    skip_where_unsupported(Configuration("torch", "gloo", 2))
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    return lambda name, ranks=2: (
        *(sys.executable, str(script), str(tmp_path / name)),
        *(str(8 // ranks), "-1"),
    )


@pytest.mark.parametrize(
    "launch",
    [
        # Lightning refuses --ntasks without --ntasks-per-node, and another number of nodes than its
        # num_nodes. With these job names, it starts processes itself.
        ("salloc", "--nodes=2", "--ntasks=2", *HVDKIT, "run"),
        ("salloc", "--nodes=2", "--ntasks-per-node=1", "--job-name=bash", *HVDKIT, "run"),
        ("salloc", "--nodes=2", "--ntasks=2", "--job-name=interactive", *HVDKIT, "run"),
        ("srun", "--nodes=2", "--ntasks=2", "--mpi=pmix"),
        ("srun", "--nodes=2", "--ntasks=2", "--mpi=pmix", "--job-name=bash"),
    ],
    ids=["salloc", "bash", "interactive", "srun", "srun-bash"],
)
def test_a_lightning_trainer_uses_the_ranks_of_hvdkit(jobs, lightning, launch):
    if launch[0] == "srun":
        skip_where_unsupported(Configuration("torch", "mpi", 2))
        needs(jobs, "pmix")
    both = lightning_results(jobs.run(*launch, *lightning("two")))
    assert both == [["2", "24", both[0][2]]] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_lightning_trainer_that_is_asked_to_stop_saves(jobs, lightning, start, tmp_path, number):
    *command, _ = lightning("stopped")
    endless = "0"
    text = LIGHTNING.replace("time.sleep(60)", "time.sleep(1)")
    text = text.replace("save_last=True", "save_last=True, save_on_exception=True")
    (tmp_path / "train.py").write_text(text)
    job = start("salloc", "--nodes=2", "--ntasks=2", *HVDKIT, "run", *command, endless)
    wait_for(job, "[0] waits", "[1] waits")
    (launcher,) = [pid for pid in jobs.processes() - jobs.servers if "run" in describe(pid)[3:4]]
    os.kill(launcher, number)
    out, err = job.communicate(timeout=600)
    assert job.returncode == RESUMABLE, err
    assert "start the job again to resume it" in err
    # Lightning's handler for Slurm would requeue the job.
    assert "requeu" not in out + err
    assert (tmp_path / "stopped" / "last.ckpt").exists()
    (one,) = lightning_results(jobs.run("srun", *lightning("stopped", ranks=1)))
    assert one[:2] == ["1", "24"]


# The last test: MPI does not connect the hosts after a link was down.
@pytest.mark.parametrize("restarts", ["0", "3"])
def test_a_job_that_has_lost_a_node_can_be_requeued(jobs, start, restarts):
    code = "print('up'); time.sleep(60)"
    options = ("run", "--restarts", restarts, "--host-timeout", "3")
    job = start("salloc", "--nodes=2", "--ntasks=2", *HVDKIT, *options, *python(code))
    wait_for(job, "[0] up", "[1] up")
    with link_down(jobs):
        _, err = job.communicate(timeout=600)
        assert job.returncode == 75
        assert "lost host1" in err
        assert "the allocation has lost a node" in err
    # Slurm repeats its messages to the node after longer and longer times.
    jobs.check_nothing_is_left(120)
