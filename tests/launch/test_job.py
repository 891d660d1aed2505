"""The outcome of a job, from the messages of simulated agents in a given order."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job, Timeouts
from hvdkit.launch.output import Output
from hvdkit.launch.plan import make_plan


class Agent:
    """An agent without a process."""

    idle = False
    silent_since = float("inf")

    def __init__(self, host):
        self.host = host
        self.asked = []

    def send(self, kind, **fields):
        self.asked.append(kind)

    def lost_host(self):
        return False

    def silence(self, now):
        pass

    def explain(self):
        return "the connection to its agent has ended"


@pytest.fixture
def outcome():
    """Return a function that returns the outcome of a job of two ranks, one on each host."""

    def run(*events):
        hosts = [Host("host0", 1), Host("host1", 1)]
        agents = [Agent(host) for host in hosts]
        left = [
            SimpleNamespace(connection=agents[number], message=message)
            for number, message in events
        ]
        pool = SimpleNamespace(
            connections=agents, next_event=lambda _: left.pop(0) if left else None
        )
        plan = make_plan(["true"], "/", hosts, 2)
        with Output(2, None, None, say=print, progress=False) as output:
            ready = {0, 1}
            return Job(plan, pool, output, Timeouts(), lambda: ready, print).run()

    return run


def test_a_lost_agent_is_the_cause_of_sigterm(outcome):
    """If an agent of mpirun dies, mpirun ends the other ranks, which may be reported first."""
    found = outcome(
        (0, {"kind": "ended", "rank": 0, "status": -signal.SIGTERM}),
        (1, {"kind": "lost"}),
        (0, {"kind": "done"}),
    )
    assert found.status == 1
    assert found.report.startswith("lost host1: the connection to its agent has ended")
    assert found.report.endswith("SIGTERM then ended rank 0 on host0.")
    assert found.failure is None


def test_a_rank_that_fails_before_an_agent_is_lost_is_the_cause(outcome):
    found = outcome(
        (0, {"kind": "ended", "rank": 0, "status": 3}),
        (1, {"kind": "lost"}),
        (0, {"kind": "done"}),
    )
    assert found.status == 3
    assert found.report.startswith("rank 0 on host0 failed: exit status 3")


class SignallingPool:
    """One agent, whose rank ignores SIGTERM, and a user who sends SIGTERM again and again."""

    def __init__(self, agent):
        self.connections = [agent]

    def next_event(self, seconds):
        """Send SIGTERM to this process until the ranks are ended, for a few seconds at most."""
        time.sleep(0.05)
        (agent,) = self.connections
        if "end" in agent.asked or len(agent.asked) > 100:
            return SimpleNamespace(connection=agent, message={"kind": "done"})
        os.kill(os.getpid(), signal.SIGTERM)
        return None


def test_further_signals_do_not_extend_the_time_for_an_orderly_stop():
    plan, said = make_plan(["train"], "/", [Host("host0", 1)], 1), []
    with Output(1, None, None, say=print, progress=False) as output:
        pool = SignallingPool(Agent(plan.hosts[0]))
        outcome = Job(plan, pool, output, Timeouts(stop=0.5), lambda: {0}, said.append).run()
    assert "rank 0 on host0 did not stop within 0.5 s (--stop-grace)" in outcome.report
    assert outcome.status == 128 + signal.SIGTERM
    assert said == ["SIGTERM: asking all ranks to stop"]
