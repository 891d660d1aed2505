"""The exit status of a job that gets a stop signal at any moment, and what its next start does."""

import os
import signal
import sys

import psutil
import pytest

from hvdkit.checkpoint.store import Store
from tests.alone import REPOSITORY
from tests.unit.launch.commands import execute, started

# Each rank is a job of its own: no rank needs Horovod.
SCRIPT = """
import os, sys, time
from pathlib import Path
from hvdkit.checkpoint.manager import Manager
from hvdkit.checkpoint.store import Store
from tests.unit.checkpoint.simulated_state import Arrays
from tests.simulated.ranks import SimulatedCollectives, SimulatedGroup

folder, moment, rank = Path(sys.argv[1]), sys.argv[2], os.environ["HOROVOD_RANK"]

def point(name):
    if moment == name:
        print("POINT", flush=True)
        time.sleep(2)

def checkpointer(**parts):
    store = Store(str(folder / rank))
    ranks = SimulatedCollectives(SimulatedGroup(1), 0)
    return Manager(store, ranks, parts, every_steps=3)

a, b = Arrays(1), Arrays(2)
with checkpointer(a=a, b=b) as checkpointer:
    point("before restore")
    first = checkpointer.restore()
    for step in range(first.step + 1 if first else 1, 9):
        a.value = a.value * 3 + b.value
        if step == 4:
            point("training")
        b.value = b.value * 5 + a.value
        checkpointer.maybe_save(step)
    point("before last save")
    checkpointer.save(8)
    point("after last save")
point("evaluation")
print("export", a.value, b.value, flush=True)
"""


def job_at(folder, moment):
    """Return a context with a job that stops at a moment."""
    words = ("-np", "2", sys.executable, "-c", SCRIPT, str(folder), moment)
    return started(*words, cwd=REPOSITORY)


def targets(job, target):
    launcher = psutil.Process(job.pid)
    (agent,) = launcher.children()
    everyone = [launcher, agent, *agent.children()]
    return {"launcher": [launcher], "agent": [agent], "all": everyone}[target]


MOMENTS = ["before restore", "training", "before last save", "after last save", "evaluation"]
SHORT = [("training", signal.SIGTERM, "launcher"), ("evaluation", signal.SIGTERM, "agent")]
LONG = [
    pytest.param(moment, number, target, marks=pytest.mark.long)
    for moment in MOMENTS
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    for target in ("launcher", "agent", "all")
    # An agent leaves these signals to the launcher.
    if not (target == "agent" and number != signal.SIGTERM)
]


@pytest.mark.parametrize(("moment", "number", "target"), SHORT + LONG)
def test_a_job_that_has_saved_ends_with_75_and_resumes(tmp_path, moment, number, target):
    with job_at(tmp_path, moment) as job:
        # Both ranks have reached it.
        assert {job.stdout.readline(), job.stdout.readline()} == {"[0] POINT\n", "[1] POINT\n"}
        for process in targets(job, target):
            process.send_signal(number)
        out, err = job.communicate(timeout=600)
    # Python's KeyboardInterrupt is the usual effect of Ctrl-C after the training.
    usual = moment == "evaluation" and number == signal.SIGINT
    assert job.returncode == (130 if usual else 75), err
    assert "export" not in out
    if not usual:
        assert "and the job can be resumed; exit status 75" in out + err
    newest = {Store(str(tmp_path / str(rank))).steps()[-1].step for rank in range(2)}
    assert len(newest) == 1
    with job_at(tmp_path, "never") as job:
        out, err = job.communicate(timeout=600)
    assert job.returncode == 0, err
    a, b = 1, 2
    for _ in range(8):
        a = a * 3 + b
        b = b * 5 + a
    assert sorted(out.splitlines()) == [f"[{rank}] export {a} {b}" for rank in range(2)]


@pytest.mark.parametrize(
    ("end", "status"),
    [("made.request_stop(); made.maybe_save(2)", 75), ("", 0)],
    ids=["stopped", "complete"],
)
def test_a_signal_while_python_ends_does_not_kill_a_process_that_is_saved(tmp_path, end, status):
    """Python has removed its handlers then."""
    code = f"""
class Last:
    def __init__(self):
        self.send = lambda: os.kill(os.getpid(), signal.SIGTERM)
    def __del__(self):
        self.send()

import signal
last = Last()
with checkpointer(a=Arrays(1)) as made:
    made.save(1)
    {end}
"""
    script = SCRIPT.partition("a, b = ")[0] + code
    command = [sys.executable, "-c", script, str(tmp_path), "never"]
    done = execute(command, cwd=REPOSITORY, env=os.environ | {"HOROVOD_RANK": "0"})
    assert done.returncode == status
