"""Agents that do not answer, and processes that were stopped for a while."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hvdkit import cli
from hvdkit.launch import command as run_command
from hvdkit.launch import messages

# `hvdkit run` that waits for seconds where it usually waits for a minute.
RUN = """
import sys
from hvdkit.launch import messages
messages.LOST_SECONDS = 4.0
messages.HEARTBEAT_SECONDS = 0.3
from hvdkit.cli import main
sys.exit(main(["run", "-np", "1", sys.executable, "-c", sys.argv[1]]))
"""


@pytest.fixture
def launcher():
    """Return a function that starts a job, and returns its launcher, its agent and its rank."""
    jobs = []

    def start(code):
        code = f"import os, time; print(os.getpid(), flush=True); {code}"
        command = [sys.executable, "-c", RUN, code]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        jobs.append(job)
        rank = psutil.Process(int(job.stdout.readline().split()[-1]))
        return job, rank.parent().parent(), rank

    yield start
    for job in jobs:
        job.kill()
        job.communicate(timeout=30)


def test_an_agent_that_is_stopped_is_lost(launcher):
    job, agent, rank = launcher("time.sleep(60)")
    agent.suspend()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "lost localhost: its agent has not answered for 4 s" in stderr
    deadline = time.monotonic() + 20
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# `hvdkit run` whose agent is stopped before it gets the message that starts the ranks.
STOPPED_AT_START = """
import os, signal, sys, threading
from hvdkit.launch import connection, messages
messages.LOST_SECONDS = 4.0
messages.HEARTBEAT_SECONDS = 0.3
from hvdkit.cli import main
send = connection.Connection.send

def send_to_stopped(self, kind, **fields):
    if kind == "start":
        os.kill(self._process.pid, signal.SIGSTOP)
    send(self, kind, **fields)

connection.Connection.send = send_to_stopped
# More than a pipe holds.
sys.exit(main(["run", "-np", "1", "-x", "LONG=" + "x" * 100_000, "true"]))
"""


def test_an_agent_that_is_stopped_before_a_long_message_is_lost():
    command = [sys.executable, "-c", STOPPED_AT_START]
    job = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert job.returncode == 1
    assert "lost localhost: its agent has not answered for 4 s" in job.stderr


def test_a_launcher_that_is_stopped_is_the_cause(launcher):
    job, _, rank = launcher("time.sleep(60)")
    job.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    rank.wait(30)
    # The launcher notices a pause of more than five seconds.
    time.sleep(max(1.0, began + 7 - time.monotonic()))
    job.send_signal(signal.SIGCONT)
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "lost localhost: this launcher did not run for" in stderr
    assert "the agent ended its ranks after 4 s" in stderr


def test_a_whole_job_that_is_stopped_for_a_while_continues(launcher):
    job, agent, rank = launcher("time.sleep(8); print('continued')")
    time.sleep(1)
    processes = [job.pid, agent.pid, rank.pid]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    # The launcher first: it must not take the silence of the agent for its end.
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    stdout, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, stderr
    assert "continued" in stdout


@pytest.mark.parametrize("silence", ["3", "30"])
def test_a_lost_host_is_reported_before_its_agent_is_given_up(silence):
    """Only the system or ssh knows whether the host is lost, or the agent is stopped."""
    words = ["run", "--restarts", "1", "--host-timeout", silence, "train.py"]
    timeouts = run_command._settings(cli._parser(["run"]).parse_args(words)).timeouts
    latest_message = min(messages.HEARTBEAT_SECONDS, float(silence) / 5)
    assert timeouts.lost >= float(silence) + latest_message + 1
