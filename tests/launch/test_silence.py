"""Agents that do not answer, and processes that were stopped for a while."""

import contextlib
import os
import signal
import sys
import time

import psutil
import pytest

from hvdkit import cli
from hvdkit.launch import command as run_command
from hvdkit.launch import messages
from tests.launch.commands import execute, started_command
from tests.launch.test_agent import wait_until_gone

# `hvdkit run` that waits for seconds where it usually waits for a minute.
RUN = """
import sys
from hvdkit.launch import messages
messages.LOST_SECONDS = 4.0
messages.HEARTBEAT_SECONDS = 0.3
from hvdkit.cli import main
sys.exit(main(["run", "-np", "1", sys.executable, "-c", sys.argv[1]]))
"""


@contextlib.contextmanager
def a_job(code):
    """Context with a job: its launcher, its agent and its rank."""
    code = f"import os, time; print(os.getpid(), flush=True); {code}"
    with started_command(sys.executable, "-c", RUN, code) as job:
        rank = psutil.Process(int(job.stdout.readline().split()[-1]))
        yield job, rank.parent().parent(), rank


def test_an_agent_that_is_stopped_is_lost():
    with a_job("time.sleep(60)") as (job, agent, rank):
        agent.suspend()
        _, stderr = job.communicate(timeout=600)
        assert job.returncode == 1
        assert "lost localhost: its agent has not answered for 4 s" in stderr
        wait_until_gone(rank.pid)


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
    done = execute([sys.executable, "-c", STOPPED_AT_START])
    assert done.returncode == 1
    assert "lost localhost: its agent has not answered for 4 s" in done.stderr


def test_a_launcher_that_is_stopped_is_the_cause():
    with a_job("time.sleep(60)") as (job, _, rank):
        job.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        rank.wait(30)
        # The launcher notices a pause of more than five seconds.
        time.sleep(max(1.0, began + 7 - time.monotonic()))
        job.send_signal(signal.SIGCONT)
        _, stderr = job.communicate(timeout=600)
    assert job.returncode == 1
    assert "lost localhost: this launcher did not run for" in stderr
    assert "the agent ended its ranks after 4 s" in stderr


def test_a_whole_job_that_is_stopped_for_a_while_continues():
    with a_job("time.sleep(8); print('continued')") as (job, agent, rank):
        time.sleep(1)
        pids = [job.pid, agent.pid, rank.pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        # The launcher first: it must not take the silence of the agent for its end.
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
        stdout, stderr = job.communicate(timeout=600)
    assert job.returncode == 0, stderr
    assert "continued" in stdout


@pytest.mark.parametrize("silence", ["3", "30"])
def test_a_lost_host_is_reported_before_its_agent_is_given_up(silence):
    """Only the system or ssh knows whether the host is lost, or the agent is stopped."""
    words = ["run", "--restarts", "1", "--host-timeout", silence, "train.py"]
    timeouts = run_command._settings(cli._parser(["run"]).parse_args(words)).timeouts
    latest_message = min(messages.HEARTBEAT_SECONDS, float(silence) / 5)
    assert timeouts.lost >= float(silence) + latest_message + 1
