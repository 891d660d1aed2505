"""The restarts of an elastic job, without ranks."""

import signal
from dataclasses import replace

import pytest

from hvdkit.core.elastic.start import ElasticStart
from hvdkit.errors import HvdkitError
from hvdkit.launch.elastic.members import assignment_of
from hvdkit.launch.elastic.supervisor import ElasticLimits, ElasticSupervisor, Exclusions
from hvdkit.launch.failure import Failure
from hvdkit.launch.hosts import Host
from hvdkit.launch.outcome import Outcome
from hvdkit.launch.plan import make_plan
from hvdkit.launch.reachability import BrokenConnection
from hvdkit.launch.start_error import StartError

ONE, TWO = [Host("host0", 1)], [Host("host0", 1), Host("host1", 1)]
FAILED = Outcome(1, restartable=True)
COMMITTED = Outcome(1, restartable=True, saved=True, committed=True)
# As after a checkpoint of hvd.Checkpointer.
SAVED = Outcome(1, restartable=True, saved=True)
CHANGED = Outcome(85, restartable=True, hosts_changed=True, saved=True, committed=True)
LIMITS = ElasticLimits(1, 1, None, restarts=2, resets=None, timeout=5.0)


class FakeMembers:
    """Hosts that are given for each start."""

    def __init__(self, hosts, excluded):
        self.hosts = list(hosts)
        self.excluded = excluded
        self.held = frozenset()
        self.waits = []
        self.confirmed = 0
        self.version = 0

    def wait_for(self, size, timeout):
        self.waits.append((size, timeout))
        found = self.hosts.pop(0) if len(self.hosts) > 1 else self.hosts[0]
        if isinstance(found, Exception):
            raise found
        kept = {host.name for host in found if host.name not in self.excluded}
        # As `Members` does.
        kept |= set() if kept & self.held else self.held
        return [host for host in found if host.name in kept] or found

    def confirm(self, committed):
        self.confirmed += 1
        if committed:
            self.held = self.current

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


def supervise(outcomes, hosts=(ONE,), limits=LIMITS):
    """Run a job. Return the outcome, the hosts and variables of the starts, texts and pauses."""
    left, plans, starts, texts, pauses = list(outcomes), [], [], [], []

    def start(plan, variables):
        plans.append(assignment_of(plan))
        starts.append(ElasticStart.read(variables(plan.hosts[0])))
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    exclusions = Exclusions(limits.cooldown)
    supervisor = ElasticSupervisor(
        start,
        lambda given, size: make_plan(["true"], "/", given, size),
        FakeMembers(hosts, exclusions),
        exclusions,
        limits,
        texts.append,
        pauses.append,
    )
    outcome = supervisor.run()
    assert not left
    return outcome, plans, starts, texts, pauses


def test_changes_of_the_hosts_are_no_failures():
    outcome, plans, starts, texts, pauses = supervise(
        [CHANGED] * 5 + [Outcome(0)], hosts=[ONE, TWO, ONE, TWO, ONE, TWO]
    )
    assert outcome.status == 0
    assert plans == [[("host0", 1)], [("host0", 1), ("host1", 1)]] * 3
    assert [(start.number, start.hosts) for start in starts] == [(n, 2 * n + 2) for n in range(6)]
    assert [start.committed for start in starts] == [False] + [True] * 5
    assert texts[0] == "1 rank on host0:1"
    assert texts[1] == "the hosts have changed: the ranks start again"
    assert texts[2] == "2 ranks on host0:1, host1:1"
    assert pauses == []


def test_a_checkpoint_is_no_commit():
    """Otherwise, ranks of the next start would warn that all commits are lost."""
    _, _, starts, *_ = supervise([SAVED, COMMITTED, FAILED, Outcome(0)])
    assert [start.committed for start in starts] == [False, False, True, True]


def test_a_job_that_fails_without_a_commit_ends():
    outcome, _, _, texts, pauses = supervise([FAILED, FAILED, FAILED])
    assert outcome.status == 1
    assert texts[-1].startswith("the job failed 3 times in a row without a new commit")
    assert pauses == [1.0]


def test_the_first_failure_since_the_last_commit_is_named():
    def failed(report, saved=False):
        return Outcome(1, report, restartable=True, saved=saved)

    old, first, last = failed("old"), failed("bad sample.", saved=True), failed("other")
    error = HvdkitError("host1: no route")
    for outcomes, reason in [
        ([old, first, CHANGED, last, last, last], "other"),
        ([old, first, last, last], "bad sample."),
        ([first, error, last], "bad sample."),
        ([COMMITTED, CHANGED, error, last, last], "host1: no route"),
    ]:
        *_, texts, _ = supervise(outcomes)
        assert texts[-1].endswith(f"ends (--restarts). The first failure: {reason}")


def test_each_commit_permits_all_restarts_again():
    outcome, *_ = supervise([FAILED, FAILED, COMMITTED, FAILED, Outcome(0)])
    assert outcome.status == 0


def test_the_reset_limit_counts_all_restarts():
    limits = ElasticLimits(1, 1, None, restarts=2, resets=2, timeout=5.0)
    outcome, plans, _, texts, _ = supervise([CHANGED, COMMITTED, CHANGED], limits=limits)
    assert outcome.status == 1
    assert len(plans) == 3
    assert texts[-1] == "the job was restarted 2 times, and ends (--reset-limit)"


@pytest.mark.parametrize("outcome", [Outcome(75), Outcome(143), Outcome(0)])
def test_a_job_that_was_stopped_is_not_restarted(outcome):
    assert supervise([outcome])[0] == outcome


def test_too_few_hosts_end_the_job_with_its_failure():
    failed = Outcome(7, restartable=True)
    outcome, _, _, texts, _ = supervise([failed], hosts=[TWO, HvdkitError("after 5 s: 0 slots")])
    assert outcome.status == 7
    assert texts[-1] == "after 5 s: 0 slots"


@pytest.mark.parametrize("interrupted", [FAILED, CHANGED], ids=["failed", "hosts changed"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_signal_that_prevents_a_restart(interrupted, number, status):
    stopped = replace(interrupted, interrupted=number)
    outcome, *_, texts, pauses = supervise([FAILED, stopped])
    assert (outcome.status, outcome.restartable) == (status, False)
    assert texts[-1].startswith(f"no restart after {number.name}. The job ends with status")
    assert pauses == []


def test_the_largest_size():
    limits = ElasticLimits(1, 1, 3, restarts=2, resets=None, timeout=5.0)
    hosts = [Host("host0", 2), Host("host1", 4)]
    _, plans, *_ = supervise([Outcome(0)], hosts=[hosts], limits=limits)
    assert plans == [[("host0", 2), ("host1", 1)]]


def test_a_start_that_fails_is_tried_again_but_not_the_first():
    outcome, *_ = supervise([FAILED, HvdkitError("host1: no route"), Outcome(0)])
    assert outcome.status == 0
    with pytest.raises(HvdkitError, match="no route"):
        supervise([HvdkitError("host1: no route")])


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
    _, plans, _, texts, _ = supervise([CHANGED, error, Outcome(0)], hosts=[ONE, new])
    assert plans[1] == [("host0", 1), ("host1", 8)]
    assert [name for name, _ in plans[2]] == [host.name for host in left]
    assert (
        "left out for 600 s if the other hosts are enough, because of a failed start: host1"
        in texts
    ) == (left is ONE)


def test_a_host_is_left_out_after_two_failures():
    failure = Outcome(1, failure=Failure(1, 1), restartable=True, saved=True, suspects=(1,))
    *_, texts, _ = supervise([failure, failure, Outcome(0)], hosts=[TWO])
    assert "the job failed 2 times on host1, which is left out if the other hosts are enough" in (
        texts
    )


def test_the_last_restart_gives_up_a_commit_that_no_rank_could_load():
    limits = replace(LIMITS, restarts=3)
    changed = replace(CHANGED, saved=True, committed=True)
    failure = Outcome(1, failure=Failure(0, 1), restartable=True, suspects=(0,))
    _, plans, _, texts, _ = supervise(
        [changed, failure, failure, failure, Outcome(0)], hosts=[ONE, TWO], limits=limits
    )
    names = [[name for name, _ in plan] for plan in plans]
    assert names == [["host0"], *[["host0", "host1"]] * 3, ["host1"]]
    assert any(
        text.startswith("the last commit, on host0, could not be loaded. The last restart does")
        for text in texts
    )
    # Ranks have loaded the commit, so all hosts have a copy.
    loaded = replace(failure, committed=True)
    _, plans, _, texts, _ = supervise(
        [changed, failure, failure, loaded, Outcome(0)], hosts=[ONE, TWO], limits=limits
    )
    assert not any(text.startswith("the last commit") for text in texts)


def test_a_host_that_cannot_connect_to_the_others_is_left_out():
    broken = BrokenConnection("host1", "host0", "10.0.0.2", "no answer")
    failure = Outcome(1, restartable=True, saved=True, broken=(broken,))
    *_, texts, _ = supervise([failure, Outcome(0)], hosts=[TWO])
    assert any(text.endswith("connections to other hosts fail: host1") for text in texts)


def test_a_host_is_left_out_for_some_time():
    now = 0.0
    exclusions = Exclusions((10.0, 25.0), now=lambda: now)
    assert exclusions.add("a") == ""
    assert "a" not in exclusions
    for seconds in (10, 20, 25, 25):
        assert f"for {seconds} s (--blacklist-cooldown-range)" in exclusions.add("a")
        now += seconds - 1
        assert "a" in exclusions
        now += 2
        assert "a" not in exclusions
    for seconds in (600, 1200):
        assert exclusions.leave_out("b") == seconds
        now += seconds - 1
        assert "b" in exclusions
        now += 2
        assert "b" not in exclusions
