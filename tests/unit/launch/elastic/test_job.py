"""The restarts of an elastic job, without ranks."""

import signal
from dataclasses import replace

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.start_error import BrokenConnection, StartError
from hvdkit.launch.elastic.choice import assignment_of
from hvdkit.launch.elastic.job import ElasticJob, ElasticLimits, Exclusions
from hvdkit.launch.ending.failure import Failure
from hvdkit.launch.ending.outcome import Outcome
from hvdkit.launch.hosts.hosts import Host
from hvdkit.runtime.elastic_start import ElasticStart
from tests.unit.launch.commands import SAID

ONE, TWO = [Host("host0", 1)], [Host("host0", 1), Host("host1", 1)]
DONE, FAILED = Outcome(0), Outcome(1, restartable=True)
COMMITTED = Outcome(1, restartable=True, saved=True, committed=True)
# As after a checkpoint of hvd.Checkpointer.
SAVED = Outcome(1, restartable=True, saved=True)
CHANGED = Outcome(85, restartable=True, hosts_changed=True, saved=True, committed=True)
LIMITS = ElasticLimits(1, 1, None, restarts=2, resets=None, timeout=5.0)
NO_ROUTE = HvdkitError("host1: no route")


class FakeMembers:
    """Hosts that are given for each start."""

    version = 0

    def __init__(self, hosts, excluded):
        self.hosts = list(hosts)
        self.excluded = excluded
        self.held = frozenset()

    def wait_for(self, size, timeout):
        found = self.hosts.pop(0) if len(self.hosts) > 1 else self.hosts[0]
        if isinstance(found, Exception):
            raise found
        kept = {host.name for host in found if host.name not in self.excluded}
        # As `Members` does.
        kept |= set() if kept & self.held else self.held
        return [host for host in found if host.name in kept] or found

    def confirm(self, committed):
        self.held = self.current if committed else self.held

    def holders(self):
        return self.held

    def give_up(self, name):
        self.held -= {name}

    def begin(self, plan):
        self.current = frozenset(host.name for host in plan.hosts)
        self.version += 2
        return self.version

    def folders(self, host):
        return [f"/{host.name}"]


def supervise(outcomes, hosts=(ONE,), **limits):
    """Run a job. Return the outcome, the hosts and variables of the starts, texts and pauses."""
    left, plans, starts, pauses = list(outcomes), [], [], []
    SAID.clear()

    def start(plan, variables):
        plans.append(assignment_of(plan))
        starts.append(ElasticStart.read(variables(plan.hosts[0])))
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    limits, exclusions = replace(LIMITS, **limits), Exclusions(None)
    job = ElasticJob(
        start=start,
        make_plan=lambda given, size: make_plan(["true"], "/", given, size),
        restarts=limits.restarts,
        pause=pauses.append,
        members=FakeMembers(hosts, exclusions),
        exclusions=exclusions,
        limits=limits,
    )
    outcome = job.run()
    assert not left
    return outcome, plans, starts, [*SAID], pauses


def test_changes_of_the_hosts_are_no_failures():
    outcome, plans, starts, texts, pauses = supervise([CHANGED] * 5 + [DONE], hosts=[ONE, TWO] * 3)
    assert outcome.status == 0
    assert plans == [[("host0", 1)], [("host0", 1), ("host1", 1)]] * 3
    assert [(start.number, start.hosts) for start in starts] == [(n, 2 * n + 2) for n in range(6)]
    assert [start.committed for start in starts] == [False] + [True] * 5
    changed = "the hosts have changed: the ranks start again"
    assert texts[:3] == ["1 rank on host0:1", changed, "2 ranks on host0:1, host1:1"]
    assert pauses == []


def test_a_checkpoint_is_no_commit():
    """Otherwise, ranks of the next start would warn that all commits are lost."""
    _, _, starts, *_ = supervise([SAVED, COMMITTED, FAILED, DONE])
    assert [start.committed for start in starts] == [False, False, True, True]


def failed(report, saved=False):
    return Outcome(1, report, restartable=True, saved=saved)


OLD, FIRST, LAST = failed("old"), failed("bad sample.", saved=True), failed("other")


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ([OLD, FIRST, CHANGED, LAST, LAST, LAST], "other"),
        ([OLD, FIRST, LAST, LAST], "bad sample."),
        ([FIRST, NO_ROUTE, LAST], "bad sample."),
        ([COMMITTED, CHANGED, NO_ROUTE, LAST, LAST], "host1: no route"),
    ],
)
def test_the_first_failure_since_the_last_commit_is_named(outcomes, reason):
    *_, texts, _ = supervise(outcomes)
    assert texts[-1].endswith(f"ends (--restarts). The first failure: {reason}")


def test_the_limits_of_a_job():
    outcome, plans, _, texts, _ = supervise([CHANGED, COMMITTED, CHANGED], resets=2)
    assert (outcome.status, len(plans)) == (1, 3)
    assert texts[-1] == "the job was restarted 2 times, and ends (--reset-limit)"
    too_few = HvdkitError("after 5 s: 0 slots")
    outcome, _, _, texts, _ = supervise([replace(FAILED, status=7)], hosts=[TWO, too_few])
    assert (outcome.status, texts[-1]) == (7, "after 5 s: 0 slots")
    _, plans, *_ = supervise([DONE], hosts=[[Host("host0", 2), Host("host1", 4)]], max_size=3)
    assert plans == [[("host0", 2), ("host1", 1)]]


@pytest.mark.parametrize("interrupted", [FAILED, CHANGED], ids=["failed", "hosts changed"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_signal_that_prevents_a_restart(interrupted, number, status):
    outcome, *_, texts, pauses = supervise([FAILED, replace(interrupted, interrupted=number)])
    assert (outcome.status, outcome.restartable) == (status, False)
    assert texts[-1].startswith(f"no restart after {number.name}. The job ends with status")
    assert pauses == []


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (StartError("", ["host1"]), ONE),
        # The version of the host where ranks ran before is right.
        (StartError("", versions={"torch": {"host0": "2.5", "host1": "2.6"}}), ONE),
        (StartError("", broken=[BrokenConnection("host0", "host1", "10.0.0.2", "?")]), ONE),
        # Only host 0 has the commit.
        (StartError("", ["host0"]), TWO),
        (StartError("", ["host0", "host1"]), TWO),
        (HvdkitError("no route"), TWO),
    ],
    ids=["silent", "version", "connection", "commit", "all", "unknown"],
)
def test_a_new_host_with_which_a_start_fails_is_left_out(error, left):
    new = [Host("host0", 1), Host("host1", 8)]
    _, plans, _, texts, _ = supervise([CHANGED, error, DONE], hosts=[ONE, new])
    assert plans[1] == [("host0", 1), ("host1", 8)]
    assert [name for name, _ in plans[2]] == [host.name for host in left]
    said = "left out for 600 s if the other hosts are enough, because of a failed start: host1"
    assert (said in texts) == (left is ONE)


def failure(rank, **options):
    return Outcome(1, failure=Failure(rank, 1), restartable=True, suspects=(rank,), **options)


def test_hosts_that_are_left_out_after_failures():
    *_, texts, _ = supervise([failure(1, saved=True)] * 2 + [DONE], hosts=[TWO])
    named = "the job failed 2 times on host1, which is left out if the other hosts are enough"
    assert named in texts
    broken = (BrokenConnection("host1", "host0", "10.0.0.2", "no answer"),)
    *_, texts, _ = supervise([replace(SAVED, broken=broken), DONE], hosts=[TWO])
    assert any(text.endswith("connections to other hosts fail: host1") for text in texts)


@pytest.mark.parametrize("loaded", [False, True])
def test_the_last_restart_gives_up_a_commit_that_no_rank_could_load(loaded):
    last = failure(0, committed=loaded)  # ranks have loaded it, so all hosts have a copy
    outcomes = [CHANGED, failure(0), failure(0), last, DONE]
    _, plans, _, texts, _ = supervise(outcomes, hosts=[ONE, TWO], restarts=3)
    names = [[name for name, _ in plan] for plan in plans]
    assert names[:4] == [["host0"], *[["host0", "host1"]] * 3]
    given_up = "the last commit, on host0, could not be loaded. The last restart does"
    assert any(text.startswith(given_up) for text in texts) == (not loaded)
    assert loaded or names[4] == ["host1"]


def test_a_host_is_left_out_for_some_time():
    now = 0.0
    exclusions = Exclusions((10.0, 25.0), now=lambda: now)

    def is_left_out_for(name, seconds):
        nonlocal now
        now += seconds - 1
        before = name in exclusions
        now += 2
        return before and name not in exclusions

    assert exclusions.add("a") == ""
    assert "a" not in exclusions
    for seconds in (10, 20, 25, 25):
        assert f"for {seconds} s (--blacklist-cooldown-range)" in exclusions.add("a")
        assert is_left_out_for("a", seconds)
    for seconds in (600, 1200):
        assert exclusions.leave_out("b") == seconds
        assert is_left_out_for("b", seconds)
