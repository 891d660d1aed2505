"""When the launcher asks the ranks for records, and what it says after their answers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.faults.command import why
from hvdkit.faults.rank_report import RankReport
from hvdkit.launch.control.timeouts import Timeouts
from hvdkit.launch.ending import events as e
from hvdkit.launch.ending.events import JobPlan
from hvdkit.launch.ending.journal import Journal
from hvdkit.launch.ending.stalls import StallWatch
from tests.unit.launch.commands import SAID

WAITS = """Current thread 0x02 (most recent call first):
  File "/venv/site-packages/horovod/torch/mpi_ops.py", line 1 in synchronize
  File "/home/me/train.py", line 2 in <module>
"""
LEAVES = """Current thread 0x02 (most recent call first):
  File "/home/me/train.py", line 9 in upload
"""
ENDS = """Thread 0x03 (most recent call first):
  File "/home/me/data.py", line 6 in load

Current thread 0x02 (most recent call first):
  File "/venv/lib/python3.11/threading.py", line 9 in _shutdown
"""
STALL, LIMIT = 60.0, 90.0


def record(rank, name, reason="request", number=1, waited=STALL, **changes):
    """Return the record of a rank that waits for a collective, or for none if its name is ""."""
    call = {"name": name, "call": number, "operation": 0, "set": 0, "dtype": 7, "bytes": 4,
            "enqueued": 1000.0 - waited, "ended": None}  # fmt: skip
    content = {
        "offset": 0.0, "machine": "",
        "version": 1, "rank": rank, "size": 2, "host": "h", "pid": 1, "reason": reason,
        "time": 1000.0, "limit": LIMIT, "error": "", "failed": "", "groups": {}, "labels": {},
        "calls": {"0": {name: number} if name and number else {}}, "open": [call] if name else [],
        "done": [], "stacks": WAITS if name else LEAVES,
    }  # fmt: skip
    return json.dumps(content | changes)


def error(rank, name, number=1, waited=STALL, **changes):
    """Return the record of a rank whose collective has failed."""
    return record(rank, name, "error", number, waited,
                  **{"error": "failed: lost a peer", "failed": name} | changes)  # fmt: skip


class Launcher:
    """The launcher's part for stalls, at a time that the test sets."""

    def __init__(self, folder=None, size=2, patience=0.0):
        self.asked, self.said, self.folder = [], SAID, folder
        self.journal = Journal(JobPlan(("h",) * size))
        timeouts = Timeouts(stall=patience)
        ask = lambda: self.asked.append(self.now)  # noqa: E731
        self.watch = StallWatch(self.journal, timeouts, folder, ask)
        self.silent = ()

    def add(self, now, *found):
        """Add records and events that arrive at a time."""
        self.now = now
        for each in found:
            if isinstance(each, str):
                self.watch.add(each, now)
            else:
                self.journal.add(each)

    def stall(self, *answers):
        """Let rank 0 report a stall in `x` at the time 100. Return the verdict on the answers."""
        self.add(100.0, record(0, "x", "stall"))
        return self.check(100.1, record(0, "x"), *answers)

    def check(self, now, *found):
        """Let the launcher ask, then add what arrives, and return the verdict; None for none."""
        before = len(self.verdicts)
        self.now = now
        self.watch.check(now, lambda: self.silent)
        self.add(now + 0.1, *found)
        self.watch.check(now + 0.2, lambda: self.silent)
        assert len(self.verdicts) <= before + 1
        return self.verdicts[before] if self.verdicts[before:] else None

    @property
    def verdicts(self):
        """The verdicts until now."""
        return [each for each in self.journal.events if isinstance(each, e.Judged) and each.text]


def test_a_stall_makes_the_launcher_ask_once():
    job = Launcher()
    job.add(100.0, record(0, "x", "stall"), record(1, "y", "stall"))
    verdict = job.check(100.1, record(0, "x", waited=61.0), record(1, "y", waited=61.0))
    assert verdict.is_final
    assert "a deadlock" in verdict.text
    assert (job.asked, job.said) == ([100.1], [])


def test_a_stall_that_has_ended_just_before_its_record_was_written():
    """The rank waits for nothing, or for the next collective."""
    job = Launcher(patience=STALL)
    job.add(100.0, record(0, "", "stall"), record(1, "y", "stall", waited=0.1))
    assert job.check(100.1) is None
    assert not job.asked
    # Another rank reports a stall, whose late rank has come.
    job.add(101.0, record(0, "x", "stall"))
    moment = {"number": 2, "waited": 0.1}
    assert job.check(101.1, record(0, "x", **moment), record(1, "z", **moment)) is None


@st.composite
def stories(draw):
    """Draw a stall of a job: when each rank calls the collective, or that it never does."""
    calls = st.one_of(st.floats(0.0, 200.0), st.just(float("inf")))
    limit = draw(st.sampled_from([LIMIT, 250.0]))
    return draw(st.lists(calls, min_size=2, max_size=4)), draw(st.booleans()), limit


@given(stories())
@settings(max_examples=100, deadline=None)
def test_each_verdict_is_true_and_a_stall_is_told_once(story):
    """The collective ends when all ranks have called it, if the network works."""
    calls, works, limit = story
    first, last = min(calls), max(calls)
    end = last if works else float("inf")
    size, job = len(calls), Launcher(size=len(calls))
    if first == float("inf"):
        return

    def content(rank, now, reason="request"):
        waits = calls[rank] <= now < end
        counts = {"0": {"x": 1} if calls[rank] <= now else {}}
        made = {"calls": counts, "size": size, "host": f"h{rank}", "limit": limit}
        return record(rank, "x" if waits else "", reason, waited=now - calls[rank], **made)

    for tick in range(int(4 * (limit + 230))):
        now = tick / 4
        for rank in range(size):
            stall = calls[rank] + STALL
            if now - 0.25 < stall <= now and stall < end:
                job.add(now, content(rank, now, "stall"))
        job.now, before = now, (len(job.asked), len(job.verdicts))
        job.watch.check(now)
        if len(job.asked) > before[0]:
            job.add(now, *(content(rank, now) for rank in range(size)))
            job.watch.check(now + 0.01)
        if len(job.verdicts) == before[1]:
            continue
        verdict = job.verdicts[-1]
        # The late ranks are named, and no other one.
        missing = [rank for rank in range(size) if calls[rank] > now]
        named = [r for r in range(size) if f"Rank {r} on h{r} has not called" in verdict.text]
        assert named == missing
        assert ("the network" in verdict.text) == (not missing)
        assert end > now
        assert now - first >= (limit if verdict.is_final else STALL)
        if verdict.is_final:
            break
    told = [each.is_final for each in job.verdicts]
    assert told in ([], [False], [True], [False, True])
    # A rank waits for the others for its own minute, and for the network as long.
    if end > max(first + limit + 17, last + STALL + 1 if last < float("inf") else 0.0):
        assert told[-1:] == [True]
    if last > first + STALL + 1:
        assert told
    assert len(job.asked) <= 2 * size + 1


@pytest.mark.parametrize("waited", [106.0, 0.001])
def test_a_later_uncounted_call_is_no_stall(waited):
    """All uncounted calls of a name have the same key."""
    job = Launcher()
    job.add(100.0, record(0, "x", "stall", number=0))
    assert job.check(100.1, record(0, "x", number=0), record(1, "")) is not None
    verdict = job.check(147.0, record(0, "x", number=0, waited=waited), record(1, ""))
    assert len(job.asked) == 2
    assert (verdict is None) == (waited < 60)
    assert verdict is None or verdict.is_final


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("waited", [65.0, 0.001])
def test_a_verdict_on_an_uncounted_call_does_not_explain_the_failure_of_a_later_one(waited, number):
    job = Launcher()
    job.add(100.0, record(0, "x", "stall", number))
    verdict = job.check(100.1, record(0, "x", number=number), record(1, ""))
    later = 1 + number if number and waited < 60 else number
    job.add(108.0, error(0, "x", later, waited))
    assert job.watch.stalls.verdict_on_failure() == (verdict.text if waited > 60 else "")


def test_another_late_call_gets_a_verdict_after_the_first_one():
    """Ranks 0 and 1 train in one process set, and ranks 2 and 3 in another one."""
    job = Launcher(size=4)

    def own(rank, name, reason="request", waited=STALL):
        content = json.loads(record(rank, name, reason, waited=waited, size=4))
        calls = [call | {"set": 1 + rank // 2} for call in content["open"]]
        counts = {str(1 + rank // 2): content["calls"]["0"]}
        groups = {"1": [0, 1], "2": [2, 3]}
        return json.dumps(content | {"open": calls, "groups": groups, "calls": counts})

    idle = own(1, ""), own(3, "")
    job.add(100.0, own(0, "x", "stall"))
    first = job.check(100.1, own(0, "x", waited=60.3), own(2, "y", waited=10.0), *idle)
    assert "Rank 1 on h has not called it" in first.text
    assert "Rank 3" not in first.text
    # The same stall, and another one.
    job.add(103.0, own(0, "x", "stall", waited=63.0))
    assert job.check(104.0) is None
    assert len(job.asked) == 1
    job.add(150.0, own(2, "y", "stall"))
    second = job.check(150.1, own(0, "x", waited=110.0), own(2, "y", waited=60.3), *idle)
    assert "Rank 1 on h has not called it" in second.text
    assert second.is_final  # the limit of the first one has passed


def test_records_that_do_not_explain_the_end_are_not_kept(tmp_path):
    job = Launcher(tmp_path)
    # Only `hvdkit inspect` has asked for it.
    job.add(50.0, record(0, "x"))
    assert not (tmp_path / "records").exists()
    assert job.stall(record(1, "")).outlook == (
        "The job waits. It ends after 90 s without progress (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)."
    )
    before = why(tmp_path)
    job.add(120.0, record(1, "z"))
    assert why(tmp_path) == before
    # The launcher ends the ranks, so they do other things.
    assert job.check(147.0, record(0, "x", waited=107.0), record(1, "")).is_final
    before = why(tmp_path)
    job.add(150.0, record(1, "z", "error"))
    assert why(tmp_path) == before


def test_a_stall_that_the_engines_do_not_end():
    """The engine of a stopped rank does not run."""
    job = Launcher()
    assert job.stall(e.Observed(100.2, (0, 1), (1,))) is None
    verdict = job.check(105.5)
    assert "is stopped" in verdict.text
    assert not verdict.is_final
    # The ranks had waited 60 s of their limit of 90 s.
    job.check(130.5)
    assert len(job.asked) == 1
    assert job.check(137.0, record(0, "x", waited=97.0)) is None
    assert job.check(142.5).is_final
    assert len(job.asked) == 2


def raised(rank, at, error, kind="own"):
    return e.Reported(at, rank, RankReport("exception", error, kind))


@pytest.mark.parametrize("has_verdict", [True, False])
def test_ranks_that_do_not_end_after_the_limit(tmp_path, has_verdict):
    """Rank 1 has raised an exception. A thread of each rank continues."""
    job = Launcher(tmp_path)
    job.add(40.0, raised(1, 40.0, "ValueError: bad"))
    if has_verdict:
        verdict = job.stall(record(1, "", stacks=ENDS))
        assert verdict.text.endswith("written a traceback: ValueError: bad")
    # The engine has ended the collective of rank 0.
    job.add(132.0, error(0, "x", waited=91.0), raised(0, 132.0, "RuntimeError: no peer", "peer"))
    assert job.check(146.0) is None
    ended = {"error": "failed: shut down", "failed": "x", "calls": {"0": {"x": 1}}, "stacks": ENDS}
    verdict = job.check(148.0, record(0, "", **ended), record(1, "", stacks=ENDS))
    assert verdict.is_final
    for text in (verdict.text, why(tmp_path)):
        assert "Rank 0 has waited 91 s for the allreduce 'x'" in text
        assert "Rank 1 on h has not called it: the rank is at" in text
        assert "The rank has written a traceback: ValueError: bad" in text
    assert verdict.text.endswith("(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).")


def test_a_rank_that_raised_and_does_not_end_is_named():
    """No other rank waits for it."""
    job = Launcher(patience=60.0)
    job.add(100.0, raised(1, 100.0, "ValueError: bad"))
    assert job.check(164.0) is None
    assert not job.asked
    verdict = job.check(166.0, record(0, ""), record(1, "", stacks=ENDS))
    assert verdict.text == (
        "No rank waits for a collective.\n"
        "Rank 1 on h is at /venv/lib/python3.11/threading.py:9 in _shutdown. The script has "
        "ended: Python waits for other threads. Another thread is at /home/me/data.py:6 in "
        "load. The rank has written a traceback: ValueError: bad\n"
        "Rank 0 on h is at /home/me/train.py:9 in upload."
    )
    assert job.said == [f"{verdict.text}\nThe job ends when all ranks have ended."]
    assert job.check(900.0) is None
    assert len(job.asked) == 1


def test_an_old_mismatch_is_no_cause_of_a_later_failure():
    def mismatched(rank, **changes):
        changes = {"error": "failed: Mismatched allreduce"} | changes
        content = json.loads(error(rank, "metric", **changes))
        call = content["open"][0] | {"bytes": 4 + rank, "ended": 1000.0}
        return json.dumps(content | {"open": [call]} | changes)

    job = Launcher()
    job.add(100.0, mismatched(0), mismatched(1))
    assert "Ranks differ in" in job.journal.records.mismatch
    # Both have made a later collective, and rank 0 then loses its peer.
    call = json.loads(record(0, "y"))["open"][0]
    later = {
        "calls": {"0": {"metric": 1, "y": 2}},
        "done": [call | {"enqueued": 1010.0, "ended": 1019.0}],
        "open": [call | {"call": 2, "enqueued": 1020.0, "ended": 1021.0}],
        "error": "failed: shut down",
        "failed": "y",
        "time": 1021.0,
    }
    job.add(120.0, mismatched(0, **later))
    assert job.journal.records.mismatch == ""


def test_a_text_that_is_no_record_is_ignored():
    job = Launcher()
    job.add(100.0, "{")
    assert not job.journal.events


def test_a_host_that_did_not_answer_is_named(tmp_path):
    """All ranks wait for the same collective, because the network does not transfer its data."""
    job = Launcher(tmp_path)
    job.silent = ("host1 did not answer the launcher for 8 s, until 1 s ago.",)
    verdict = job.stall(record(1, "x"))
    assert "All ranks have called it: the network" in verdict.text
    assert verdict.text.endswith(f"\n{job.silent[0]}")
    assert job.silent[0] in why(tmp_path)


@pytest.mark.parametrize("open_call", ["", "x"])
def test_ranks_that_run_long_after_another_rank_has_ended(open_call):
    """Rank 1 may be in a collective of a process set, which ends soon."""
    job = Launcher(patience=60.0)
    job.add(1.0, record(0, "x"))  # an older record of the rank that ends
    job.add(100.0, e.Ended(100.0, 0, 0))
    assert job.check(159.0) is None
    assert not job.asked
    group = {"groups": {"0": [1]}, "stacks": LEAVES}
    verdict = job.check(161.0, record(1, open_call, waited=0.01, **group))
    waits = "has waited long" if open_call else "waits"
    assert verdict.text == (
        f"Rank 0 has ended. No other rank {waits} for a collective.\n"
        "Rank 1 on h is at /home/me/train.py:9 in upload."
    )
    assert verdict.outlook == "The job ends when all ranks have ended."
    # Once.
    assert job.check(500.0) is None
    assert len(job.asked) == 1
    # Not if the rank has failed.
    job = Launcher(patience=3.0)
    job.add(100.0, e.Ended(100.0, 0, 1))
    assert job.check(104.0) is None
    assert not job.asked


def test_ranks_that_do_not_end_after_the_script(tmp_path):
    """Over MPI, the engine's shutdown waits forever if mpirun is stopped."""
    job = Launcher(tmp_path, patience=60.0)
    # A rank that shuts Horovod down, and starts it again.
    job.add(1.0, e.InHorovod(1.0, 1, 1, True, True), e.InHorovod(1.5, 1, 2, True))
    job.add(1.6, e.InHorovod(1.6, 0, 2, True))
    assert job.check(99.0) is None
    assert not job.asked
    job.add(100.0, *(e.InHorovod(100.0, rank, 2, True, True) for rank in range(2)))
    assert job.check(161.0, record(0, ""), e.Observed(161.0, (0, 1), (1,))) is None
    verdict = job.check(167.0)
    lines = verdict.text.splitlines()
    assert lines[1].startswith(
        "Rank 0 is in hvd.shutdown(), or has reached the end of the script but not ended."
    )
    assert lines[2:] == ["Rank 1 is stopped.", "Rank 0 on h is at /home/me/train.py:9 in upload."]
    assert verdict.text in why(tmp_path)


def test_a_collective_that_waits_until_its_limit_while_others_end():
    job = Launcher()
    # A thread of rank 0 has called x; both ranks train meanwhile, and fail in y.
    calls = {"calls": {"0": {"x": 1, "y": 7}}, "failed": "y", "stacks": ""}
    other = {"calls": {"0": {"y": 7}}, "open": [], "failed": "y", "stacks": ""}
    job.add(100.0, error(0, "x", waited=91.0, **calls), error(1, "", **other))
    text = job.watch.stalls.verdict_on_failure()
    assert text.startswith("Rank 0 has waited 91 s for the allreduce 'x', 4 bytes of float32.")
    assert "Rank 1 on h has not called it" in text
    assert text.endswith("The limit of 90 s has passed (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS).")
    # The limit is not over: the ranks have failed for another reason.
    job.add(101.0, error(0, "x", waited=60.0, **calls))
    assert job.watch.stalls.verdict_on_failure() == ""
