"""The launcher's collection of records."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.faults import records
from hvdkit.faults.command import why
from hvdkit.faults.verdict import judge
from hvdkit.launch.stalls import Stalls

WAITS = """Current thread 0x02 (most recent call first):
  File "/venv/site-packages/horovod/torch/mpi_ops.py", line 1 in synchronize
  File "/home/me/train.py", line 2 in <module>
"""
LEAVES = """Current thread 0x02 (most recent call first):
  File "/home/me/train.py", line 9 in upload
"""


def record(rank, name, reason="request", number=1, ahead=0.0, waited=60.0):
    call = {"name": name, "call": number, "operation": 0, "set": 0, "dtype": 7, "bytes": 4,
            "enqueued": 61.0 + ahead - waited, "ended": None}  # fmt: skip
    return json.dumps(
        {"version": 1, "rank": rank, "size": 2, "host": "h", "pid": 1, "reason": reason,
         "time": 61.0 + ahead, "limit": 90, "error": "", "failed": "", "groups": {}, "labels": {},
         "calls": {name: number}, "open": [call], "done": [], "stacks": WAITS}
    )  # fmt: skip


def stalls(tmp_path=None):
    asked = []
    return Stalls(2, tmp_path, lambda: asked.append(1)), asked


def answer(job, now, second="y", number=1, ahead=0.0, silent=()):
    job.add(record(0, "x", ahead=ahead), now)
    job.add(record(1, second, number=number), now)
    return job.check(now, (), lambda: silent)


def test_a_stall_makes_the_launcher_ask_once():
    job, asked = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    job.add(record(1, "y", "stall"), 100.1)
    assert len(asked) == 1


def test_a_deadlock_is_certain_after_one_round():
    job, asked = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    # Each record has another offset to the time of day.
    assert answer(job, 101.0, ahead=1e-6).deadlock
    assert len(asked) == 1


PROGRAMS = st.lists(st.lists(st.sampled_from("xyz"), max_size=4), min_size=2, max_size=3)


@given(PROGRAMS, st.integers(0, 2**31))
@settings(max_examples=300, deadline=None)
def test_a_deadlock_is_only_reported_if_no_rank_can_continue(programs, seed):
    """Each rank calls its collectives in turn, and writes its record at another moment."""
    draw, size = random.Random(seed), len(programs)
    position, seen = [0] * size, {}

    def calls(rank):
        made = programs[rank][: position[rank] + 1]
        return {name: made.count(name) for name in set(made)}

    def runnable(rank):
        if position[rank] == len(programs[rank]):
            return False
        name = programs[rank][position[rank]]
        return all(calls(r).get(name, 0) >= calls(rank)[name] for r in range(size))

    def look(rank):
        if position[rank] == len(programs[rank]):
            seen[rank] = works(rank)
            return
        name, made = programs[rank][position[rank]], calls(rank)
        content = json.loads(record(rank, name, number=made[name]))
        seen[rank] = json.dumps(content | {"size": size, "calls": made})

    while (can := [rank for rank in range(size) if runnable(rank)]) or len(seen) < size:
        left = [rank for rank in range(size) if rank not in seen]
        if left and (not can or draw.random() < 0.3):
            look(draw.choice(left))
        if can:
            position[draw.choice(can)] += 1
        elif len(seen) == size:
            break
    found = {rank: records.parse(text) for rank, text in seen.items()}
    stuck = all(position[rank] < len(programs[rank]) for rank in range(size))
    assert stuck or not judge(found, {}, size).deadlock


def test_a_rank_that_calls_the_collective_between_the_records_is_not_blamed_on_the_network():
    job, asked = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    # Rank 1 has called `x` after rank 0 has written its record, so it has ended on both.
    job.add(record(0, "x"), 101.0)
    job.add(record(1, "x", waited=0.01), 101.0)
    assert job.check(101.0, ()) is None
    assert job.check(106.0, ()) is None
    assert len(asked) == 2
    job.add(record(0, "z"), 107.0)
    job.add(record(1, "z"), 107.0)
    assert job.check(107.0, ()) is None
    assert job.verdict_on_failure() == ""


def works(rank):
    """Return the record of a rank that waits for nothing."""
    content = json.loads(record(rank, "x", number=0))
    return json.dumps(content | {"open": [], "calls": {}, "stacks": LEAVES})


def test_no_verdict_at_the_time_limit_if_the_late_rank_has_come():
    """At that time, a rank may wait for a moment."""
    job, asked = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    job.add(works(1), 101.0)
    assert job.check(101.0, ()).missing == [1]
    job.check(147.0, ())
    assert len(asked) == 2
    job.add(record(0, "x", number=900), 147.0)
    job.add(works(1), 147.0)
    assert job.check(147.0, ()) is None


def uncounted(waited, reason="request", **changes):
    """Return the record of rank 0 in a call that is not counted, because of too many names."""
    content = json.loads(record(0, "x", reason, number=0))
    call = content["open"][0] | {"enqueued": content["time"] - waited}
    return json.dumps(content | {"open": [call], "calls": {}} | changes)


@pytest.mark.parametrize("waited", [106.0, 0.001])
def test_a_later_uncounted_call_is_no_stall(waited):
    """All uncounted calls of a name have the same key."""
    job, asked = stalls()
    job.add(uncounted(60.0, "stall"), 100.0)
    job.add(works(1), 101.0)
    job.add(uncounted(61.0), 101.0)
    assert job.check(101.0, ()).missing == [1]
    job.check(146.0, ())
    assert len(asked) == 2
    job.add(uncounted(waited), 146.0)
    job.add(works(1), 146.0)
    verdict = job.check(146.0, ())
    assert (verdict is None) == (waited < 60)
    assert verdict is None or verdict.expired


@pytest.mark.parametrize("waited", [65.0, 0.001])
def test_a_verdict_on_an_uncounted_call_does_not_explain_the_failure_of_a_later_one(waited):
    job, _ = stalls()
    job.add(uncounted(60.0, "stall"), 100.0)
    job.add(works(1), 101.0)
    verdict = job.check(106.0, ())
    job.add(uncounted(waited, "error", error="failed: lost a peer", failed="x"), 108.0)
    assert job.verdict_on_failure() == (verdict.whole_text if waited > 60 else "")


def test_no_verdict_if_the_late_rank_comes_before_the_records():
    job, _ = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    job.add(record(0, "x", number=2), 101.0)
    job.add(record(1, "z", number=2), 101.0)
    assert job.check(101.0, ()) is None
    # A later stall leads to a verdict.
    job.add(record(0, "x", "stall", number=9), 200.0)
    job.set_states({1: "stopped"})
    assert job.check(206.0, ()).missing == [1]


def test_no_verdict_on_a_call_that_has_waited_for_a_moment():
    """Rank 0 has called `x` after rank 1 wrote its record. Now it waits for `z`, for a moment."""
    job, _ = stalls()
    job.add(record(1, "x", "stall"), 100.0)
    later = json.loads(record(0, "z"))
    job.add(json.dumps(later | {"calls": {"x": 1, "z": 1}, "stacks": LEAVES}), 101.0)
    assert job.check(101.0, ()) is None
    job.check(105.0, ())
    job.add(record(0, "z", number=7), 105.0)
    job.add(record(1, "z", number=7), 105.0)
    assert job.check(105.0, ()) is None


def test_another_late_call_gets_a_verdict_after_the_first_one_has_ended():
    """Ranks 0 and 1 train in one process set, and ranks 2 and 3 in another one."""
    asked = []
    job = Stalls(4, None, lambda: asked.append(1))
    groups = {"1": [0, 1], "2": [2, 3]}

    def add(rank, now, name="", reason="request", enqueued=1.0):
        content = json.loads(record(rank, name, reason, ahead=now))
        call = content["open"][0] | {"set": 1 + rank // 2, "enqueued": enqueued}
        content |= {"size": 4, "groups": groups, "open": [call] if name else []}
        job.add(json.dumps(content | ({} if name else {"calls": {}, "stacks": LEAVES})), now)

    add(0, 100.0, "x", "stall", enqueued=1.0)
    add(2, 100.1, "y", "stall", enqueued=2.0)
    add(1, 101.0)
    add(3, 101.0)
    assert job.check(101.0, ()).missing == [1]
    # Rank 1 has called `x`.
    now = 300.0
    job.check(now, ())
    assert len(asked) == 2
    for rank, name in enumerate(["", "", "y", ""]):
        add(rank, now, name, enqueued=2.0)
    assert job.check(now, ()).missing == [3]


def test_a_stall_of_another_call_that_is_reported_soon_after_a_verdict():
    job, asked = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    job.add(json.dumps(json.loads(record(1, "y")) | {"open": [], "stacks": LEAVES}), 100.5)
    assert job.check(100.5, ()).call.name == "x"
    # The same stall, and another one.
    job.add(record(0, "x", "stall"), 103.0)
    job.check(104.0, ())
    assert len(asked) == 1
    job.add(record(0, "z", "stall"), 104.0)
    assert len(asked) == 2


def test_no_verdict_on_a_call_that_was_made_just_before_the_stall_was_reported():
    """The late rank comes before the other records. The younger call may end in a moment."""

    def content(reason, enqueued):
        found = json.loads(record(0, "x", reason))
        call = found["open"][0]
        calls = [call | {"name": name, "enqueued": time} for name, time in enqueued.items()]
        return json.dumps(found | {"open": calls, "calls": {"x": 1, "z": 1}})

    job, _ = stalls()
    job.add(content("stall", {"x": 1.0, "z": 60.5}), 100.0)
    job.add(content("request", {"z": 60.5}), 101.0)
    job.add(works(1), 101.0)
    assert job.check(101.0, ()) is None


def test_silent_ranks_have_some_seconds(tmp_path):
    job, _ = stalls(tmp_path)
    job.add(record(0, "x", "stall"), 100.0)
    assert job.check(104.0, ()) is None
    job.set_states({1: "stopped"})
    verdict = job.check(105.5, ())
    assert verdict.missing == [1]
    assert (tmp_path / "records" / "verdict.txt").exists()
    assert json.loads((tmp_path / "records" / "states.json").read_text()) == {"1": "stopped"}


def test_a_record_after_a_final_verdict_is_not_kept(tmp_path):
    """The launcher then ends the ranks, so they do other things."""
    job, _ = stalls(tmp_path)
    job.add(record(0, "x", "stall"), 100.0)
    assert answer(job, 101.0).is_final
    before = why(tmp_path)
    job.add(record(1, "z"), 107.0)
    assert why(tmp_path) == before


def test_a_record_that_only_inspect_has_asked_for_is_not_kept(tmp_path):
    """It does not say what the rank does when the job fails later."""
    job, _ = stalls(tmp_path)
    job.add(record(0, "x"), 50.0)
    assert not (tmp_path / "records").exists()
    job.add(record(0, "x", "stall"), 100.0)
    job.add(works(1), 101.0)
    assert job.check(101.0, ()).missing == [1]
    before = why(tmp_path)
    job.add(record(1, "z"), 200.0)
    assert why(tmp_path) == before


def test_a_collective_that_all_ranks_have_called_ends_the_job_at_the_limit():
    """The engines do not: they have no limit for such a collective."""
    job, asked = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    verdict = answer(job, 106.0, second="x")
    # The ranks have waited 60 s of their limit of 90 s.
    assert (list(verdict.missing), verdict.limit, verdict.expired) == ([], 90, False)
    job.check(136.5, ())
    assert len(asked) == 1
    job.check(137.5, ())
    assert len(asked) == 2


def test_a_collective_of_all_ranks_while_other_collectives_end():
    """For example, the other collectives are those of another thread."""
    job, _ = stalls()
    job.add(record(0, "x", "stall"), 100.0)

    def answers(now, steps):
        for rank in range(2):
            content = json.loads(record(rank, "x"))
            content["calls"]["thread"] = steps
            job.add(json.dumps(content), now)
        return job.check(now, ())

    assert not answers(101.0, 1).missing


def test_a_stopped_rank_ends_the_job_at_the_limit():
    """The engines do not: that of the stopped rank does not run."""
    job, asked = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    job.set_states({1: "stopped"})
    verdict = job.check(105.5, ())
    # Rank 0 has waited 60 s of its limit of 90 s.
    assert (verdict.limit, verdict.expired) == (90, False)
    assert job.check(136.0, ()) is None
    assert len(asked) == 1
    job.check(137.0, ())
    assert len(asked) == 2


def failed(number, name="x"):
    """Return the record of rank 0 after a failure in a call. Its last call of `x` is `number`."""
    content = json.loads(record(0, "x", "error", number))
    return json.dumps(content | {"error": "failed: lost a peer", "failed": name, "open": []})


def test_the_verdict_on_a_stall_in_which_ranks_fail():
    job, _ = stalls()
    job.set_states({1: "stopped"})
    job.add(record(0, "x", "stall"), 100.0)
    verdict = job.check(130.0, ())
    assert verdict.outlook.endswith("or earlier (HOROVOD_GLOO_TIMEOUT_SECONDS).")
    assert job.verdict_on_failure() == ""
    job.add(failed(number=1), 165.0)
    assert job.verdict_on_failure() == verdict.text
    assert "the process is stopped" in verdict.text


@pytest.mark.parametrize("later", [{"number": 2}, {"number": 1, "name": "y"}])
def test_a_verdict_does_not_explain_a_later_failure(later):
    job, _ = stalls()
    job.set_states({1: "stopped"})
    job.add(record(0, "x", "stall"), 100.0)
    job.check(130.0, ())
    job.add(failed(**later), 165.0)
    assert job.verdict_on_failure() == ""


ENDS = """Thread 0x03 (most recent call first):
  File "/home/me/data.py", line 6 in load

Current thread 0x02 (most recent call first):
  File "/venv/lib/python3.11/threading.py", line 9 in _shutdown
"""


def ends(rank, **changes):
    """Return the record of a rank whose script has ended, and that waits for a thread."""
    return json.dumps(json.loads(works(rank)) | {"stacks": ENDS} | changes)


@pytest.mark.parametrize("has_verdict", [True, False])
def test_ranks_that_do_not_end_after_the_limit(tmp_path, has_verdict):
    """Rank 1 has raised an exception. A thread of each rank continues."""
    asked = []
    raised = {0: (190.0, "RuntimeError: no peer"), 1: (40.0, "ValueError: bad")}
    job = Stalls(2, tmp_path, lambda: asked.append(1), tracebacks=lambda: raised)
    if has_verdict:
        job.add(record(0, "x", "stall"), 100.0)
        job.add(ends(1), 101.0)
        assert job.check(101.0, ()).text.endswith("written a traceback: ValueError: bad")
    # The engine has ended the collective of rank 0.
    error = {"error": "failed: shut down", "failed": "x"}
    job.add(json.dumps(json.loads(record(0, "x", "error")) | error | {"time": 92.0}), 190.0)
    assert job.check(204.0, ()) is None
    job.check(206.0, ())
    job.add(ends(0, calls={"x": 1}, **error), 206.0)
    job.add(ends(1), 206.0)
    verdict = job.check(206.0, ())
    assert verdict.is_final
    for text in (verdict.whole_text, why(tmp_path)):
        assert "Rank 0 has waited 91 s for the allreduce 'x'" in text
        assert "Rank 1 on h has not called it: the rank is at" in text
        assert "The rank has written a traceback: ValueError: bad" in text
    assert verdict.whole_text.endswith("(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).")


def test_ranks_that_continue_after_the_limit():
    """All of them have started Horovod again."""
    job, _ = stalls()
    job.add(record(0, "x", "stall"), 100.0)
    job.add(works(1), 101.0)
    assert job.check(101.0, ()).missing == [1]
    job.add(failed(number=1), 165.0)
    job.check(300.0, ())
    for rank in range(2):
        job.add(works(rank), 300.0)
    assert job.check(300.0, ()) is None


@pytest.mark.parametrize("ended", [True, False])
def test_a_rank_that_raised_and_does_not_end_is_named(ended):
    """No other rank waits for it."""
    asked = []
    raised = {1: (100.0, "ValueError: bad")}
    job = Stalls(2, None, lambda: asked.append(1), 60.0, tracebacks=lambda: raised)
    assert job.check(164.0, (), raised_at=100.0) is None
    assert not asked
    job.check(166.0, (), raised_at=100.0)
    assert asked == [1]
    job.add(works(0), 166.0)
    # Otherwise the script has caught the error.
    caught = json.dumps(json.loads(works(1)) | {"stacks": WAITS})
    job.add(ends(1) if ended else caught, 166.0)
    verdict = job.check(166.0, (), raised_at=100.0)
    if ended:
        assert verdict.text == (
            "Rank 1 on h is at /venv/lib/python3.11/threading.py:9 in _shutdown. The script has "
            "ended: Python waits for other threads. Another thread is at /home/me/data.py:6 in "
            "load. The rank has written a traceback: ValueError: bad"
        )
        assert verdict.outlook == "The job ends when all ranks have ended."
        assert not verdict.is_final
    else:
        assert verdict is None
    job.check(900.0, (), raised_at=100.0)
    assert asked == [1]


def test_a_traceback_before_the_last_collective_is_not_named():
    raised = {1: (50.0, "ValueError: bad")}
    job = Stalls(2, None, lambda: None, tracebacks=lambda: raised)
    job.add(record(0, "x", "stall"), 100.0)
    done = json.loads(record(1, "y"))["open"][0] | {"ended": 60.0}
    job.add(json.dumps(json.loads(works(1)) | {"done": [done]}), 101.0)
    assert "ValueError" not in job.check(101.0, ()).text


def test_an_old_mismatch_is_no_cause_of_a_later_failure():
    def mismatched(rank, **changes):
        content = json.loads(record(rank, "metric", "error")) | {
            "error": "failed: Mismatched allreduce",
            "failed": "metric",
        }
        call = content["open"][0] | {"bytes": 4 + rank, "ended": 61.0}
        return json.dumps(content | {"open": [call]} | changes)

    job, _ = stalls()
    for rank in range(2):
        job.add(mismatched(rank), 100.0)
    assert "Ranks differ in" in job.mismatch()
    # Both have made a later collective, and rank 0 then loses its peer.
    call = json.loads(record(0, "y", ahead=20.0))["open"][0]
    later = {
        "calls": {"metric": 1, "y": 2},
        "done": [call | {"ended": 80.0}],
        "open": [call | {"call": 2, "enqueued": 81.0, "ended": 82.0}],
        "error": "failed: shut down",
        "failed": "y",
        "time": 82.0,
    }
    job.add(mismatched(0, **later), 120.0)
    assert job.mismatch() == ""


def test_a_text_that_is_no_record_is_ignored():
    job, asked = stalls()
    job.add("{", 100.0)
    assert not asked


def test_a_host_that_did_not_answer_is_named(tmp_path):
    """All ranks wait for the same collective, because the network does not transfer its data."""
    job, _ = stalls(tmp_path)
    job.add(record(0, "x", "stall"), 100.0)
    job.add(record(0, "x"), 101.0)
    job.add(record(1, "x"), 101.0)
    sentence = "host1 did not answer the launcher for 8 s, until 1 s ago."
    verdict = job.check(101.0, (), lambda: [sentence])
    assert "All ranks have called it: the network" in verdict.text
    assert verdict.text.endswith(f"\n{sentence}")
    assert sentence in why(tmp_path)


def test_ranks_that_run_long_after_another_rank_has_ended():
    asked = []
    job = Stalls(2, None, lambda: asked.append(1), patience=60.0)
    job.add(record(0, "x"), 1.0)  # an older record of the rank that ends
    assert job.check(100.0, {0: 0}) is None
    assert job.check(159.0, {0: 0}) is None
    assert not asked
    assert job.check(161.0, {0: 0}) is None
    assert asked == [1]
    running = json.loads(record(1, "x")) | {"open": [], "stacks": LEAVES}
    job.add(json.dumps(running), 162.0)
    verdict = job.check(162.0, {0: 0})
    assert verdict.text == (
        "Rank 0 has ended. No other rank waits for a collective.\n"
        "Rank 1 on h is at /home/me/train.py:9 in upload."
    )
    assert verdict.outlook == "The job ends when all ranks have ended."
    assert not verdict.is_final
    # Once.
    assert job.check(500.0, {0: 0}) is None
    assert asked == [1]


def test_ranks_that_run_long_after_another_rank_although_a_stall_was_reported_meanwhile():
    asked = []
    job = Stalls(3, None, lambda: asked.append(1), patience=60.0)

    def add(rank, name, reason="request"):
        waited = 60.0 if reason == "stall" else 0.01
        content = json.loads(record(rank, name, reason, waited=waited)) | {"groups": {"1": [1, 2]}}
        calls = [call | {"set": 1} for call in content["open"]]
        job.add(json.dumps(content | {"open": calls, "calls": {f"1 {name}": 1}}), now)

    job.check(100.0, {0: 0})
    # Ranks 1 and 2 continue: the second round shows it.
    now = 110.0
    add(1, "x", "stall")
    add(1, "x")
    add(2, "x")
    assert job.check(now, {0: 0}) is None
    now = 115.0
    assert job.check(now, {0: 0}) is None
    for rank in (1, 2):
        job.add(works(rank), now)
    assert job.check(now, {0: 0}) is None
    assert len(asked) == 2
    job.check(161.0, {0: 0})
    assert len(asked) == 3


def test_the_last_ranks_are_named_although_a_collective_just_ended():
    job = Stalls(3, None, lambda: None, patience=60.0)

    def add(rank, now, waits):
        content = json.loads(record(rank, "x", waited=0.01)) | {"groups": {"1": [1, 2]}}
        calls = [call | {"set": 1} for call in content["open"]] if waits else []
        job.add(json.dumps(content | {"open": calls, "calls": {"1 x": 1}, "stacks": LEAVES}), now)

    job.check(100.0, {0: 0})
    for now, waits in ((161.0, True), (166.0, False)):
        job.check(now, {0: 0})
        for rank in (1, 2):
            add(rank, now, waits)
        verdict = job.check(now, {0: 0})
    assert "Rank 1 on h is at /home/me/train.py:9 in upload." in verdict.text


def test_ranks_that_do_not_end_after_the_script(tmp_path):
    """Over MPI, the engine's shutdown waits forever if mpirun is stopped."""
    asked = []
    job = Stalls(2, tmp_path, lambda: asked.append(1), patience=60.0)
    # A rank that shuts Horovod down, and starts it again.
    job.set_leaving(1, True)
    job.check(1.0, ())
    job.set_leaving(1, False)
    assert [job.check(now, ()) for now in (2.0, 99.0)] == [None, None]
    assert not asked
    for rank in range(2):
        job.set_leaving(rank, True)
    assert job.check(100.0, ()) is None
    job.set_states({1: "stopped"})
    assert job.check(161.0, ()) is None
    assert asked == [1]
    job.add(json.dumps(json.loads(record(0, "x")) | {"open": [], "stacks": LEAVES}), 162.0)
    verdict = job.check(167.0, ())
    lines = verdict.text.splitlines()
    assert lines[1].startswith(
        "Rank 0 is in hvd.shutdown(), or has reached the end of the script but not ended."
    )
    assert lines[2:] == [
        "Rank 1 is stopped.",
        "Rank 0 on h is at /home/me/train.py:9 in upload.",
    ]
    assert verdict.outlook == "The job ends when all ranks have ended."
    assert verdict.text in why(tmp_path)


def test_a_collective_that_waits_until_its_limit_while_others_end():
    job, _ = stalls()

    def failed(rank, calls, **changes):
        content = json.loads(record(rank, "x", "error")) | {"error": "shut down", "failed": "y"}
        return json.dumps(content | {"stacks": "", "calls": calls} | changes)

    # A thread of rank 0 has called x; both ranks train meanwhile, and fail in y.
    job.add(failed(0, {"x": 1, "y": 7}, time=92.0), 100.0)
    job.add(failed(1, {"y": 7}, time=92.0, open=[]), 100.0)
    text = job.verdict_on_failure()
    assert text.startswith("Rank 0 has waited 91 s for the allreduce 'x', 4 bytes of float32.")
    assert "Rank 1 on h has not called it" in text
    assert text.endswith("The limit of 90 s has passed (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).")
    # The limit is not over: the ranks have failed for another reason.
    job.add(failed(0, {"x": 1, "y": 7}, time=61.0), 101.0)
    assert job.verdict_on_failure() == ""


def test_ranks_that_fail_after_each_other_keep_their_verdict():
    asked = []
    job = Stalls(2, None, lambda: asked.append(1), patience=3.0)
    assert job.check(100.0, {0}) is None
    assert job.check(104.0, {0}, failed=True) is None
    assert not asked
