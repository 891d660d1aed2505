"""The hosts of an elastic job. Names of this machine are hosts, with real agents."""

import contextlib
import signal
import threading
import time

import psutil
import pytest

from hvdkit.errors import HvdkitError, UsageError
from hvdkit.launch import prepare
from hvdkit.launch.elastic import members
from hvdkit.launch.elastic.members import Members
from hvdkit.launch.hosts import Host
from hvdkit.launch.plan import make_plan
from hvdkit.launch.settings import Settings
from hvdkit.launch.ssh import Ssh
from hvdkit.launch.timeouts import Timeouts
from tests.elastic.jobs import abandoned_folders
from tests.launch.commands import wait_until

A, B = Host("localhost", 2), Host("127.0.0.1", 1)
SECONDS = 60.0


class Watched:
    """Members whose list of hosts the test sets."""

    def __init__(self, *found, min_size=1, max_size=None, start=30.0, silence=30.0):
        self.found = list(found)
        self.excluded = set()
        # Seconds that it takes to read the list.
        self.slow = 0.0
        self.is_slow = threading.Event()
        self.texts = []
        timeouts = Timeouts(start, lost=silence)
        settings = Settings(Ssh(silence=silence), "python", timeouts=timeouts)
        self.members = Members(
            self.discover,
            prepare.task(make_plan(["true"], "/", [A], 1), settings),
            settings,
            min_size,
            max_size,
            lambda name: name in self.excluded,
            self.texts.append,
        )

    def discover(self, stopped):
        self.is_slow.set() if self.slow else self.is_slow.clear()
        deadline = time.monotonic() + self.slow
        while time.monotonic() < deadline and not stopped():
            time.sleep(0.05)
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

    def wait_announced(self, changed, host=A):
        """Wait until the ranks on a host know whether the hosts have changed."""
        file = self.members.folders(host)[0] / "hosts"

        def is_announced():
            with contextlib.suppress(OSError, ValueError):
                return int(file.read_text()) == self.version + changed

        wait_until(is_announced, SECONDS)

    def wait_slow(self):
        assert self.is_slow.wait(SECONDS)

    def wait_text(self, part):
        wait_until(lambda: any(part in text for text in self.texts), SECONDS)


def agents():
    children = psutil.Process().children()
    return [child for child in children if "hvdkit.launch.agent" in child.cmdline()]


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


def test_the_only_host_with_a_commit_takes_part_once_more_after_it_has_left_the_list():
    with Watched(A) as watched:
        watched.slots()
        watched.begin(A)
        watched.found = [B]
        watched.wait_announced(True)
        watched.members.confirm(True)
        assert watched.slots() == [("localhost", 1), ("127.0.0.1", 1)]
        watched.wait_text("localhost, which has left the list, takes part with 1 rank until")
        watched.begin(Host("localhost", 1), B)
        # The ranks end at their next commit.
        watched.wait_announced(True, B)
        watched.members.confirm(True)
        assert watched.slots() == [("127.0.0.1", 1)]
        watched.begin(B)
        watched.wait_announced(False, B)


def test_the_only_host_with_a_commit_is_excluded():
    """It copies its commit to the other hosts first."""
    with Watched(A, B, max_size=2) as watched:
        assert len(watched.slots(3)) == 2
        watched.begin(A)
        watched.excluded = {"localhost"}
        watched.wait_announced(True)
        watched.members.confirm(True)
        assert watched.slots() == [("localhost", 1), ("127.0.0.1", 1)]
        watched.wait_text(
            "no other host has the last commit. localhost, which would be left out, takes part "
            "with 1 rank until the next commit"
        )
        watched.begin(Host("localhost", 1), B)
        watched.wait_announced(True, B)
        watched.members.confirm(True)
        assert watched.slots() == [("127.0.0.1", 1)]


def test_with_one_rank_the_only_host_with_a_commit_is_not_left_out():
    one = Host("localhost", 1)
    with Watched(one, B, max_size=1) as watched:
        watched.slots(2)
        watched.begin(one)
        watched.excluded = {"localhost"}
        watched.members.confirm(True)
        assert watched.slots()[0] == ("localhost", 1)
        watched.wait_text("localhost, which would be left out, keeps the only rank (--max-np 1)")
        watched.begin(one)
        # The ranks do not end at each commit.
        time.sleep(0.5)
        watched.wait_announced(False)


def test_with_one_rank_a_host_that_has_left_the_list_does_not_take_part():
    with Watched(A, max_size=1) as watched:
        watched.slots()
        watched.begin(Host("localhost", 1))
        watched.found = [B]
        watched.wait_announced(True)
        watched.members.confirm(True)
        assert watched.slots() == [("127.0.0.1", 1)]


def test_a_slow_list_of_hosts_delays_no_restart_and_loses_no_host():
    with Watched(A, B) as watched:
        assert len(watched.slots(3)) == 2
        watched.begin(A, B)
        watched.slow = float("inf")
        watched.wait_slow()
        for _ in range(2):
            watched.members.confirm(True)
            assert len(watched.slots()) == 2
        assert watched.texts == []


def test_an_answer_that_has_arrived_is_read_before_its_deadline_is_checked(monkeypatch):
    """Another step of the thread was slow."""
    monkeypatch.setattr(members, "_PROBE_SECONDS", 1.0)
    with Watched(A, B, min_size=2) as watched:
        assert len(watched.slots(3)) == 2
        watched.members.confirm(True)
        with watched.members._changed:
            watched.members.confirm(True)
            time.sleep(3)
        assert len(watched.slots()) == 2
        assert watched.texts == []


def test_hosts_beyond_the_largest_size_are_not_announced():
    with Watched(A, max_size=2) as watched:
        watched.slots()
        watched.begin(A)
        watched.found = [A, B]
        assert watched.slots(3)
        time.sleep(0.5)
        watched.wait_announced(False)


def test_too_few_slots_do_not_interrupt():
    with Watched(A, min_size=2) as watched:
        watched.slots()
        watched.begin(A)
        watched.found = [B]
        time.sleep(2.5)
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


def test_an_excluded_host_is_used_if_too_few_are_left():
    with Watched(A, B) as watched:
        assert len(watched.slots(3)) == 2
        watched.excluded.add("localhost")
        assert watched.slots() == [("127.0.0.1", 1)]
        watched.excluded.add("127.0.0.1")
        assert len(watched.slots()) == 2


def test_the_first_look_fails():
    with Watched() as watched:
        watched.found = UsageError("no such file")
        with contextlib.suppress(HvdkitError):
            watched.members.wait_for(1, 3.0)
    with Watched() as watched, pytest.raises(HvdkitError, match=r"after 2 s .* have 0 slots"):
        watched.members.wait_for(1, 2.0)
    assert any("waiting for hosts: they have 0 slots" in text for text in watched.texts)


def test_the_job_ends_although_the_list_of_hosts_cannot_be_read(monkeypatch):
    """For example, the disk with the hostfile does not answer."""
    monkeypatch.setattr(members, "_THREAD_SECONDS", 0.5)
    answers = threading.Event()
    watched = Watched(A)
    with watched:
        watched.slots()
        watched.members.discover = lambda stopped: answers.wait() and [A]
        time.sleep(1.5)  # until the list is read again
        began = time.monotonic()
    answers.set()
    assert time.monotonic() < began + 100


#: Signals to an agent, and how its end is reported.
SIGNALS = {
    signal.SIGKILL: "its agent was killed by signal 9",
    signal.SIGTERM: "its agent ended with status 0: got SIGTERM",
}


@pytest.mark.parametrize("number", SIGNALS)
def test_an_agent_that_gets_a_signal_has_a_successor_with_the_same_folders(number):
    with Watched(A) as watched:
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
    ("number", "seconds"),
    [
        (signal.SIGKILL, None),
        *((signal.SIGTERM, seconds) for seconds in (None, 0.0, 0.02, 0.1, 0.3)),
    ],
)
def test_an_agent_that_gets_a_signal_at_the_end_leaves_no_folders(number, seconds):
    """A batch system may send SIGTERM to all processes. With None, the launcher has noticed it."""
    with Watched(A) as watched:
        watched.slots()
        (agent,) = agents()
        agent.send_signal(number)
        time.sleep(seconds or 0)
        if seconds is None:
            watched.wait_text(SIGNALS[number])


def test_a_change_is_announced_later_if_there_is_no_space():
    with Watched(A) as watched:
        watched.slots()
        watched.begin(A)
        watched.wait_announced(False)
        obstacle = watched.members.folders(A)[0] / "hosts.draft"
        obstacle.mkdir()
        watched.found = [A, B]
        watched.slots(3)
        time.sleep(1)
        obstacle.rmdir()
        watched.wait_announced(True)
        assert not any("cannot take part" in text for text in watched.texts)


def test_agents_stay_with_a_short_timeout_of_hosts():
    with Watched(A, silence=2.0) as watched:
        watched.slots()
        time.sleep(6)
        assert watched.slots() == [("localhost", 2)]
        assert watched.texts == []
