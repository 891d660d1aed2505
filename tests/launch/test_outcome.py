"""The outcome of a job from its events: who is to blame, in each order in which they arrive."""

import random
import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import RESUMABLE, HvdkitError
from hvdkit.faults.rank_report import RankReport
from hvdkit.launch import events as e
from hvdkit.launch.events import JobPlan
from hvdkit.launch.facts import Facts
from hvdkit.launch.failure import Failure
from hvdkit.launch.outcome import outcome

TRACEBACK = "Traceback (most recent call last):"


def raised(error, kind="own", chained=False):
    lines = (TRACEBACK, '  File "/home/me/train.py", line 23, in <module>', error)
    return RankReport("exception", error, kind, chained, lines)


LOST = raised("HorovodInternalError: Horovod has been shut down.", "peer")
RESET = raised("ConnectionResetError: Connection reset by peer", "connection")
# A call on a process set after the shutdown.
NO_SET = raised("ValueError: Allreduce: Process set provided does not exist.", "refused")
# An error of `hvd.init()`: the network may be the reason, or this rank.
NO_START = raised("ValueError: Horovod initialization failed.", "start")
MISMATCH = raised("HorovodInternalError: Mismatched ALLREDUCE shapes")
AGREED = raised("CheckpointError: rank 0: No space left on device")
OF_RANK_0 = raised(AGREED.error, chained=True)
BAD = raised("ValueError: bad")
# The script has caught the error of a lost peer, and calls `sys.exit`.
HIDDEN = RankReport("exit", LOST.error, "peer")
ENDS = RankReport("end")


def happened(*ends, size=4, over_mpi=False, engine_errors=(), more=()):
    """Return the plan and the events of a job.

    Args:
        ends: rank, status, report or None, and last lines, in the order of time.
        engine_errors: ranks whose last collective has failed.
        more: further events.
    """
    found = list(more)
    for number, (rank, status, report, *tail) in enumerate(ends):
        at = 10.0 + number / 100
        if rank in engine_errors:
            found.append(e.CollectiveFailed(at, rank, "allreduce.x", "shut down"))
        if report is not None:
            found.append(e.Reported(at, rank, report))
        found.append(e.Ended(at, rank, status, tuple(tail)))
    return JobPlan(tuple(f"host{rank}" for rank in range(size)), over_mpi), found


def report_of(*ends, **options):
    return outcome(*happened(*ends, **options)).report


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([(0, 1, LOST), (1, 1, BAD)], 1),
        ([(0, 1, LOST), (1, -9, None)], 1),
        ([(0, 1, LOST), (1, 3, None, "no such file")], 1),
        # The rank's own connection to a store, while the others report Horovod's.
        ([(0, 1, LOST), (1, 1, RESET)], 1),
        ([(0, 1, RESET), (1, 1, BAD)], 1),
        ([(1, 1, BAD), (0, 1, BAD)], 1),
        ([(0, RESUMABLE, ENDS), (1, 1, LOST)], 1),
        ([(1, 1, LOST), (0, 1, LOST)], 1),
        ([(0, 1, LOST), (1, 1, NO_START)], 1),
        # The script has caught the error, and prints another one.
        ([(0, 4, HIDDEN, "giving up"), (1, 1, BAD)], 1),
        ([(0, 4, ENDS, "giving up"), (1, 1, BAD)], 1),
        ([(0, 4, ENDS, "giving up"), (1, 1, LOST)], 0),
        ([(0, 1, LOST), (1, 1, MISMATCH)], 1),
        # All ranks raise the error of one of them.
        ([(1, 1, AGREED), (0, 1, OF_RANK_0)], 0),
        ([(1, 1, BAD), (0, 1, OF_RANK_0)], 1),
        # A crash after the rank had lost a peer, in a function of `atexit`.
        ([(0, -11, LOST), (1, 1, BAD)], 1),
        # The interpreter crashes when it ends, after the script had lost a peer.
        ([(0, -6, HIDDEN), (1, 3, None)], 1),
        # The program of a shell has crashed. The other script hides the error of its lost peer.
        ([(0, 1, BAD), (1, 139, None)], 0),
        ([(1, 139, None), (0, 1, BAD)], 1),
        # Both scripts raise the same error, one of them because it has lost a peer.
        ([(0, 1, raised(BAD.error, "peer", chained=True)), (1, 1, BAD)], 1),
        # The script had lost a peer, had caught the error, and was then killed.
        ([(0, 1, LOST), (1, -11, None)], 1),
    ],
)
def test_the_cause(ends, cause):
    assert outcome(*happened(*ends)).failure.rank == cause


@pytest.mark.parametrize(
    ("ends", "suspects"),
    [
        ([(0, 1, LOST), (1, 1, BAD)], (1,)),
        ([(0, 1, LOST), (1, 1, LOST)], ()),
        ([(0, 1, NO_START)], ()),
        ([(1, 1, BAD), (0, 1, BAD), (2, 1, LOST)], (1, 0)),
        ([(1, 1, AGREED), (0, 1, OF_RANK_0)], (0,)),
        ([(0, -9, None, "step 7"), (1, -9, None, "step 7")], (0,)),
        # Without a report, for example of a shell.
        ([(0, 1, None, "sh: no file"), (1, 1, None, "sh: no file")], (0, 1)),
        ([(0, 1, None, "failed"), (1, 2, None, "failed")], (0,)),
        ([(0, 1, None), (1, 1, None)], (0,)),
    ],
)
def test_the_ranks_that_may_have_caused_the_failures(ends, suspects):
    assert outcome(*happened(*ends)).suspects == suspects


def test_the_first_rank_that_raises_is_the_cause_although_it_ends_later():
    # Its `atexit` functions run after its traceback.
    plan, events = happened((2, 1, raised("KeyError: 'label'")), (1, 1, None))
    events.append(e.Reported(9.5, 1, BAD))
    assert outcome(plan, events).suspects == (1,)


def test_a_script_that_hides_the_error_of_a_lost_peer():
    """Every rank prints the same line. Only the engine of rank 0 has an error."""
    ends = (0, 1, ENDS, "training failed"), (1, 1, ENDS, "training failed")
    found = outcome(*happened(*ends, engine_errors=[0]))
    assert found.suspects == (1,)
    assert "1 rank failed after it" in found.report
    assert Failure(0, -11, engine_error="shut down").is_consequence is False


FAILED = raised("RuntimeError: training failed")


@pytest.mark.parametrize(
    ("error", "at", "more", "cause"),
    [
        ("Horovod has been shut down", 9.99, (), 1),
        # The rank itself has ended its engine: after its error, or in a `finally` of it.
        ("Horovod has been shut down", 10.02, (), 0),
        ("Horovod has been shut down", 9.99, [e.ShutDown(9.9, 0, "Rank 0 called it.")], 0),
        # An error of the rank's own call.
        ("Mismatched ALLREDUCE shapes", 9.99, (), 0),
    ],
)
def test_an_error_of_a_script_that_had_lost_a_peer_before(error, at, more, cause):
    """The script goes on after the error of its collective, and raises another one."""
    more = [*more, e.CollectiveFailed(at, 0, "allreduce.x", error)]
    assert outcome(*happened((0, 1, FAILED), (1, 3, None), more=more)).suspects == (cause,)


def test_the_exception_is_shown_although_many_lines_follow_it():
    lines = [f"metric {number}" for number in range(25)]
    shown = report_of((1, 1, BAD, *BAD.traceback, *lines))
    expected = ["Rank 1's error:", *(f"  {line}" for line in BAD.traceback), "Rank 1's last lines:"]
    assert shown.splitlines()[1:-20] == expected
    assert shown.count("metric") == 20
    assert "error:" not in report_of((1, 1, BAD, *BAD.traceback))


def test_the_stack_of_a_crash_is_shown():
    stack = ("Fatal Python error: Segmentation fault", '  File "train.py", line 7 in load')
    plan, events = happened()
    found = outcome(plan, [*events, e.Ended(1.0, 1, -11, ("step 7",), "", stack)])
    assert found.report.endswith("\n".join(["Its stack:", *(f"  {line}" for line in stack)]))


def test_each_kind_of_failure_is_shown_once():
    more = [e.EndBegan(10.5)]
    report = report_of(
        (0, 1, LOST),
        (1, 1, raised("RuntimeError: rank 1 has 3 rows")),
        (2, 1, raised("RuntimeError: rank 2 has 4 rows")),
        (3, 2, ENDS, "no disk"),
        size=5,
        more=more,
    )
    assert report.startswith(
        "rank 1 on host1 failed: exit status 1; 1 rank failed after it, because the connection was "
        "lost. The launcher ended 1 other rank."
    )
    assert "Rank 3 on host3 failed, too: exit status 2." in report
    assert "1 more rank failed like rank 1." in report
    assert "rank 2 has" not in report
    assert "HorovodInternalError" not in report


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_mpirun_has_ended_is_not_the_cause(first):
    """Rank 1 calls MPI_Abort, and mpirun sends SIGTERM to rank 0."""
    ends = [(rank, (-15, 7)[rank], None, "step 3") for rank in (first, 1 - first)]
    found = outcome(*happened(*ends, over_mpi=True))
    assert found.suspects == (1,)
    text = "rank 1 on host1 failed: exit status 7. MPI ended 1 other rank.\n"
    assert found.report.startswith(text)
    assert "too" not in found.report


def test_ranks_that_end_because_mpirun_has_lost_a_daemon():
    """The status is that of Open MPI 5."""
    ends = [(rank, 195, None, "step 3") for rank in (0, 1)]
    more = [e.Found(11.0, silent=("host1 is silent.",)), e.EndBegan(10.5)]
    found = outcome(*happened(*ends, over_mpi=True, more=more))
    assert "or did not answer. host1 is silent." in found.possible_causes
    assert "If mpirun or srun gets a signal, or loses its daemon on a host" in found.report
    assert found.suspects == ()
    assert outcome(*happened(*ends, (2, 3, None, "step 3"), over_mpi=True)).suspects == (2,)


def test_a_rank_over_mpi_that_a_user_has_ended_is_the_cause():
    found = outcome(*happened((1, 1, LOST), (0, -15, None, "step 3"), over_mpi=True))
    assert found.suspects == (0,)
    assert "If mpirun or srun gets a signal, or loses" in found.report


@pytest.mark.parametrize("lost", [LOST, NO_SET])
def test_a_rank_that_ended_without_an_error_is_named(lost):
    report = report_of((0, 1, lost), (1, 1, lost), (2, 0, ENDS))
    assert "Each rank that failed reported only that another rank had ended" in report
    assert "Rank 2 on host2 had ended without an error" in report


def test_the_call_in_which_the_ranks_have_failed():
    more = [e.CollectiveFailed(9.0, 0, "join() (join.noname)", "shut down")]
    assert (
        "Rank 1 on host1 had ended without an error, and the failed ranks waited for join() "
        "(join.noname): check whether all ranks had the same number of batches, and have called "
        "hvd.join()."
    ) in report_of((0, 1, LOST), (1, 0, ENDS), more=more)


def test_a_process_set_that_the_script_has_not_added():
    report = report_of((0, 1, NO_SET), (1, 1, NO_SET))
    assert report.startswith(("all ranks failed with the same", "rank 0 on"))
    assert "reported only that another rank" not in report
    # The engine has ended the job after a stall.
    more = [e.Found(11.0, verdict="Rank 0 has waited 60 s.")]
    report = report_of((0, 1, NO_SET), (1, 1, LOST), more=more)
    assert report.startswith("Rank 0 has waited 60 s.\nThen rank 0 on host0 failed: exit status 1")


@pytest.mark.parametrize(
    ("report", "shown"),
    [(BAD, True), (RankReport("exit", BAD.error, "own"), True), (LOST, False), (ENDS, False)],
)
def test_a_rank_that_ended_with_status_0_after_an_error(report, shown):
    text = report_of((0, 1, LOST), (1, 0, report), (2, 0, ENDS))
    named = "Rank 1 on host1 had written a traceback, and had ended with exit status 0: ValueError"
    assert (named in text) == shown
    assert ("Ranks 1 on host1, 2 on host2 had ended without an error" in text) != shown


def test_an_error_that_all_ranks_raise():
    report = report_of((0, 1, MISMATCH), (1, 1, MISMATCH), size=2)
    assert report.startswith("all ranks failed with the same error: exit status 1.\n")
    assert "reported only that another rank" not in report
    assert "failed like" not in report


@pytest.mark.parametrize("others", [[(2, 0, ENDS)], []])
def test_an_error_that_some_ranks_raise(others):
    more = [] if others else [e.EndBegan(10.5)]
    report = report_of((0, 1, BAD), (1, 1, BAD), *others, size=3, more=more)
    assert report.startswith("rank 0 on host0 failed: exit status 1")
    assert "1 more rank failed like rank 0." in report


def test_a_rank_that_has_stopped_in_order_is_named():
    report = report_of((1, RESUMABLE, ENDS), (0, 1, LOST))
    assert "Rank 1 on host1 had made an orderly stop (exit status 75)." in report


def test_the_verdict_on_the_stall_in_which_ranks_failed():
    more = [e.Found(11.0, verdict="Rank 0 waits.\nRank 1 is."), e.EndBegan(10.5)]
    # First the cause, then the rank that failed because of it.
    assert report_of((0, 1, LOST), size=2, more=more).splitlines()[:2] == [
        "Rank 0 waits. Rank 1 is.",
        "Then rank 0 on host0 failed: exit status 1. The launcher ended 1 other rank.",
    ]
    assert "waits" not in report_of((0, 1, BAD), size=2, more=more)


def test_a_rank_that_has_shut_horovod_down_is_named():
    text = "Rank 1 on vm called hvd.shutdown() at train.py:3 in <module>."
    more = [e.ShutDown(9.0, 1, text), e.ShutDown(8.0, 2, text), e.ShutDown(8.5, 2, "")]
    assert report_of((0, 1, LOST), (1, 0, ENDS), more=more).splitlines()[0] == (
        f"{text} This shuts Horovod down on all ranks: call it only after the last collective of "
        "every rank."
    )
    assert "hvd.shutdown" not in report_of((0, 1, BAD), more=more)


def test_a_list_of_events_can_be_written_and_read():
    plan, events = happened((0, 1, LOST), (1, -11, BAD, "step 7"), size=2)
    events += [e.AgentLost(1.0, "host0", (0,), "lost", True), e.Found(9.0, silent=("a", "b"))]
    assert e.parse(e.to_text(plan, events)) == (plan, events)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ('"rank": 1', '"rank": 7'),
        ('"rank": 1', '"rank": -1'),
        ('"status": -11', '"status": "no"'),
        ('"at": 10.01', '"at": "now"'),
        ('"at": 10.01', '"at": NaN'),
        ('"tail": ["step 7"]', '"tail": [7]'),
        ('"hosts": ["host0", "host1"]', '"hosts": "host0"'),
        ('"hosts": ["host0", "host1"]', '"hosts": []'),
        ('"ranks": [0]', '"ranks": [5]'),
        ('"number": 15', '"number": 99'),
        ("{", "["),
        ("}\n", ""),
    ],
)
def test_a_damaged_list_of_events_is_an_error(part, other):
    plan, events = happened((0, 1, LOST), (1, -11, BAD, "step 7"), size=2)
    events += [e.AgentLost(1.0, "host0", (0,), "lost"), e.StopAsked(2.0, 15)]
    text = e.to_text(plan, events)
    assert part in text
    with pytest.raises(HvdkitError, match="not the events of a job"):
        e.parse(text.replace(part, other))


# Stories: a true cause and its effects. The launcher learns of them after some time, and acts.

HOSTS, SIZE = ("a", "a", "b", "c"), 4
# Seconds that a message takes at most.
MOST_DELAY = 0.3
# How a rank ends that has lost another one: with the error, with `sys.exit` or `os._exit`, with an
# error of the script that does not mention the first one, or not at all.
HOW = ("raises", "exits", "hides", "disguises", "hangs")
CAUSES = ("raises", "is killed", "crashes", "exits", "loses its host", "loses its agent")


@st.composite
def stories(draw):
    """Draw what happens to each rank, and how long the launcher waits for each message."""
    number = st.floats(0.0, 1.0).map(lambda x: round(x, 3))
    return {
        "cause": draw(st.sampled_from(CAUSES)),
        "rank": draw(st.integers(0, SIZE - 1)),
        # Seconds from the error to the end of the process.
        "lingers": 8 * draw(number),
        # For the others: when they notice it, and how they end.
        "notices": [draw(number) for _ in range(SIZE)],
        "ends": [2 * draw(number) for _ in range(SIZE)],
        "how": [draw(st.sampled_from(HOW)) for _ in range(SIZE)],
        "seed": draw(st.integers(0, 2**31)),
    }


def true_events(story):
    """Return the events of a story without the launcher: host -> its events."""
    found = {host: [] for host in HOSTS}
    cause, kind, at = story["rank"], story["cause"], 10.0
    host, end = HOSTS[cause], 10.0 + (story["lingers"] if story["cause"] == "raises" else 0.0)
    lost = kind in ("loses its host", "loses its agent")
    if kind == "raises":
        found[host] += [e.Reported(at, cause, BAD), e.Ended(end, cause, 1)]
    elif not lost:
        status = {"is killed": -9, "crashes": -11, "exits": 3}[kind]
        found[host].append(e.Ended(end, cause, status))
    for rank in range(SIZE):
        if rank == cause or (lost and HOSTS[rank] == host):
            continue
        # The engine of the cause ends before its process, which may have threads.
        noticed, how = at + 0.01 + story["notices"][rank], story["how"][rank]
        if how == "hangs":
            continue
        found[HOSTS[rank]].append(e.CollectiveFailed(noticed, rank, "allreduce.x", "shut down"))
        if how == "disguises":
            # Otherwise, the delays of messages decide between two errors of scripts.
            noticed += MOST_DELAY
        reports = {"raises": LOST, "exits": HIDDEN, "disguises": raised("RuntimeError: failed")}
        if how in reports and not (how == "disguises" and kind != "raises"):
            found[HOSTS[rank]].append(e.Reported(noticed, rank, reports[how]))
        status = 4 if how in ("exits", "hides") else 1
        found[HOSTS[rank]].append(e.Ended(noticed + story["ends"][rank], rank, status))
    if lost:
        found[host] = [
            e.AgentLost(at + (3.0 if kind == "loses its host" else 0.0), host, _on(host),
                        f"lost {host}: it is gone", with_host=kind == "loses its host"),
        ]  # fmt: skip
    return found


def _on(host):
    return tuple(rank for rank in range(SIZE) if HOSTS[rank] == host)


def play(story, draw):
    """Return the outcome of a story for one order of arrivals, which the launcher has acted on."""
    plan = JobPlan(HOSTS)
    arrivals = []
    for events in true_events(story).values():
        arrived = 0.0
        for event in sorted(events, key=lambda each: each.at):
            # The messages of an agent arrive in their order. The launcher learns how long ago the
            # event was when the message was sent, so its time contains the delay.
            arrived = max(arrived, event.at + draw.choice([0.001, 0.02, 0.09, MOST_DELAY]))
            arrivals.append((arrived, replace(event, at=arrived)))
    arrivals.sort(key=lambda each: each[0])
    known = []
    while True:
        facts = Facts(plan, known)
        due = min(facts.end_due, facts.problem_at)
        if not arrivals or max(due, known[-1].at if known else 0.0) < arrivals[0][0]:
            break
        known.append(arrivals.pop(0)[1])
    began = max(due, arrivals[0][0] - 0.001 if arrivals else due)
    known.append(e.EndBegan(began))
    left = [event for _, event in arrivals if event.at <= began]
    gone = {event.rank for event in [*known, *left] if isinstance(event, e.Ended)}
    lost = {r for each in [*known, *left] if isinstance(each, e.AgentLost) for r in each.ranks}
    left += [e.Ended(began + 0.1, r, -15) for r in range(SIZE) if r not in gone | lost]
    late = [each for _, each in arrivals if isinstance(each, e.AgentLost) and each not in left]
    draw.shuffle(left)
    return outcome(plan, [*known, *left, *late])


@given(stories())
@settings(max_examples=300, deadline=None)
def test_the_blame_is_the_same_for_each_order_of_arrivals(story):
    draw = random.Random(story["seed"])
    cause, host = story["rank"], HOSTS[story["rank"]]
    for _ in range(8):
        found = play(story, draw)
        assert found.restartable, found
        if story["cause"].startswith("loses"):
            assert found.report.startswith(f"lost {host}: ") or found.suspects == (), found
            assert set(found.lost) <= {host}
            assert set(found.failed_agents) <= {host}
        else:
            assert found.suspects == (cause,), found
            status = {"raises": 1, "is killed": 137, "crashes": 139, "exits": 3}[story["cause"]]
            assert found.status == status


@given(stories(), st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_the_place_in_the_list_decides_nothing(story, seed):
    events = [event for each in true_events(story).values() for event in each]
    events += [e.EndBegan(12.0), e.StopAsked(11.0, signal.SIGTERM), e.ScriptEnded(9.0, 0, 75)]
    shuffled = list(events)
    random.Random(seed).shuffle(shuffled)
    assert outcome(JobPlan(HOSTS), shuffled) == outcome(JobPlan(HOSTS), events)
