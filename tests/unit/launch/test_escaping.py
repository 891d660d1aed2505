"""No process of a job stays, however it has tried to escape, and however the job ends."""

import os
import signal
import sys
import time

import psutil
import pytest

from hvdkit.engine.toolchain import which
from tests.unit.launch import escaping
from tests.unit.launch.commands import started

#: What the rank does, and who then gets which signal.
ENDS = {
    "success": ("end", None, None),
    "failure": ("fail", None, None),
    "os._exit": ("exit", None, None),
    "SIGTERM": ("stay", "launcher", signal.SIGTERM),
    "Ctrl-C": ("stay", "launcher", signal.SIGINT),
    "launcher killed": ("stay", "launcher", signal.SIGKILL),
    "agent killed": ("stay", "agent", signal.SIGKILL),
    "keeper killed": ("stay", "keeper", signal.SIGKILL),
    "agent and launcher killed": ("stay", "agent and launcher", signal.SIGKILL),
}
SHORT = ("success", "SIGTERM", "launcher killed", "agent killed", "keeper killed")


@pytest.mark.parametrize(
    "end", [end if end in SHORT else pytest.param(end, marks=pytest.mark.long) for end in ENDS]
)
def test_a_daemon_ends_with_the_job(tmp_path, end):
    check(tmp_path, "gloo", end)


@pytest.mark.parametrize("end", [pytest.param("failure", marks=pytest.mark.long), "agent killed"])
def test_a_daemon_ends_with_a_job_over_mpi(tmp_path, end):
    check(tmp_path, "mpi", end)


def check(folder, launcher, end):
    """Run two ranks that leave daemons, end the job, and check that no process is left."""
    if launcher == "mpi" and which("mpirun") is None:
        pytest.skip("no mpirun here")
    of_rank, target, number = ENDS[end]
    script = [sys.executable, escaping.__file__, str(folder / "left"), of_rank]
    script += [] if end in SHORT else ["ignores"]
    left = []
    with started("-np", "2", "--launcher", launcher, *script) as job:
        try:
            ranks = [int(job.stdout.readline().split()[-1]) for _ in range(2)]
            if target is not None:
                send(job.pid, ranks[0], target, number)
            _, errors = job.communicate(timeout=600)
            pids = [int(path.suffix[1:]) for path in folder.glob("left.*")]
            deadline = time.monotonic() + 20
            while left := [pid for pid in [*pids, *ranks] if runs(pid, folder)]:
                if time.monotonic() > deadline:
                    shown = [psutil.Process(pid).cmdline() for pid in left]
                    raise AssertionError(f"left after {end}: {shown}\n{errors}")
                time.sleep(0.05)
            assert pids
        finally:
            for pid in left:
                os.kill(pid, signal.SIGKILL)


def send(launcher, rank, target, number):
    """Send a signal to a process of the job."""
    keeper = psutil.Process(rank).parent()
    agent = keeper.parent()
    pids = {
        "launcher": [launcher],
        "keeper": [keeper.pid],
        "agent": [agent.pid],
        "agent and launcher": [agent.pid, launcher],
    }
    for pid in pids[target]:
        os.kill(pid, number)


def runs(pid, folder):
    """Return whether a process of the job runs. Another process may get its number."""
    try:
        process = psutil.Process(pid)
        return str(folder) in " ".join(process.cmdline()) and process.status() != "zombie"
    except psutil.Error:
        return False
