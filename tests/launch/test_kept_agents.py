"""Agents that stay connected between the starts of a job."""

import signal
import sys

import psutil
import pytest

from hvdkit.launch import prepare
from hvdkit.launch.hosts import Host
from hvdkit.launch.kept_agents import KeptAgents
from hvdkit.launch.launcher import Settings
from hvdkit.launch.plan import make_plan
from hvdkit.launch.ssh import Ssh
from hvdkit.launch.start_error import StartError
from hvdkit.launch.timeouts import Timeouts

PLAN = make_plan(["true"], "/", [Host("localhost", 1)], 1)


def settings(start):
    return Settings(Ssh(), sys.executable, timeouts=Timeouts(start), agents_stay=True)


def agents():
    return [c for c in psutil.Process().children() if "hvdkit.launch.agent" in c.cmdline()]


def test_an_agent_that_was_stopped_between_two_starts_is_replaced():
    with KeptAgents() as kept:
        for _ in range(2):
            prepare.collect_facts(kept.of(PLAN, settings(60)), PLAN, settings(60))
            (agent,) = agents()
        agent.send_signal(signal.SIGSTOP)
        with pytest.raises(StartError, match=r"within 1 s: its agent has not ended") as caught:
            prepare.collect_facts(kept.of(PLAN, settings(1)), PLAN, settings(1))
        assert caught.value.hosts == ["localhost"]
        assert kept.connected() == []
        prepare.collect_facts(kept.of(PLAN, settings(60)), PLAN, settings(60))
        (successor,) = agents()
        assert successor != agent


def test_a_host_with_another_version_cannot_take_part(monkeypatch):
    monkeypatch.setattr("hvdkit.__version__", "9.9")
    with KeptAgents() as kept:
        (problem,) = kept.problems(PLAN, settings(60), 60).values()
    assert "but the launcher has 9.9" in problem
