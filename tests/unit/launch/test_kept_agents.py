"""Agents that stay connected between the starts of a job."""

import signal
import sys

import psutil
import pytest

from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.start_error import StartError
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from hvdkit.launch.launchers.gloo import Gloo

PLAN = make_plan(["true"], "/", [Host("localhost", 1)], 1)


def settings(start):
    return Settings(Ssh(), sys.executable, timeouts=Timeouts(start), agents_stay=True)


def agents():
    return [c for c in psutil.Process().children() if "hvdkit.launch.agent.main" in c.cmdline()]


def connect(launcher):
    with launcher.examined(PLAN, checks=False):
        pass


def test_an_agent_that_was_stopped_between_two_starts_is_replaced():
    with Gloo(settings(60)) as launcher:
        for _ in range(2):
            connect(launcher)
            (agent,) = agents()
        agent.send_signal(signal.SIGSTOP)
        launcher.settings = settings(1)
        with pytest.raises(StartError, match=r"within 1 s: its agent has not ended") as caught:
            connect(launcher)
        assert caught.value.hosts == ["localhost"]
        launcher.settings = settings(60)
        connect(launcher)
        (successor,) = agents()
        assert successor != agent
