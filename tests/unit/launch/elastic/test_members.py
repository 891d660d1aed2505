"""The hosts of an elastic job. Names of this machine are hosts, with simulated or real agents."""

import contextlib
import os
import signal
import threading
import time

import psutil
import pytest

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch.control import agent_pool, prepare
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.elastic import members
from hvdkit.launch.elastic.members import Members
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from tests.elastic.jobs import abandoned_folders
from tests.unit.launch.commands import SAID, wait_until
from tests.unit.launch.elastic.test_holders import Pool, World

A, B = Host("localhost", 2), Host("127.0.0.1", 1)
SECONDS = 60.0


@pytest.fixture(autouse=True)
def _short_times(monkeypatch):
    monkeypatch.setattr(members, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(members, "_POLL_SECONDS", 0.01)


class Watched:
    """Members whose list of hosts the test sets."""

    def __init__(self, *found, min_size=1, max_size=None, silence=30.0, real=False):
        self.found = list(found)
        self.excluded = set()
        self.looks, self.real = 0, real
        # Whether the list can be read.
        self.answers, self.reading = threading.Event(), threading.Event()
        self.answers.set()
        self.texts = SAID
        settings = Settings(Ssh(silence=silence), "python", timeouts=Timeouts(30.0, lost=silence))
        self.members = Members(
            self.discover,
            prepare.task(make_plan(["true"], "/", [A], 1), settings),
            settings,
            min_size,
            max_size,
            lambda name: name in self.excluded,
        )
        if not real:
            self.members._agents = Pool(World())

    def discover(self, stopped):
        self.looks += 1
        while not self.answers.wait(0.01) and not stopped():
            self.reading.set()
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def __enter__(self):
        self.folders = abandoned_folders()
        self.members.__enter__()
        return self

    def __exit__(self, *exc):
        self.members.__exit__(*exc)
        assert not abandoned_folders() - self.folders

    def slots(self, size=1):
        return [(host.name, host.slots) for host in self.members.wait_for(size, SECONDS)]

    def begin(self, *hosts):
        plan = make_plan(["true"], "/", hosts, sum(host.slots for host in hosts))
        self.version = self.members.begin(plan)

    def version_on(self, host):
        if not self.real:
            agents = self.members._agents.connections
            return next((agent.version for agent in agents if agent.host.name == host.name), None)
        with contextlib.suppress(OSError, ValueError):
            return int((self.members.folders(host)[0] / "hosts").read_text())

    def wait_announced(self, changed, host=A):
        """Wait until the ranks on a host know whether the hosts have changed."""
        wait_until(lambda: self.version_on(host) == self.version + changed, SECONDS)

    def settle(self):
        """Wait until the current list of hosts was handled."""
        looks = self.looks
        wait_until(lambda: self.looks > looks + 5, SECONDS)

    def wait_text(self, part):
        wait_until(lambda: any(part in text for text in self.texts), SECONDS)


def agents():
    children = psutil.Process().children()
    return [child for child in children if "hvdkit.launch.agent.main" in child.cmdline()]


def test_added_and_removed_hosts_are_announced():
    with Watched(A) as watched:
        assert watched.slots() == [("localhost", 2)]
        watched.begin(A)
        watched.wait_announced(False)
        watched.found = [B, A]
        watched.wait_announced(True)
        # The older host comes first.
        assert watched.slots(3) == [("localhost", 2), ("127.0.0.1", 1)]
        watched.begin(A, B)
        watched.wait_announced(False, B)
        watched.found = [B]
        watched.wait_announced(True)
        watched.wait_announced(True, B)
        # Back before any rank has ended.
        watched.found = [B, A]
        watched.wait_announced(False)
        watched.found = [Host("localhost", 1), B]
        watched.wait_announced(True)


@pytest.mark.parametrize("excluded", [False, True])
def test_the_only_host_with_a_commit_takes_part_once_more(excluded):
    """It has left the list, or its ranks have failed. It copies its commit to other hosts first."""
    with Watched(A, B, max_size=2) as watched:
        assert len(watched.slots(3)) == 2
        watched.begin(A)
        watched.excluded = {"localhost"} if excluded else set()
        watched.found = [A, B] if excluded else [B]
        watched.wait_announced(True)
        watched.members.confirm(True)
        assert watched.slots() == [("localhost", 1), ("127.0.0.1", 1)]
        why = "would be left out" if excluded else "has left the list"
        watched.wait_text(f"localhost, which {why}, takes part with 1 rank until the next commit")
        watched.begin(Host("localhost", 1), B)
        # The ranks end at their next commit.
        watched.wait_announced(True, B)
        watched.members.confirm(True)
        assert watched.slots() == [("127.0.0.1", 1)]


@pytest.mark.parametrize("excluded", [False, True])
def test_with_one_rank_the_only_host_with_a_commit_stays_only_if_it_is_on_the_list(excluded):
    one = Host("localhost", 1)
    with Watched(one, B, max_size=1) as watched:
        watched.slots(2)
        watched.begin(one)
        watched.excluded = {"localhost"} if excluded else set()
        watched.found = [one, B] if excluded else [B]
        watched.settle()
        watched.members.confirm(True)
        assert watched.slots()[0] == (("localhost", 1) if excluded else ("127.0.0.1", 1))
        if excluded:
            said = "localhost, which would be left out, keeps the only rank (--max-np 1)"
            watched.wait_text(said)
            watched.begin(one)
            # The ranks do not end at each commit.
            watched.settle()
            watched.wait_announced(False)


def test_a_slow_list_of_hosts_delays_no_restart_and_loses_no_host(monkeypatch):
    """For example, the disk with the hostfile does not answer."""
    with Watched(A, B) as watched:
        assert len(watched.slots(3)) == 2
        watched.begin(A, B)
        watched.answers.clear()
        assert watched.reading.wait(SECONDS)
        for _ in range(2):
            watched.members.confirm(True)
            assert len(watched.slots()) == 2
        assert watched.texts == []
        # The job ends nevertheless.
        monkeypatch.setattr(members, "_THREAD_SECONDS", 0.2)
        watched.members.discover = lambda stopped: watched.answers.wait() and [A]
    watched.answers.set()


def test_an_answer_that_has_arrived_is_read_before_its_deadline_is_checked(monkeypatch):
    """Another step of the thread was slow."""
    monkeypatch.setattr(members, "_PROBE_SECONDS", 0.2)
    with Watched(A, B, min_size=2) as watched:
        assert len(watched.slots(3)) == 2
        with watched.members._changed:
            watched.members.confirm(True)
            time.sleep(0.5)
        assert len(watched.slots()) == 2
        assert watched.texts == []


def test_hosts_beyond_the_largest_size_are_not_announced():
    with Watched(A, max_size=2) as watched:
        watched.slots()
        watched.begin(A)
        watched.found = [A, B]
        assert watched.slots(3)
        watched.settle()
        watched.wait_announced(False)


def test_too_few_slots_do_not_interrupt():
    with Watched(A, min_size=2) as watched:
        watched.slots()
        watched.begin(A)
        watched.found = [B]
        watched.settle()
        watched.wait_announced(False)
        watched.found = UsageError("the script failed")
        watched.wait_text("the hosts stay the same: the script failed")
        watched.wait_announced(False)


def test_a_start_waits_for_enough_slots():
    with Watched(A) as watched:
        watched.slots()
        with pytest.raises(HvdkitError, match=r"have 2 slots .*expected at least 3"):
            watched.members.wait_for(3, 0.5)
        watched.found = [A, B]
        assert len(watched.slots(3)) == 2
        # An excluded host is used if too few are left.
        watched.excluded.add("localhost")
        assert watched.slots() == [("127.0.0.1", 1)]
        watched.excluded.add("127.0.0.1")
        assert len(watched.slots()) == 2


def test_hosts_that_do_not_answer_delay_neither_a_start_nor_the_end(monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 100\n")
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(members, "are_local", lambda hosts: {host: host == A for host in hosts})
    monkeypatch.setattr(agent_pool, "_CONNECTING", 2)
    silent = [Host(f"silent{number}", 1) for number in range(4)]
    with Watched(A, real=True) as watched:
        watched.slots()
        watched.begin(A)
        watched.found = [A, *silent]
        wait_until(lambda: len(watched.members._agents.connections) == 3, SECONDS)
        began = time.monotonic()
        watched.begin(A)
    # Before the end of the time in which ssh processes count as connecting.
    assert time.monotonic() - began < agent_pool._CONNECTING_SECONDS


def test_the_first_look_fails():
    with Watched() as watched:
        watched.found = UsageError("no such file")
        with contextlib.suppress(HvdkitError):
            watched.members.wait_for(1, 1.0)
    with Watched() as watched, pytest.raises(HvdkitError, match=r"after 1 s .* have 0 slots"):
        watched.members.wait_for(1, 1.0)
    assert any("waiting for hosts: they have 0 slots" in text for text in watched.texts)


# Real agents

#: Signals to an agent, and how its end is reported.
SIGNALS = {
    signal.SIGKILL: "its agent was killed by signal 9",
    signal.SIGTERM: "its agent ended with status 0: got SIGTERM",
}


@pytest.mark.parametrize("number", SIGNALS)
def test_an_agent_that_gets_a_signal_has_a_successor_with_the_same_folders(number):
    with Watched(A, real=True) as watched:
        watched.slots()
        watched.begin(A)
        folders = watched.members.folders(A)
        (folders[0] / "0-0-1.commit").write_text("kept")
        (agent,) = agents()
        agent.send_signal(number)
        watched.wait_text(SIGNALS[number])
        watched.members.confirm(False)
        assert watched.slots() == [("localhost", 2)]
        assert watched.members.folders(A) == folders
        assert (folders[0] / "0-0-1.commit").read_text() == "kept"
        watched.wait_announced(False)


@pytest.mark.parametrize(
    ("number", "seconds"), [(signal.SIGKILL, None), (signal.SIGTERM, None), (signal.SIGTERM, 0.02)]
)
def test_an_agent_that_gets_a_signal_at_the_end_leaves_no_folders(number, seconds):
    """A batch system may send SIGTERM to all processes. With None, the launcher has noticed it."""
    with Watched(A, real=True) as watched:
        watched.slots()
        (agent,) = agents()
        agent.send_signal(number)
        time.sleep(seconds or 0)
        if seconds is None:
            watched.wait_text(SIGNALS[number])


def test_a_change_is_announced_later_if_there_is_no_space():
    with Watched(A, real=True) as watched:
        watched.slots()
        watched.begin(A)
        watched.wait_announced(False)
        obstacle = watched.members.folders(A)[0] / "hosts.draft"
        obstacle.mkdir()
        watched.found = [A, B]
        watched.slots(3)
        watched.settle()
        obstacle.rmdir()
        watched.wait_announced(True)
        assert not any("cannot take part" in text for text in watched.texts)


def test_agents_stay_with_a_short_timeout_of_hosts():
    with Watched(A, silence=2.0, real=True) as watched:
        watched.slots()
        time.sleep(3)
        assert watched.slots() == [("localhost", 2)]
        assert watched.texts == []
