"""The outcome of a job from its events: who is to blame, in each order in which they arrive."""

import random
import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import RESUMABLE, HvdkitError
from hvdkit.faults.rank_report import RankReport
from hvdkit.launch.control import controller
from hvdkit.launch.control.plan import make_plan
from hvdkit.launch.control.start_error import BrokenConnection
from hvdkit.launch.ending import events as e
from hvdkit.launch.ending.events import JobPlan
from hvdkit.launch.ending.facts import Facts
from hvdkit.launch.ending.failure import Failure
from hvdkit.launch.ending.outcome import outcome
from hvdkit.launch.hosts.hosts import Host

NEVER = float("inf")
#: A job of two ranks, one on each host.
PLAN = make_plan(["true"], "/", [Host("host0", 1), Host("host1", 1)], 2)
TWO = JobPlan(("host0", "host1"))
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
SAVED = RankReport("end", status=75)


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
    ends = controller.over_mpi({}).ends_others_with if over_mpi else ()
    return JobPlan(tuple(f"host{rank}" for rank in range(size)), ends), found


def report_of(*ends, **options):
    return outcome(*happened(*ends, **options)).report


@pytest.mark.parametrize(
    ("ends", "suspects"),
    [
        ([(0, 1, LOST), (1, 1, BAD)], [1]),
        ([(0, 1, LOST), (1, -9, None)], [1]),
        ([(0, 1, LOST), (1, 3, None, "no such file")], [1]),
        # The rank's own connection to a store, while the others report Horovod's.
        ([(0, 1, LOST), (1, 1, RESET)], [1]),
        ([(0, 1, RESET), (1, 1, BAD)], [1]),
        ([(1, 1, BAD), (0, 1, BAD), (2, 1, LOST)], [1, 0]),
        # The script has caught the error, and prints another one.
        ([(0, 4, HIDDEN, "giving up"), (1, 1, BAD)], [1]),
        ([(0, 4, ENDS, "giving up"), (1, 1, BAD)], [1]),
        ([(0, 4, ENDS, "giving up"), (1, 1, LOST)], [0]),
        ([(0, 1, LOST), (1, 1, MISMATCH)], [1]),
        # All ranks raise the error of one of them.
        ([(1, 1, AGREED), (0, 1, OF_RANK_0)], [0]),
        ([(1, 1, BAD), (0, 1, OF_RANK_0)], [1]),
        # A crash after the rank had lost a peer, in a function of `atexit`.
        ([(0, -11, LOST), (1, 1, BAD)], [1]),
        # The interpreter crashes when it ends, after the script had lost a peer.
        ([(0, -6, HIDDEN), (1, 3, None)], [1]),
        # The program of a shell has crashed. The other script hides the error of its lost peer.
        ([(0, 1, BAD), (1, 139, None)], [0]),
        ([(1, 139, None), (0, 1, BAD)], [1]),
        # Both scripts raise the same error, one of them because it has lost a peer.
        ([(0, 1, raised(BAD.error, "peer", chained=True)), (1, 1, BAD)], [1]),
        ([(0, -9, None, "step 7"), (1, -9, None, "step 7")], [0]),
        # Without a report, for example of a shell.
        ([(0, 1, None, "sh: no file"), (1, 1, None, "sh: no file")], [0, 1]),
        ([(0, 1, None, "failed"), (1, 2, None, "failed")], [0]),
        ([(0, 1, None), (1, 1, None)], [0]),
    ],
)
def test_the_ranks_that_may_have_caused_the_failures(ends, suspects):
    found = outcome(*happened(*ends))
    assert (found.failure.rank, found.suspects) == (suspects[0], tuple(suspects))


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([(0, RESUMABLE, ENDS), (1, 1, LOST)], 1),
        ([(1, 1, LOST), (0, 1, LOST)], 1),
        ([(0, 1, LOST), (1, 1, NO_START)], 1),
        ([(0, 1, NO_START)], 0),
    ],
)
def test_failures_that_are_all_consequences(ends, first):
    found = outcome(*happened(*ends))
    assert (found.failure.rank, found.suspects) == (first, ())


def test_the_first_rank_that_raises_is_the_cause_although_it_ends_later():
    # Its `atexit` functions run after its traceback.
    plan, events = happened((2, 1, raised("KeyError: 'label'")), (1, 1, None))
    events.append(e.Reported(9.5, 1, BAD))
    assert outcome(plan, events).suspects == (1,)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("ends", [{1: -15, 0: -15}, {0: RESUMABLE, 1: 143}, {1: -9, 0: -9}])
def test_a_rank_that_had_raised_before_a_stop_signal_is_the_cause(number, ends):
    """Its threads, or functions of `atexit`, run until a signal ends it."""
    events = [e.Reported(9.0, 1, BAD), e.StopAsked(9.5, number), e.EndBegan(11.0)]
    events += [e.Ended(10.0 if status != -9 else 12.0, r, status) for r, status in ends.items()]
    found = outcome(TWO, events)
    assert (found.suspects, found.status) == ((1,), 1)
    assert found.report.startswith("rank 1 on host1 failed: it raised an error, and had not ended")
    assert (found.restartable, found.interrupted) == (True, number)
    # An error after the signal may be a consequence of it.
    events[0] = e.Reported(9.7, 1, BAD)
    assert not outcome(TWO, events).restartable


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


# The report


def test_the_lines_of_a_failure():
    lines = [f"metric {number}" for number in range(25)]
    shown = report_of((1, 1, BAD, *BAD.traceback, *lines))
    expected = ["Rank 1's error:", *(f"  {line}" for line in BAD.traceback), "Rank 1's last lines:"]
    assert shown.splitlines()[1:-20] == expected
    assert shown.count("metric") == 20
    assert "error:" not in report_of((1, 1, BAD, *BAD.traceback))
    stack = ("Fatal Python error: Segmentation fault", '  File "train.py", line 7 in load')
    report = outcome(TWO, [e.Ended(1.0, 1, -11, ("step 7",), "", stack)]).report
    assert report.endswith("\n".join(["Its stack:", *(f"  {line}" for line in stack)]))
    hint = "probably by the kernel, because the memory limit of its cgroup (2.0 GB) was reached"
    killed = [e.Ended(1.0, 1, -9, (), hint), e.EndBegan(1.1), e.Ended(1.2, 0, -15)]
    named = f"rank 1 on host1 failed: killed by signal 9 (Killed), {hint}. The launcher ended 1 oth"
    assert outcome(TWO, killed).reason.startswith(named)


def test_each_kind_of_failure_is_shown_once():
    report = report_of(
        (0, 1, LOST),
        (1, 1, raised("RuntimeError: rank 1 has 3 rows")),
        (2, 1, raised("RuntimeError: rank 2 has 4 rows")),
        (3, 2, ENDS, "no disk"),
        size=5,
        more=[e.EndBegan(10.5)],
    )
    assert report.startswith(
        "rank 1 on host1 failed: exit status 1; 1 rank failed after it, because the connection was "
        "lost. The launcher ended 1 other rank."
    )
    assert "Rank 3 on host3 failed, too: exit status 2." in report
    assert "1 more rank failed like rank 1." in report
    assert "rank 2 has" not in report
    assert "HorovodInternalError" not in report


WAITED = [e.CollectiveFailed(9.0, 0, "join() (join.noname)", "shut down")]
VERDICT = [e.Found(11.0, verdict="Rank 0 waits.\nRank 1 is."), e.EndBegan(10.5)]
SHUT = "Rank 1 on vm called hvd.shutdown() at train.py:3 in <module>."
SHUTS = [e.ShutDown(9.0, 1, SHUT), e.ShutDown(8.0, 2, SHUT), e.ShutDown(8.5, 2, "")]
TRACED = "had written a traceback, and had ended with exit status 0: ValueError"


@pytest.mark.parametrize(
    ("ends", "more", "begins", "has", "lacks"),
    [
        # A rank that ended without an error, or after one.
        ([(0, 1, LOST), (1, 1, LOST), (2, 0, ENDS)], [],
         "Each rank that failed reported only that another rank had ended",
         "Rank 2 on host2 had ended without an error", TRACED),
        ([(0, 1, NO_SET), (1, 1, NO_SET), (2, 0, ENDS)], [], "Each rank that f", "Rank 2 on", "~"),
        ([(0, 1, LOST), (1, 0, ENDS)], WAITED, "",
         "Rank 1 on host1 had ended without an error, and the failed ranks waited for join() "
         "(join.noname): check whether all ranks had the same number of batches, and have called "
         "hvd.join().", TRACED),
        ([(0, 1, LOST), (1, 0, BAD)], [], "", f"Rank 1 on host1 {TRACED}", "without an error"),
        ([(0, 1, LOST), (1, 0, RankReport("exit", BAD.error, "own"))], [], "", TRACED, "without"),
        ([(0, 1, LOST), (1, 0, LOST), (2, 0, ENDS)], [], "", "Ranks 1 on host1, 2 on h", TRACED),
        ([(1, RESUMABLE, ENDS), (0, 1, LOST)], [], "",
         "Rank 1 on host1 had made an orderly stop (exit status 75).", "without an error"),
        # A process set that the script has not added; or the engine has ended the job.
        ([(0, 1, NO_SET), (1, 1, NO_SET)], [], "rank 0 on", "more rank failed like", "only that"),
        ([(0, 1, NO_SET), (1, 1, LOST)], [e.Found(11.0, verdict="Rank 0 has waited 60 s.")],
         "Rank 0 has waited 60 s.\nThen rank 0 on host0 failed: exit status 1", "", "~"),
        # An error that all ranks raise, or some.
        ([(rank, 1, MISMATCH) for rank in range(4)], [],
         "all ranks failed with the same error: exit status 1.\n", "", "failed like"),
        ([(0, 1, BAD), (1, 1, BAD), (2, 0, ENDS)], [], "rank 0 on", "1 more rank failed like", "~"),
        ([(0, 1, BAD), (1, 1, BAD)], [e.EndBegan(10.5)], "rank 0 on", "1 more rank failed l", "~"),
        # First the cause, then the rank that failed because of it.
        ([(0, 1, LOST)], VERDICT,
         "Rank 0 waits. Rank 1 is.\nThen rank 0 on host0 failed: exit status 1. The lau", "", "~"),
        ([(0, 1, BAD)], VERDICT, "rank 0 on host0 failed", "", "waits"),
        ([(0, 1, LOST), (1, 0, ENDS)], SHUTS,
         f"{SHUT} This shuts Horovod down on all ranks: call it only after the last collective of "
         "every rank.\n", "", "~"),
        ([(0, 1, BAD)], SHUTS, "rank 0 on host0 failed", "", "hvd.shutdown"),
    ],
)  # fmt: skip
def test_the_report_of_a_failure(ends, more, begins, has, lacks):
    report = report_of(*ends, more=more)
    assert report.startswith(begins)
    assert has in report
    assert lacks not in report


def test_a_script_that_hides_the_error_of_a_lost_peer():
    """Every rank prints the same line. Only the engine of rank 0 has an error."""
    ends = (0, 1, ENDS, "training failed"), (1, 1, ENDS, "training failed")
    found = outcome(*happened(*ends, engine_errors=[0]))
    assert found.suspects == (1,)
    assert "1 rank failed after it" in found.report
    assert Failure(0, -11, engine_error="shut down").is_consequence is False


# MPI


def test_ranks_that_mpirun_ends():
    """Rank 1 calls MPI_Abort, and mpirun sends SIGTERM to rank 0."""
    for first in (0, 1):
        ends = [(rank, (-15, 7)[rank], None, "step 3") for rank in (first, 1 - first)]
        found = outcome(*happened(*ends, over_mpi=True))
        assert found.suspects == (1,)
        text = "rank 1 on host1 failed: exit status 7. MPI ended 1 other rank.\n"
        assert found.report.startswith(text)
        assert "too" not in found.report
    # mpirun has lost a daemon. The status is that of Open MPI 5.
    ends = [(rank, 195, None, "step 3") for rank in (0, 1)]
    more = [e.Found(11.0, silent=("host1 is silent.",)), e.EndBegan(10.5)]
    found = outcome(*happened(*ends, over_mpi=True, more=more))
    assert "or did not answer. host1 is silent." in found.possible_causes
    assert "If mpirun or srun gets a signal, or loses its daemon on a host" in found.report
    assert found.suspects == ()
    assert outcome(*happened(*ends, (2, 3, None, "step 3"), over_mpi=True)).suspects == (2,)
    # A user has ended the rank.
    found = outcome(*happened((1, 1, LOST), (0, -15, None, "step 3"), over_mpi=True))
    assert found.suspects == (0,)
    assert "If mpirun or srun gets a signal, or loses" in found.report


# Agents and hosts

MPI = "over MPI"
TERM, PAUSE, GONE = signal.SIGTERM, "lost host1: this launcher did not run", "lost host1: it ended"
END = e.EndBegan(12.0)
LEFT = [END, e.Ended(12.1, 0, -15)]
STUCK = e.AgentFailed(11.0, "host1", (1,), "processes [7] did not end")
TOLD = [e.AgentSignalled(9.0, "host1", TERM)]
ABORTED = [e.Found(13.0, aborted_by="srun")]
GOT = "the agent on host1 got SIGTERM"


def lost(rank, at=11.0, text="", **options):
    return e.AgentLost(at, f"host{rank}", (rank,), text or f"lost host{rank}: it ended", **options)


BOTH_LOST = [lost(0, 11.1), lost(1, 11.2), *ABORTED]
KILLED_BY_SRUN = (
    "rank 1 on host1 failed: killed by signal 9 (Killed). srun then ended all other ranks.\n"
    "Rank 1 wrote nothing."
)


@pytest.mark.parametrize(
    ("events", "expected", "report"),
    [
        # mpirun has lost a host, and has ended the agent of another host before.
        ([MPI, lost(0, 10.0), lost(1, with_host=True)], (1, True, None), "lost host1: it ended"),
        ([MPI, e.AgentSignalled(9.0, "host0", TERM), lost(1, 10.0), *LEFT], (1, True, None), GONE),
        # If an agent of mpirun dies, mpirun ends the other ranks, which may be reported first.
        ([e.Ended(10.0, 0, -15), lost(1)], (1, True, "host1"),
         f"{GONE}\nSIGTERM then ended rank 0 on host0."),
        # The failure of an agent counts for its host, but not if the launcher was stopped.
        ([STUCK, *LEFT], (1, True, "host1"), "host1: processes [7] did not end"),
        ([MPI, STUCK, *LEFT], (1, True, "host1"), "host1: processes [7] did not end"),
        ([lost(1), *LEFT], (1, True, "host1"), GONE),
        ([MPI, lost(1), *LEFT], (1, True, None), GONE),
        ([lost(1, text=PAUSE, paused=True), *LEFT], (1, True, None), PAUSE),
        ([e.AgentDone(11.0, "host1", (1,)), *LEFT], (1, True, "host1"),
         "host1: its agent got SIGTERM or SIGHUP before it started rank 1 on host1. Check"),
        # It is reported beside the failure of a rank, and is not the cause later.
        ([e.Ended(10.0, 0, 3), e.EndBegan(10.5), STUCK, replace(STUCK, at=11.5), lost(1)],
         (3, True, "host0"),
         "rank 0 on host0 failed: exit status 3. The launcher ended 1 other rank.\n"
         "Rank 0 wrote nothing.\nhost1: processes [7] did not end"),
        ([e.Ended(10.0, 0, -15), END, lost(1, 13.0)], (143, True, "host0"), "rank 0 on host0 fa"),
        # The job has succeeded, although a host is lost after its ranks.
        ([e.Ended(9.0, 1, 0), lost(1), e.Ended(12.0, 0, 0)], (0, False, None), ""),
        ([e.Ended(9.0, 0, 0), e.Ended(9.0, 1, 0), STUCK, lost(1)], (0, False, None), ""),
        ([STUCK, END, e.Ended(13.0, 1, 0), e.Ended(13.0, 0, 0)], (1, True, "host1"), "host1: pro"),
        # An agent gets SIGTERM: its ranks save, do not handle it, or do not end.
        ([*TOLD, e.Ended(10.0, 1, 75), e.Ended(11.0, 0, 75)], (75, False, None),
         f"{GOT}\nstopped; start the job"),
        ([*TOLD, e.Ended(10.0, 1, -15), *LEFT], (143, True, "host1"), f"{GOT}\nSIGTERM then"),
        ([*TOLD, e.Ended(10.0, 1, 143), *LEFT], (143, True, "host1"), f"{GOT}\nSIGTERM then"),
        ([*TOLD, e.LateStop(11.9, "late"), *LEFT, e.Ended(13.0, 1, -9)], (1, True, None),
         f"{GOT}\nlate"),
        ([*TOLD, e.Ended(10.0, 0, 75), e.LateStop(11.9, "late"), END, e.Ended(13.0, 1, -9)],
         (1, False, None), f"{GOT}\nonly rank 0 on host0"),
        ([*TOLD, lost(1), *LEFT], (1, True, "host1"), f"{GOT}\n{GONE}"),
        ([*TOLD, e.Ended(10.0, 1, 3), *LEFT], (3, True, "host1"), "rank 1 on host1 failed: "),
        # The rank had raised an exception before its agent got the signal.
        ([e.Reported(8.0, 1, BAD), *TOLD, e.Ended(10.0, 1, -15), *LEFT], (143, True, "host1"),
         "rank 1 on"),
        # A batch system signals all processes.
        ([*TOLD, e.StopAsked(9.1, TERM), e.Ended(10.0, 1, -15), e.Ended(10.0, 0, -15)],
         (143, False, None), "ended by SIGTERM"),
        # Slurm ends the job step while other ranks save, or after a rank was killed.
        ([MPI, e.Ended(10.0, 0, 75), *BOTH_LOST], (1, False, None),
         "only rank 0 on host0 made an orderly stop (exit status 75)\nsrun has ended all ranks"),
        ([MPI, e.Ended(10.0, 1, -9), *BOTH_LOST], (137, True, "host1"), KILLED_BY_SRUN),
        ([MPI, e.Exited(10.0, 1, -9), *BOTH_LOST], (137, True, "host1"), KILLED_BY_SRUN),
        ([MPI, e.Exited(10.0, 1, -9), e.Exited(10.1, 0, -9), *BOTH_LOST], (137, True, "host1"),
         KILLED_BY_SRUN),
        ([MPI, e.Reported(10.0, 1, raised("MemoryError")), *BOTH_LOST], (1, True, None),
         "srun has ended all ranks of the job step"),
        # The other ranks may still save, or copy the checkpoint.
        ([e.Reported(9.0, 1, SAVED), e.Ended(10.0, 1, 139), e.Ended(11.0, 0, 75)],
         (75, False, None),
         "rank 1 on host1 had reached the end of the script, and was then killed by signal 11"),
    ],
)  # fmt: skip
def test_agents_and_hosts(events, expected, report):
    """The outcome is the exit status, whether the job may start again, and the failing host."""
    ends = controller.over_mpi({}).ends_others_with if MPI in events else ()
    found = outcome(JobPlan(TWO.hosts, ends), [event for event in events if event != MPI])
    assert (found.status, found.restartable, found.failing_host(PLAN)) == expected
    assert found.report.startswith(report)
    assert bool(found.report) == bool(report)


def test_srun_ends_all_ranks_before_an_agent_can_report():
    report = outcome(TWO, [e.Reported(10.0, 1, raised("MemoryError")), *BOTH_LOST]).report
    assert report.endswith("MemoryError")
    assert "rank 0" not in report
    assert "host" not in report


def test_a_crash_after_the_end_of_the_script_does_not_end_other_ranks():
    crash = [e.Reported(9.0, 1, SAVED), e.Ended(10.0, 1, -6)]
    facts = Facts(TWO, crash)
    assert (facts.end_due, facts.problem_at) == (NEVER, NEVER)


def test_a_rank_that_hangs_while_another_one_loses_the_connection_is_named():
    ends = [e.Reported(10.0, 0, LOST), e.Ended(10.0, 0, 1), e.EndBegan(16.0), e.Ended(17.0, 1, -9)]
    found = outcome(TWO, ends)
    assert "Rank 1 on host1 had not failed: check whether a process was" in found.possible_causes
    assert found.suspects == ()
    broken = found.with_broken([BrokenConnection("host0", "host1", "10.0.0.2", "refused")])
    causes, connections, failure = broken.report.splitlines()[:3]
    assert "had not failed" not in broken.report
    assert causes == broken.possible_causes
    assert connections.startswith("Connections that fail now: ")
    assert failure.startswith("Then rank 0 on host0 failed")
    assert broken.reason == f"{causes} {failure}"


def test_a_list_of_events_can_be_written_and_read():
    plan, events = happened((0, 1, LOST), (1, -11, BAD, "step 7"), size=2)
    events += [e.AgentLost(1.0, "host0", (0,), "lost", True), e.Found(9.0, silent=("a", "b"))]
    assert e.parse(e.to_text(plan, events)) == (plan, events)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        *(('"rank": 1', '"rank": 7'), ('"rank": 1', '"rank": -1'), ("{", "["), ("}\n", "")),
        *(('"status": -11', '"status": "no"'), ('"tail": ["step 7"]', '"tail": [7]')),
        *(('"at": 10.01', '"at": "now"'), ('"at": 10.01', '"at": NaN')),
        ('"hosts": ["host0", "host1"]', '"hosts": "host0"'),
        ('"hosts": ["host0", "host1"]', '"hosts": []'),
        *(('"ranks": [0]', '"ranks": [5]'), ('"number": 15', '"number": 99')),
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
STATUSES = {"raises": 1, "is killed": -9, "crashes": -11, "exits": 3}
CAUSES = (*STATUSES, "loses its host", "loses its agent")


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
        # mpirun ends the other ranks after one has ended.
        "over_mpi": draw(st.booleans()),
        # Seconds from the end of a process until all its output has arrived.
        "drains": draw(number),
        "seed": draw(st.integers(0, 2**31)),
    }


def true_events(story):
    """Return the events of a story without the launcher: host -> its events."""
    found = {host: [] for host in HOSTS}
    cause, kind, at = story["rank"], story["cause"], 10.0
    host, end = HOSTS[cause], 10.0 + (story["lingers"] if story["cause"] == "raises" else 0.0)
    lost = kind in ("loses its host", "loses its agent")
    if kind == "raises":
        found[host].append(e.Reported(at, cause, BAD))
    if not lost:
        found[host] += ends_of(story, cause, end, STATUSES[kind])
    for rank in range(SIZE):
        if rank == cause or (lost and HOSTS[rank] == host):
            continue
        # The engine of the cause ends before its process, which may have threads.
        noticed, how = at + 0.01 + story["notices"][rank], story["how"][rank]
        if how == "hangs":
            if story["over_mpi"] and not lost:
                found[HOSTS[rank]] += ends_of(story, rank, end + story["notices"][rank], -15)
            continue
        found[HOSTS[rank]].append(e.CollectiveFailed(noticed, rank, "allreduce.x", "shut down"))
        if how == "disguises":
            # Otherwise, the delays of messages decide between two errors of scripts.
            noticed += MOST_DELAY
        reports = {"raises": LOST, "exits": HIDDEN, "disguises": raised("RuntimeError: failed")}
        if how in reports and not (how == "disguises" and kind != "raises"):
            found[HOSTS[rank]].append(e.Reported(noticed, rank, reports[how]))
        status = 4 if how in ("exits", "hides") else 1
        found[HOSTS[rank]] += ends_of(story, rank, noticed + story["ends"][rank], status)
    if lost:
        found[host] = [
            e.AgentLost(at + (3.0 if kind == "loses its host" else 0.0), host, _on(host),
                        f"lost {host}: it is gone", with_host=kind == "loses its host"),
        ]  # fmt: skip
    return found


def ends_of(story, rank, at, status):
    """Return the events of the end of a rank's process."""
    return [e.Exited(at, rank, status), e.Ended(at + story["drains"], rank, status)]


def plan_of(story):
    ends = controller.over_mpi({}).ends_others_with if story["over_mpi"] else ()
    return JobPlan(HOSTS, ends)


def _on(host):
    return tuple(rank for rank in range(SIZE) if HOSTS[rank] == host)


def play(story, draw):
    """Return the outcome of a story for one order of arrivals, which the launcher has acted on."""
    plan = plan_of(story)
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
    gone = {event.rank for event in [*known, *left] if isinstance(event, e.Exited)}
    # Their output arrives later.
    left += [
        event
        for _, event in arrivals
        if isinstance(event, e.Ended) and event.rank in gone and event not in left
    ]
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
            assert set(found.failed_agents) <= (set() if story["over_mpi"] else {host})
        else:
            assert found.suspects == (cause,), found
            status = STATUSES[story["cause"]]
            assert found.status == (status if status > 0 else 128 - status)


@given(stories(), st.integers(0, 2**31))
@settings(max_examples=200, deadline=None)
def test_the_place_in_the_list_decides_nothing(story, seed):
    events = [event for each in true_events(story).values() for event in each]
    events += [
        e.EndBegan(12.0),
        e.StopAsked(11.0, signal.SIGTERM),
        e.Reported(9.0, 0, RankReport("end", status=75)),
    ]
    shuffled = list(events)
    random.Random(seed).shuffle(shuffled)
    assert outcome(JobPlan(HOSTS), shuffled) == outcome(JobPlan(HOSTS), events)


# Stories of stops: some ranks save, others do not, and maybe a signal has asked for it.

# When the launcher ends the ranks that still run.
KILLED = 20.0


def ends_with(status, later=None):
    """Return a function of a rank and a time: the rank ends then, or later."""
    return lambda rank, at: [e.Ended(at if later is None else later, rank, status)]


def saves_and(status, later=None, report=None):
    """Return the same for a rank that saves first. The process ends 0.1 s or much later."""

    def story(rank, at):
        again = [] if report is None else [e.Reported(at + 0.1, rank, report)]
        return [e.Reported(at, rank, SAVED), *again, e.Ended(later or at + 0.1, rank, status)]

    return story


# How a rank ends: given the rank and a time, its events; and its status if it ends in order.
STOPS = {
    "saves": (ends_with(75), 75),
    "succeeds": (ends_with(0), 0),
    "changes hosts": (ends_with(85), 85),
    "fails": (ends_with(3), None),
    "hangs": (ends_with(-9, KILLED + 1), None),
    "is lost": (lambda rank, at: [e.AgentLost(at, f"host{rank}", (rank,), "lost it")], None),
    # The process ends after the script: the launcher kills it, maybe in a shell, or it crashes.
    "saves, and lingers": (saves_and(-9, KILLED + 1), 75),
    "saves, and lingers in a shell": (saves_and(143, KILLED + 1), 75),
    "saves, and crashes": (saves_and(-6), 75),
    "saves, and crashes in a shell": (saves_and(139), 75),
    # The command goes on with another script, or the script has caught its SystemExit.
    "saves, and continues": (saves_and(-9, KILLED + 1, RankReport("start")), None),
    "saves, and then succeeds": (saves_and(0), 0),
    "saves, and then fails": (saves_and(3, KILLED + 1), None),
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TIMES = st.integers(1000, 1200).map(lambda n: n / 100)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STOPS)), TIMES), min_size=1, max_size=3),
    # Never at the time of an end.
    st.none() | st.tuples(TIMES.map(lambda at: at - 0.205), st.sampled_from(SIGNALS)),
    st.booleans(),
)
@settings(max_examples=600, deadline=None)
def test_a_job_is_resumable_only_if_it_was_stopped_first_and_all_ranks_have_saved(
    ranks, stop, elastic
):
    events = [each for rank, (how, at) in enumerate(ranks) for each in STOPS[how][0](rank, at)]
    failed_at = min([at for how, at in ranks if how in ("fails", "is lost")], default=NEVER)
    if not elastic:
        # The status of a script like any other.
        failed_at = min([failed_at, *(at for how, at in ranks if how == "changes hosts")])
    if any(isinstance(each, e.Ended) and each.at > KILLED for each in events):
        events += [] if failed_at < NEVER else [e.LateStop(KILLED - 0.1, "rank 0 did not stop")]
        events.append(e.EndBegan(KILLED))
    if stop is not None:
        events.append(e.StopAsked(*stop))
    found = outcome(JobPlan(tuple(f"host{n}" for n in range(len(ranks))), (), elastic), events)
    ends = [85 if how == "changes hosts" and elastic else STOPS[how][1] for how, _ in ranks]
    if not elastic:
        ends = [None if end == 85 else end for end in ends]
    saves = [at for (how, at), end in zip(ranks, ends, strict=True) if end == 75]
    asked_first = stop is not None and stop[0] < failed_at
    stopped_first = asked_first or min(saves, default=NEVER) < failed_at
    # Nothing but a stop that came first, and that all ranks have followed, is resumable.
    assert (found.status == 75) == (stopped_first and None not in ends and 75 in ends)
    resume = "stopped; start the job again to resume it (exit status 75)"
    assert (found.report.splitlines()[-1:] == [resume]) == (found.status == 75)
    if stopped_first:
        # The interruption prevents the restart.
        assert not found.restartable or (found.hosts_changed and found.interrupted == stop[1])
    elif failed_at < NEVER:
        assert found.restartable
        assert found.interrupted == (None if stop is None else stop[1])
    elif 85 in ends and None not in ends:
        assert (found.status, found.hosts_changed, found.restartable) == (85, True, True)
    if set(ends) == {0}:
        assert (found.status, bool(found.report)) == (0, stop is not None)
    if None in ends:
        assert found.status != 0
        if failed_at == NEVER and asked_first and not found.hosts_changed:
            assert found.status == 128 + stop[1]
    if 75 in ends and None in ends and asked_first and not found.hosts_changed:
        assert "made an orderly stop (exit status 75)" in found.report or found.failure


def test_what_was_saved_is_a_part_of_the_outcome():
    found = outcome(JobPlan(("h",)), [e.Saved(1.0), e.Committed(1.5), e.Ended(2.0, 0, -9)])
    assert (found.saved, found.committed) == (True, True)
    found = outcome(JobPlan(("h",)), [e.Ended(2.0, 0, -9)])
    assert (found.saved, found.committed) == (False, False)
