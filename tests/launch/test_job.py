"""The launcher's watch over a job, with an agent that this process simulates."""

import os
import signal
import time
from types import SimpleNamespace

from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job, Timeouts
from hvdkit.launch.plan import make_plan

PLAN = make_plan(["train"], "/", [Host("host0", 1)], 1)
OUTPUT = SimpleNamespace(directory=None, stdout_closed=False, status=lambda text: None)


class Agent:
    """The only agent of a job. Its rank ignores SIGTERM."""

    host = PLAN.hosts[0]
    silent_since = float("inf")

    def __init__(self):
        self.connections = [self]
        self.asked = []

    def send(self, kind, **fields):
        self.asked.append(kind)

    def silence(self, now):
        return None

    def next_event(self, seconds):
        """Send SIGTERM to the launcher until it ends the ranks, for a few seconds at most."""
        time.sleep(0.05)
        if "end" in self.asked or len(self.asked) > 100:
            return SimpleNamespace(connection=self, message={"kind": "done"})
        os.kill(os.getpid(), signal.SIGTERM)
        return None


def test_further_signals_do_not_extend_the_time_for_an_orderly_stop():
    agent, said = Agent(), []
    outcome = Job(PLAN, agent, OUTPUT, Timeouts(stop=0.5), lambda: {0}, said.append).run()
    assert "rank 0 on host0 did not stop within 0.5 s (--stop-grace)" in outcome.report
    assert outcome.status == 128 + signal.SIGTERM
    assert said == ["SIGTERM: asking all ranks to stop"]
