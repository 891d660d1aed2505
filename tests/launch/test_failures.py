"""The choice of the failure that is the cause of the others."""

import time

import pytest

from hvdkit.errors import RESUMABLE
from hvdkit.launch.failures import Failure, Failures

LOST = ("Traceback (most recent call last):", "HorovodInternalError: Horovod has been shut down.")
RESET = ("Traceback (most recent call last):", "ConnectionResetError: Connection reset by peer")
# A call of torch.distributed, as in Accelerate.
CLOSED = (
    "Traceback (most recent call last):",
    '  File "/venv/torch/distributed/distributed_c10d.py", line 4287, in all_gather',
    "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:7066",
)
# Ranks that cannot connect to each other, while the launcher reaches all hosts.
SILENT_START = (
    "[E operations.cc:429] Horovod could not be initialized: [gloo/transport/tcp/unbound_buffer.cc"
    ":81] Timed out waiting 65000ms for recv operation to complete",
    "Traceback (most recent call last):",
    "ValueError: Horovod initialization failed. Please check log messages above.",
)
SILENT = (
    LOST[0],
    "HorovodInternalError: [gloo/transport/tcp/pair.cc:553] Read error: No route to host",
)
# A call on a process set after the shutdown.
NO_SET = (
    LOST[0],
    "ValueError: Allreduce: Process set provided does not exist, or has not been registered.",
)
# A rank of the same host has ended.
ENDED = (
    LOST[0],
    '  File "train.py", line 3, in main',
    "HorovodInternalError: collective in shared memory: rank 1 has ended",
)
NO_ADDRESS = (
    LOST[0],
    "RuntimeError: [gloo/transport/tcp/device.cc:84] Unable to find address for: eth9",
    "wandb: ERROR Run initialization has timed out after 90.0 sec.",
)
# Typer's traceback. The last line is longer than the frame.
FRAMED = (
    "╭───────────── Traceback (most recent call last) ─────────────╮",
    "│ /root/train.py:3 in main                                    │",
    "╰─────────────────────────────────────────────────────────────╯",
    "RuntimeError: [/horovod/gloo/transport/tcp/pair.cc:590] Connection ",
    "closed by peer [10.1.2.3]:3985",
)
CHAINED = (
    *LOST,
    "The above exception was the direct cause of the following exception:",
    "Traceback (most recent call last):",
    "RuntimeError: step 7 failed",
)
MISMATCH = (
    "Traceback (most recent call last):",
    "HorovodInternalError: Mismatched ALLREDUCE shapes",
)
AGREED = (LOST[0], "CheckpointError: rank 0: No space left on device")
OF_RANK_0 = (
    LOST[0],
    "OSError: No space left on device",
    "The above exception was the direct cause of the following exception:",
    *AGREED,
)
BAD = ("HorovodInternalError is caught", "Traceback (most recent call last):", "ValueError: bad")


def failures(*ends):
    found = Failures(lambda ranks: f"rank {', '.join(map(str, ranks))}")
    for rank, status, tail in ends:
        found.add(rank, status, tail)
    return found


def report_of(found, *arguments, **options):
    """Return what the user reads: the possible causes, and the failures."""
    return "\n".join(filter(None, found.report(*arguments, **options)))


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([(0, 1, LOST), (1, 1, BAD)], 1),
        ([(0, 1, LOST), (1, -9, ())], 1),
        ([(0, 1, ENDED), (1, 3, ["no such file"])], 1),
        ([(0, 1, FRAMED), (1, 3, ["no such file"])], 1),
        # The rank's own connection to a store, while the others report Horovod's.
        ([(0, 1, LOST), (1, 1, RESET)], 1),
        ([(0, 1, RESET), (1, 1, BAD)], 1),
        ([(0, 1, CLOSED), (1, 1, RESET)], 1),
        ([(1, 1, BAD), (0, 1, BAD)], 1),
        ([(0, RESUMABLE, ()), (1, 1, LOST)], 1),
        ([(1, 1, LOST), (0, 1, LOST)], 1),
        ([(0, 1, CHAINED), (1, 1, BAD)], 1),
        # An error of Gloo, and then a line about something else.
        ([(0, 1, LOST), (1, 1, NO_ADDRESS)], 1),
        # The script has caught the error, and prints another one.
        ([(0, 4, ["giving up"]), (1, 1, BAD)], 1),
        ([(0, 4, ["giving up"]), (1, 1, LOST)], 0),
        ([(0, 1, LOST), (1, 1, MISMATCH)], 1),
        # All ranks raise the error of one of them.
        ([(1, 1, AGREED), (0, 1, OF_RANK_0)], 0),
        ([(1, 1, BAD), (0, 1, OF_RANK_0)], 1),
    ],
)
def test_the_cause(ends, cause):
    assert failures(*ends).cause.rank == cause


def test_the_first_rank_that_raises_is_the_cause_although_it_ends_later():
    # Its `atexit` functions run after its traceback.
    found = failures((2, 1, (LOST[0], "KeyError: 'label'")))
    found.add(1, 1, BAD, time.monotonic() - 0.5)
    assert found.cause.rank == 1


def test_an_error_that_the_script_caught_long_ago_is_not_the_first():
    found = failures((2, 1, BAD))
    found.add(1, 3, BAD, time.monotonic() - 600.0)
    assert found.cause.rank == 2


@pytest.mark.parametrize(
    ("ends", "suspects"),
    [
        ([(0, 1, LOST), (1, 1, BAD)], [1]),
        ([(0, 1, LOST), (1, 1, LOST)], []),
        ([(0, 1, SILENT_START)], []),
        ([(0, 1, SILENT), (1, 1, LOST)], []),
        ([(1, 1, BAD), (0, 1, BAD), (2, 1, LOST)], [1, 0]),
        ([(1, 1, AGREED), (0, 1, OF_RANK_0)], [0]),
        ([(0, -9, ["step 7"]), (1, -9, ["step 7"])], [0]),
        # Python has no traceback for such an error.
        ([(0, 1, ["SyntaxError: invalid"]), (1, 1, ["SyntaxError: invalid"])], [0, 1]),
        ([(0, 1, ["failed"]), (1, 2, ["failed"])], [0]),
        ([(0, 1, ()), (1, 1, ())], [0]),
    ],
)
def test_the_ranks_that_may_have_caused_the_failures(ends, suspects):
    assert failures(*ends).suspects == suspects


@pytest.mark.parametrize(
    ("tail", "exception"),
    [
        (
            FRAMED,
            "RuntimeError: [/horovod/gloo/transport/tcp/pair.cc:590] Connection closed by peer "
            "[10.1.2.3]:3985",
        ),
        (
            [
                "+--------- Traceback (most recent call last) ---------+",
                "| /root/train.py:3 in main                             |",
                "+------------------------------------------------------+",
                "ValueError: bad config",
            ],
            "ValueError: bad config",
        ),
    ],
    ids=["unicode", "ascii"],
)
def test_the_exception_of_a_traceback_with_a_frame(tail, exception):
    assert Failure(0, 1, ["begin", *tail]).exception == exception


def test_a_script_that_hides_the_error_of_a_lost_peer():
    """Every rank prints the same line. Only rank 1 has another error than that of its engine."""
    error = "Horovod has been shut down. This was caused by an exception"
    found = failures()
    found.add(0, 1, ["training failed"], engine_error=lambda: error)
    found.add(1, 1, ["training failed"])
    assert (found.cause.rank, found.suspects) == (1, [1])
    assert "1 rank failed after it" in report_of(found, ended=0, finished=[])
    assert Failure(0, -11, ["training failed"], engine_error=error).is_lost_peer is False


@pytest.mark.parametrize(
    ("status", "seconds", "exception"),
    [(1, 0.5, BAD[-1]), (1, 60.0, BAD[-1]), (4, 0.5, BAD[-1]), (4, 60.0, None), (-11, 60.0, None)],
)
def test_the_exception_of_a_failure(status, seconds, exception):
    """After status 1, functions of `atexit` may have run for long."""
    lines = [*BAD[:2], '  File "/home/me/train.py", line 23, in <module>', BAD[2], "step 51"]
    found = failures()
    found.add(1, status, lines, time.monotonic() - seconds)
    assert found.cause.exception == exception
    assert bool(found.cause.traceback) == (exception is not None)


def test_an_old_error_of_a_lost_peer_is_not_the_failure():
    found = failures((0, 1, LOST))
    found.add(1, -11, LOST, time.monotonic() - 60.0)
    assert found.cause.rank == 1


def test_the_exception_is_shown_although_many_lines_follow_it():
    lines = [LOST[0], '  File "/home/me/train.py", line 23, in <module>', "ValueError: bad"]
    summary = [f"metric {number}" for number in range(25)]
    report = report_of(failures((1, 1, [*lines, *summary])), ended=0, finished=[])
    expected = ["Rank 1's error:", *(f"  {line}" for line in lines), "Rank 1's last lines:"]
    assert report.splitlines()[1:-20] == expected
    assert report.count("metric") == 20
    assert "error:" not in report_of(failures((1, 1, lines)), ended=0, finished=[])


def test_each_kind_of_failure_is_shown_once():
    found = failures(
        (0, 1, LOST),
        (1, 1, [LOST[0], "RuntimeError: rank 1 has 3 rows"]),
        (2, 1, [LOST[0], "RuntimeError: rank 2 has 4 rows"]),
        (3, 2, ["no disk"]),
    )
    report = report_of(found, ended=1, finished=[])
    assert report.startswith(
        "rank 1 failed: exit status 1; 1 rank failed after it, because the connection was lost. "
        "The launcher ended 1 other rank."
    )
    assert "Rank 3 failed, too: exit status 2." in report
    assert "1 more rank failed like rank 1." in report
    assert "rank 2 has" not in report
    assert "HorovodInternalError" not in report


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_mpirun_has_ended_is_not_the_cause(first):
    """Rank 1 calls MPI_Abort, and mpirun sends SIGTERM to rank 0."""
    found = Failures(lambda ranks: f"rank {ranks[0]}", over_mpi=True)
    for rank in (first, 1 - first):
        found.add(rank, (-15, 7)[rank], ["step 3"])
    assert found.cause.rank == 1
    report = report_of(found, ended=0, finished=[])
    assert report.startswith("rank 1 failed: exit status 7. MPI ended 1 other rank.\n")
    assert "too" not in report


def test_ranks_that_end_because_mpirun_has_lost_a_daemon():
    """The lines are those of Open MPI 5."""
    lines = ["step 3", "[host1:00000] *** An error occurred in PMIx Event Notification"]
    found = Failures(lambda ranks: f"rank {ranks[0]}", over_mpi=True)
    for rank in (0, 1):
        found.add(rank, 195, lines)
    causes, report = found.report(0, [], remarks=["host1 is silent."])
    assert causes.endswith("or did not answer. host1 is silent.")
    assert "If mpirun or srun gets a signal, or loses its daemon on a host" in report
    assert found.suspects == []
    found.add(2, 3, ["step 3"])
    assert found.cause.rank == 2


def test_a_rank_over_mpi_that_a_user_has_ended_is_the_cause():
    found = Failures(lambda ranks: f"rank {ranks[0]}", over_mpi=True)
    found.add(1, 1, LOST)
    found.add(0, -15, ["step 3"])
    assert found.cause.rank == 0
    assert "If mpirun or srun gets a signal, or loses" in report_of(found, ended=0, finished=[])


@pytest.mark.parametrize("lost", [LOST, CLOSED, NO_SET])
def test_a_rank_that_ended_without_an_error_is_named(lost):
    report = report_of(failures((0, 1, lost), (1, 1, lost)), ended=0, finished=[2])
    assert "Each rank that failed reported only that another rank had ended" in report
    assert "Rank 2 had ended without an error" in report


def test_the_call_in_which_the_ranks_have_failed():
    awaited = {0: "join() (join.noname)"}
    report = report_of(failures((0, 1, LOST)), ended=0, finished=[1], awaited=awaited)
    assert (
        "Rank 1 had ended without an error, and the failed ranks waited for join() (join.noname): "
        "check whether all ranks had the same number of batches, and have called hvd.join()."
    ) in report


def test_a_process_set_that_the_script_has_not_added():
    report = report_of(failures((0, 1, NO_SET), (1, 1, NO_SET)), ended=0, finished=[])
    assert report.startswith("rank 0 failed: exit status 1.")
    assert "reported only that another rank" not in report
    assert failures((0, 1, NO_SET), (1, 1, BAD)).cause.rank == 1
    # The engine has ended the job after a stall.
    found = failures((0, 1, NO_SET), (1, 1, LOST))
    report = report_of(found, ended=0, finished=[], before="Rank 0 has waited 60 s.")
    assert report.startswith("Rank 0 has waited 60 s.\nThen rank 0 failed: exit status 1.")


@pytest.mark.parametrize(
    ("error", "seconds", "shown"),
    [(BAD[-1], 0.5, True), (BAD[-1], 600.0, False), (LOST[-1], 0.5, False)],
)
def test_a_rank_that_ended_with_status_0_after_an_error(error, seconds, shown):
    # The script has caught the error, or has called `os._exit(0)`.
    found = failures((0, 1, LOST))
    tail = [LOST[0], '  File "/home/me/train.py", line 23, in <module>', error]
    found.add_success(1, tail, time.monotonic() - seconds)
    found.add_success(2, ["trained"], float("-inf"))
    report = report_of(found, ended=0, finished=[1, 2])
    text = f"Rank 1 had written a traceback, and had ended with exit status 0: {error}. After"
    assert (text in report) == shown
    assert ("Rank 1, 2 had ended without an error: check" in report) != shown


def test_an_error_that_all_ranks_raise():
    report = report_of(failures((0, 1, MISMATCH), (1, 1, MISMATCH)), ended=0, finished=[])
    assert report.startswith("all ranks failed with the same error: exit status 1.\n")
    assert "reported only that another rank" not in report
    assert "failed like" not in report


@pytest.mark.parametrize(("ended", "finished"), [(1, []), (0, [2])])
def test_an_error_that_some_ranks_raise(ended, finished):
    report = report_of(failures((0, 1, BAD), (1, 1, BAD)), ended=ended, finished=finished)
    assert report.startswith("rank 0 failed: exit status 1")
    assert "1 more rank failed like rank 0." in report


def test_a_rank_that_has_stopped_in_order_is_named():
    report = report_of(failures((1, RESUMABLE, ()), (0, 1, LOST)), ended=0, finished=[])
    assert "Rank 1 had made an orderly stop (exit status 75)." in report


def test_the_verdict_on_the_stall_in_which_ranks_failed():
    report = report_of(
        failures((0, 1, LOST)), ended=1, finished=[], before="Rank 0 waits.\nRank 1 is."
    )
    # First the cause, then the rank that failed because of it.
    assert report.splitlines()[:2] == [
        "Rank 0 waits. Rank 1 is.",
        "Then rank 0 failed: exit status 1. The launcher ended 1 other rank.",
    ]
    assert "waits" not in report_of(
        failures((0, 1, BAD)), ended=1, finished=[], before="Rank 0 waits"
    )


def test_a_rank_that_has_shut_horovod_down_is_named():
    departed = ["Rank 1 on vm called hvd.shutdown() at train.py:3 in <module>."]
    report = report_of(failures((0, 1, LOST)), 1, [1], "Rank 0 waits.", departed)
    assert report.splitlines()[0] == (
        f"{departed[0]} This shuts Horovod down on all ranks: call it only after the last "
        "collective of every rank."
    )
    assert "hvd.shutdown" not in report_of(failures((0, 1, BAD)), 1, [], departed=departed)


def test_an_exception_group():
    group = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "train.py", line 3, in <module>',
        "  |     raise ExceptionGroup('of 2 workers', errors)",
        "  | ExceptionGroup: of 2 workers (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "train.py", line 1, in <module>',
        "    |     raise ValueError('bad sample')",
        "    | ValueError: bad sample",
        "    +------------------------------------",
    ]
    failure = failures((0, 1, ["step 7", *group])).cause
    assert failure.traceback == group
    assert failure.exception == "ExceptionGroup: of 2 workers (1 sub-exception)"
    assert failure.last_line == "    | ValueError: bad sample"


DESTRUCTOR = [
    "Exception ignored in: <function Loader.__del__ at 0x7f>",
    "Traceback (most recent call last):",
    '  File "loader.py", line 3, in __del__',
    "AttributeError: socket",
]
THREAD = [
    "Exception in thread Thread-1 (read):",
    "Traceback (most recent call last):",
    '  File "loader.py", line 9, in read',
    "OSError: closed",
]


@pytest.mark.parametrize("others", [DESTRUCTOR, THREAD, [*THREAD, *DESTRUCTOR]])
def test_the_error_of_a_destructor_or_a_thread_is_not_that_of_the_rank(others):
    lost = [LOST[0], '  File "train.py", line 9, in <module>', LOST[1]]
    failure = Failure(0, 1, [*lost, *others])
    assert failure.is_lost_peer
    assert failure.traceback == lost
    assert Failure(0, 1, [*others, *lost]).traceback == lost
    assert Failure(0, 1, others).exception in ("AttributeError: socket", "OSError: closed")


def test_an_exception_whose_text_has_several_lines():
    lines = [
        LOST[0],
        '  File "train.py", line 9, in <module>',
        "pydantic_core.ValidationError: 2 validation errors for Config",
        "rate",
        "  Input should be a valid number",
        "batch",
        "  Input should be a valid integer",
        "resource_tracker.py:254: UserWarning: leaked",
        "  warnings.warn(",
        "bye",
    ]
    failure = Failure(0, 1, lines)
    assert failure.exception == "pydantic_core.ValidationError: 2 validation errors for Config"


def test_the_prefix_of_torch_distributed_is_not_part_of_a_traceback():
    lines = [BAD[1], '  File "train.py", line 3, in <module>', "    step()", "", BAD[2]]
    failure = Failure(1, 1, ["step 7", *(f"[rank1]: {line}" for line in lines), "leaked 1 file"])
    assert failure.traceback == [*lines, "leaked 1 file"]
    assert failure.exception == "ValueError: bad"


def test_other_ranks_get_more_time_while_the_cause_is_unknown():
    lost = failures((0, 1, LOST)).deadline
    silent = failures((0, 1, ["no disk"])).deadline
    known = failures((0, 1, BAD)).deadline
    assert lost > silent > known
    assert failures((0, RESUMABLE, ())).deadline == float("inf")


def test_the_exception_within_an_error_of_tensorflow():
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        "tensorflow.python.framework.errors_impl.UnknownError: Graph execution error:",
        "2 root error(s) found.",
        "  (0) UNKNOWN:  OSError: cannot decode image 12",
        "Traceback (most recent call last):",
        "",
        '  File "/venv/script_ops.py", line 267, in __call__',
        "    ret = func(*args)",
        "",
        "OSError: cannot decode image 12",
        "",
        "",
        "\t [[{{node PyFunc}}]]",
    ]
    assert Failure(1, 1, lines).exception == "OSError: cannot decode image 12"
