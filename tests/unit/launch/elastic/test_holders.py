"""Draw how hosts leave an elastic job, with simulated agents: no path may lose the newest commit.

The model knows which hosts have the newest commit. If one of them answers in time, the next start
must have a rank on one of them. The exception is documented: with one rank (`--max-np 1`), a host
that has left the list does not take part.
"""

import queue
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

import hvdkit
from hvdkit.errors import HvdkitError
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.settings import Settings
from hvdkit.launch.elastic import members
from hvdkit.launch.hosts.hosts import Host
from hvdkit.launch.hosts.ssh import Ssh
from tests.unit.launch.commands import SAID

NAMES = ("host0", "host1", "host2")
#: Seconds for an answer. A slow host takes longer, but not longer than `--host-timeout`.
PROBE, SLOW, SILENCE = 0.3, 0.5, 30.0
FIT = {
    "kind": "hello",
    "python": ".".join(map(str, sys.version_info[:3])),
    "hvdkit": hvdkit.__version__,
    "problems": [],
}


@dataclass
class World:
    """The machines.

    Attributes:
        lost: the hosts that cannot be reached.
        unfit: the hosts that answer that they cannot take part.
        slow: the hosts whose next answer is slow.
        commits: the hosts whose folders have the newest commit.
    """

    lost: set[str] = field(default_factory=set)
    unfit: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)
    commits: set[str] = field(default_factory=set)


class Agent:
    """The connection to a simulated agent."""

    def __init__(self, world, host, events):
        self.world, self.host, self.events = world, host, events
        self.ended, self.version = False, None
        self.silent_since = float("inf")
        if host.name in world.lost:
            self.lose()

    def send(self, kind, **fields):
        if self.ended:
            return
        name = self.host.name
        # The version of the list of hosts that the ranks know.
        self.version = fields.get("version", self.version)
        if kind == "keep":
            self.answer({"kind": "kept", "folders": [f"/{name}"]})
        elif kind == "task":
            problems = ["no such folder"] if name in self.world.unfit else []
            answer = FIT | {"problems": problems}
            if name in self.world.slow:
                self.world.slow.remove(name)
                threading.Timer(SLOW, self.answer, [answer]).start()
            else:
                self.answer(answer)

    def answer(self, message):
        if not self.ended:
            self.silent_since = time.monotonic()
            self.events.put(SimpleNamespace(connection=self, message=message))

    def lose(self):
        """End without deleting the commits, as after SIGKILL."""
        self.answer({"kind": "lost"})
        self.ended = True

    def close(self, timeout):
        """The agent deletes the commits."""
        if not self.ended:
            self.ended = True
            self.world.commits.discard(self.host.name)

    def explain(self):
        return "it has ended"


class Pool:
    """Simulated agents."""

    def __init__(self, world):
        self.world = world
        self.connections = []
        self.events = queue.Queue()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def start(self, hosts, ssh, python):
        self.connections += [Agent(self.world, host, self.events) for host in hosts]

    def places(self):
        return 64

    def drop(self, connections):
        for connection in connections:
            self.connections.remove(connection)
            connection.close(2.0)

    def next_event(self, timeout):
        try:
            event = self.events.get(timeout=timeout)
        except queue.Empty:
            return None
        return None if event.connection.ended and event.message["kind"] != "lost" else event


class Drawn:
    """An elastic job whose events are drawn."""

    def __init__(self, draw):
        self.draw = draw
        self.world = World()
        self.slots = dict.fromkeys(NAMES, 2)
        self.max_size = draw.choice([1, 2, 2, 2, 3, None])
        self.excluded = set()
        self.listed = list(NAMES)
        self.looks = 0
        # With the messages for the user.
        self.steps = SAID
        # The names of the hosts of the last start.
        self.current = set()
        self.members = members.Members(
            self.discover,
            {},
            Settings(Ssh(silence=SILENCE), "python"),
            1,
            self.max_size,
            lambda name: name in self.excluded,
        )
        self.pool = self.members._agents = Pool(self.world)
        # The hosts with the newest commit that the job may not lose.
        self.holders = set()

    def discover(self, stopped):
        self.looks += 1
        return [Host(name, self.slots[name]) for name in self.listed]

    def set_list(self, names):
        self.listed = names
        looks = self.looks
        # Both the reading of the list and the step after it.
        while self.looks < looks + 3:
            time.sleep(0.005)
        with self.members._changed:
            self.members._changed.wait(1)

    def disturb(self):
        name = self.draw.choice([*sorted(self.current) * 3, *NAMES])
        kinds = ["exclude", "list", "kill", "lose", "unfit", "slow", "recover"]
        kind = self.draw.choice(kinds)
        self.steps.append((kind, name))
        agents = [c for c in self.pool.connections if c.host.name == name]
        match kind:
            case "exclude":
                self.excluded ^= {name}
            case "list":
                # Often without all hosts of the last start.
                others = [name for name in NAMES if name not in self.current] or list(NAMES)
                names = self.draw.sample(NAMES, self.draw.randint(1, 3))
                self.set_list(self.draw.choice([others, names]))
                self.steps.append(self.listed)
                # Hosts that are not on the list and had no ranks are not needed.
                self.holders &= {*self.listed, *self.current}
            case "kill":
                for agent in agents:
                    agent.lose()
            case "lose":
                self.world.lost.add(name)
                self.holders.discard(name)
                for agent in agents:
                    agent.lose()
            case "unfit":
                self.world.unfit.add(name)
            case "slow":
                self.world.slow.add(name)
            case "recover":
                for hosts in (self.world.lost, self.world.unfit, self.world.slow):
                    hosts.discard(name)

    def start(self):
        """Start the ranks. Return whether they commit."""
        try:
            hosts = self.members.wait_for(1, 2.0)
        except HvdkitError:
            return False
        slots = sum(host.slots for host in hosts)
        plan = make_plan(["true"], "/", hosts, min(slots, self.max_size or slots))
        names = {host.name for host in plan.hosts}
        self.steps.append(("start", sorted(names), sorted(self.holders)))
        needed = self.holders - self.world.unfit
        if self.max_size == 1:
            needed &= {*self.listed}
        if needed:
            assert names & self.holders, self.steps
            assert names & self.world.commits, self.steps
        self.members.begin(plan)
        self.current = names
        loads = self.draw.random() < 0.75 and not names & self.world.lost
        commits = loads and self.draw.random() < 0.75
        if commits or (loads and names & self.holders):
            # A restart begins with copies of the newest commit.
            self.holders = set(names)
            self.world.commits |= names
            if commits:
                self.world.commits = set(names)
            return True
        # Without a commit, a host that has left the list waits for no further start.
        self.holders &= {*self.listed, *self.current}
        return False

    def run(self):
        with self.members:
            committed = self.start()
            for _ in range(self.draw.randint(1, 5)):
                for _ in range(self.draw.randint(0, 2)):
                    self.disturb()
                self.members.confirm(committed)
                if self.draw.random() < 0.5:
                    self.disturb()
                committed = self.start()


@pytest.fixture(autouse=True, scope="module")
def _short_times():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members, "_LOOK_SECONDS", 0.01)
        patch.setattr(members, "_POLL_SECONDS", 0.01)
        patch.setattr(members, "_PROBE_SECONDS", PROBE)
        patch.setattr(members, "_RETRY_SECONDS", 0.05)
        patch.setattr(members, "are_local", lambda hosts: dict.fromkeys(hosts, True))
        yield


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 40))]
)
def test_no_path_by_which_a_host_leaves_loses_the_newest_commit(seed):
    Drawn(random.Random(seed)).run()


def watch(world, names, max_size):
    """Return the members of a job on hosts with one slot."""
    hosts, reach = [Host(name, 1) for name in names], Settings(Ssh(silence=SILENCE), "python")
    job = members.Members(lambda _: hosts, {}, reach, 1, max_size, lambda _: False)
    job._agents = Pool(world)
    return job


def test_a_host_that_returns_with_the_newest_commit_gets_the_only_rank():
    world = World()
    with watch(world, NAMES[:2], 1) as job:
        job.begin(make_plan(["true"], "/", job.wait_for(2, 10), 1))
        world.lost = {"host0"}
        job._agents.connections[0].lose()
        job.confirm(True)
        assert [host.name for host in job.wait_for(1, 10)] == ["host1"]
        job.begin(make_plan(["true"], "/", [Host("host1", 1)], 1))
        world.lost = set()
        assert len(job.wait_for(2, 10)) == 2
        # No rank has made a commit on host 1.
        job.confirm(False)
        assert job.wait_for(2, 10)[0].name == "host0"


@pytest.mark.parametrize("trouble", ["unfit", "slow"])
def test_a_host_that_cannot_take_part_for_a_moment_keeps_the_only_commit(trouble, said):
    world = World()
    with watch(world, NAMES[:1], None) as job:
        job.begin(make_plan(["true"], "/", job.wait_for(1, 10), 1))
        world.commits = {"host0"}
        getattr(world, trouble).add("host0")
        job.confirm(True)
        time.sleep(2 * PROBE)
        world.unfit.clear()
        assert [each.name for each in job.wait_for(1, 10)] == ["host0"]
        assert world.commits == {"host0"}
        assert len(said) == (trouble == "unfit") + any("waiting for" in text for text in said)
