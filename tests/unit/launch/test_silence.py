"""Agents that do not answer, and processes that were stopped for a while.

`test_job.py` has a launcher that was stopped.
"""

import os
import sys
import time

import psutil
import pytest

from hvdkit import cli
from hvdkit.launch.agent.launcher_link import LauncherLink
from hvdkit.launch.control import messages
from hvdkit.launch.options import command as run_command
from tests.unit.launch.commands import started_command
from tests.unit.launch.test_agent import wait_until_gone

# `hvdkit run` that waits for seconds where it usually waits for a minute.
RUN = """
import sys
from hvdkit.launch.control import messages
messages.LOST_SECONDS, messages.HEARTBEAT_SECONDS = 2.0, 0.3
from hvdkit.cli import main
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
sys.exit(main(["run", "-np", "1", sys.executable, "-c", code]))
"""


def test_an_agent_that_is_stopped_is_lost():
    with started_command(sys.executable, "-c", RUN) as job:
        rank = psutil.Process(int(job.stdout.readline().split()[-1]))
        rank.parent().parent().suspend()
        _, stderr = job.communicate(timeout=600)
        assert job.returncode == 1
        assert "lost localhost: its agent has not answered for 2 s" in stderr
        wait_until_gone(rank.pid)


def test_an_agent_that_was_stopped_does_not_take_its_launcher_for_lost(monkeypatch):
    """Maybe the whole job was stopped. The launcher then needs a moment for its heartbeat."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ends = [os.fdopen(end, mode, 0) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True)]
    link = LauncherLink(*ends)
    found = []
    # It was stopped for 200 s. Then the launcher is silent.
    for step in (200.0, *[1.0] * 70):
        now += step
        link.note_step(now)
        found.append(link.is_silent(60.0))
    assert found.index(True) == 61
    link.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("silence", ["3", "30"])
def test_a_lost_host_is_reported_before_its_agent_is_given_up(silence):
    """Only the system or ssh knows whether the host is lost, or the agent is stopped."""
    words = ["run", "--restarts", "1", "--host-timeout", silence, "train.py"]
    timeouts = run_command._settings(cli._parser(["run"]).parse_args(words)).timeouts
    latest_message = min(messages.HEARTBEAT_SECONDS, float(silence) / 5)
    assert timeouts.lost >= float(silence) + latest_message + 1
