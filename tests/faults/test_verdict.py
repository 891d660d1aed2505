"""Verdicts on simulated jobs: every rank runs the same collectives, except for one fault."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdkit.faults.process_states import ELSEWHERE, ENDED, STOPPED
from hvdkit.faults.records import Call, Record
from hvdkit.faults.stacks import Frame
from hvdkit.faults.timeline import timeline
from hvdkit.faults.verdict import judge

WAITING = """Thread 0x01 (most recent call first):
  <no Python frame>

Current thread 0x02 (most recent call first):
  File "/venv/site-packages/horovod/torch/mpi_ops.py", line 1324 in synchronize
  File "/home/me/train.py", line 23 in <module>
"""
SLEEPING = """Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 5 in recv
  File "/home/me/loader.py", line 7 in load
  File "/home/me/train.py", line 23 in <module>
"""
OTHER_THREAD = """Thread 0x03 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/me/data.py", line 6 in load

Current thread 0x02 (most recent call first):
"""


def call(name, number, at, ended=None, group=0):
    return Call(f"allreduce.{name}", number, "allreduce", group, "float32", 64, at, ended)


def simulate(size, program, stops, extra=None):
    """Return the records of a job in which some ranks leave the common program.

    Args:
        size: the number of ranks.
        program: the names of the collectives that all ranks call.
        stops: rank -> the position in the program before which it stops.
        extra: rank -> a collective that it calls there.
    """
    records = {}
    last = min(stops.values(), default=len(program))
    for rank in range(size):
        counts, done, waiting = {}, [], []
        for position, name in enumerate(program[: last + 1]):
            if position >= stops.get(rank, len(program)):
                break
            counts[name] = counts.get(name, 0) + 1
            ended = position + 0.5 if position < last else None
            (done if ended else waiting).append(call(name, counts[name], position, ended))
        if rank in (extra or {}):
            counts[extra[rank]] = counts.get(extra[rank], 0) + 1
            waiting.append(call(extra[rank], counts[extra[rank]], last + 0.1))
        calls = {(0, f"allreduce.{name}"): count for name, count in counts.items()}
        stacks = WAITING if waiting else SLEEPING
        records[rank] = Record(
            rank, size, f"host{rank}", 1, "stall", last + 60.0, calls=calls, open=waiting,
            done=done, stacks=stacks, labels={"bucket": "bucket 1 of 1 (a to b; 1.0 MB)"},
        )  # fmt: skip
    return records


@given(
    size=st.integers(2, 6),
    program=st.lists(st.sampled_from(["bucket", "loss", "hvdkit.rounds.header"]), min_size=1),
    data=st.data(),
)
def test_the_rank_that_stops_is_named(size, program, data):
    late = data.draw(st.integers(0, size - 1))
    position = data.draw(st.integers(0, len(program) - 1))
    verdict = judge(simulate(size, program, {late: position}), {}, size)
    assert verdict.missing == [late]
    assert list(verdict.waiting) == [rank for rank in range(size) if rank != late]
    assert not verdict.deadlock
    assert f"Rank {late} on host{late} has not called it: the rank is at /home/me/loader.py:7" in (
        verdict.text
    )


@given(size=st.integers(2, 6), data=st.data())
def test_ranks_on_other_hosts_are_not_blamed(size, data):
    late = data.draw(st.integers(0, size - 1))
    here = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    records = simulate(size, ["bucket"] * 3, {late: data.draw(st.integers(0, 2))})
    elsewhere = dict.fromkeys(set(range(size)) - here, ELSEWHERE)
    verdict = judge({rank: records[rank] for rank in here}, elsewhere, size)
    waiting = sorted(here - {late})
    assert list(verdict.waiting) == waiting
    assert list(verdict.missing) == ([late] if late in here and waiting else [])
    if not waiting:
        assert verdict.text.startswith("No rank on this host waits for a collective.\n")
        assert f"Rank {late} on host{late} is at /home/me/loader.py:7 in load." in verdict.text
    elif late in here:
        assert f"\nRank {late} on host{late} has not called it: the rank is at " in verdict.text
    else:
        assert verdict.text.endswith("\nAll ranks on this host have called it.")
    assert "report" not in verdict.text


@given(size=st.integers(2, 6), data=st.data())
def test_ranks_that_wait_for_each_other_are_a_deadlock(size, data):
    other = data.draw(st.integers(0, size - 1))
    program = ["bucket"] * data.draw(st.integers(1, 5))
    position = data.draw(st.integers(0, len(program) - 1))
    verdict = judge(simulate(size, program, {other: position}, {other: "extra"}), {}, size)
    assert verdict.deadlock
    assert verdict.whole_text.endswith("has not called: a deadlock.")


def test_a_rank_that_makes_an_additional_call_is_named_in_a_deadlock():
    records = simulate(3, ["bucket", "bucket"], {1: 1}, {1: "extra"})
    # The other ranks call the next collective after the additional call.
    early = replace(records[1].open[0], enqueued=0.9)
    records[1] = replace(records[1], open=[early])
    verdict = judge(records, {}, 3)
    assert verdict.deadlock
    assert (list(verdict.waiting), list(verdict.missing)) == ([0, 2], [1])
    assert "Rank 1 on host1 has not called it: the rank waits for the allreduce 'extra'" in (
        verdict.text
    )
    # Between two ranks, the records do not tell which rank is wrong.
    assert judge({r: records[r] for r in (0, 1)}, {}, 2).call.name == "allreduce.extra"


def test_calls_in_different_lines_need_the_same_name():
    hint = "give all of them the same name"
    program, other = ["line 5 of train.py"], "line 9 of train.py"
    assert hint in judge(simulate(2, program, {1: 0}, {1: other}), {}, 2).text
    assert hint not in judge(simulate(2, program, {1: 0}, {1: "extra"}), {}, 2).text
    assert hint not in judge(simulate(2, ["bucket"], {1: 0}, {1: other}), {}, 2).text
    assert hint not in judge(simulate(2, program, {1: 0}), {}, 2).text


def test_another_thread_of_the_user_may_call_the_collective():
    records = simulate(2, ["bucket"], {1: 0}, {1: "extra"})
    thread = 'Thread 0x03 (most recent call first):\n  File "/home/me/train.py", line 9 in run\n'
    records[1] = replace(records[1], stacks=thread + "\n" + WAITING)
    assert not judge(records, {}, 2).deadlock


@pytest.mark.parametrize(
    ("state", "text"), [(STOPPED, "the process is stopped"), (ENDED, "the process has ended")]
)
def test_a_rank_without_a_record(state, text):
    records = simulate(3, ["bucket"], {2: 0})
    del records[2]
    verdict = judge(records, {2: state}, 3)
    assert verdict.missing == [2]
    assert text in verdict.text
    assert verdict.deadlock == verdict.is_final == (state == ENDED)


def test_ranks_that_wait_for_a_rank_that_has_ended():
    """Over MPI, they get no error. If one of them can still do something, the job waits."""
    records = simulate(4, ["bucket"], {3: 0})
    verdict = judge(records, {3: ENDED}, 4)
    assert verdict.is_final
    assert verdict.whole_text.endswith(
        "Every rank that still runs waits for a rank that has ended: the job cannot continue."
    )
    assert not judge(records, {2: STOPPED, 3: ENDED}, 4).deadlock
    working = records | {2: replace(records[2], open=[], stacks=WAITING.replace("waits", "works"))}
    assert not judge(working, {3: ENDED}, 4).deadlock


def test_a_rank_of_which_nothing_is_known_is_missing():
    records = simulate(3, ["bucket"], {2: 0})
    del records[2]
    assert "Rank 2 has not called it, and did not report its state." in judge(records, {}, 3).text
    hosts = ["host0", "host0", "host1"]
    assert "Rank 2 on host1 has not called it, and did" in judge(records, {}, 3, hosts=hosts).text


def test_a_complete_call_that_is_older_is_not_the_cause():
    """All ranks have called it, and the network carries it."""
    records = simulate(3, ["bucket"], {2: 0})
    old = call("old", 1, -5.0)
    for rank, record in records.items():
        calls = record.calls | {(0, "allreduce.old"): 1}
        records[rank] = replace(record, open=[old, *record.open], calls=calls)
    verdict = judge(records, {}, 3)
    assert verdict.missing == [2]
    assert "allreduce.old" not in verdict.text


def test_a_late_call_that_has_ended_on_other_ranks_is_the_cause():
    """The network between two hosts broke before rank 0 got the result of call 1."""
    records = simulate(2, ["bucket", "bucket"], {})
    first, second = call("bucket", 1, 0.0), call("bucket", 2, 1.0)
    records[0] = replace(records[0], open=[first], calls={first.collective: 1})
    records[1] = replace(records[1], open=[second])
    verdict = judge(records, {}, 2, late={first.key, second.key})
    assert (verdict.waiting, verdict.missing) == ([0], [])
    assert (
        "All ranks have called it: the network or a rank does not transfer its data (64 bytes), or "
        "the transfer takes longer than this."
    ) in verdict.text
    # Not if rank 0 has not waited long: it may continue in a moment.
    assert judge(records, {}, 2, late={second.key}).missing == [0]


@pytest.mark.parametrize("joined_at", [0.5, -600.0], ids=["later", "earlier"])
def test_a_rank_in_join_is_not_missing(joined_at):
    records = simulate(3, ["bucket"], {2: 0})
    join = Call("join.noname", 1, "join", 0, "uint8", 0, joined_at, None)
    records[1] = replace(records[1], open=[join], calls={(0, "join.noname"): 1})
    records = {rank: replace(record, limit=1800.0) for rank, record in records.items()}
    verdict = judge(records, {}, 3)
    assert (verdict.waiting, verdict.missing, verdict.limit) == ([0], [2], 1800.0)
    assert "join" not in verdict.text


def test_calls_that_a_rank_in_join_counts_are_complete():
    records = simulate(2, ["bucket"] * 3, {1: 2})
    # Call 1 ended while rank 1 was in `join`, and rank 1 has called number 2.
    records[1] = replace(records[1], done=records[1].done[1:])
    _, *lines = timeline(records)
    assert [line.endswith("(not complete)") for line in lines] == [False, False, True]


def test_a_member_of_a_small_process_set_without_a_record_is_missing():
    waits = call("loss", 1, 0.0, group=1)
    records = {
        rank: Record(rank, 8, f"host{rank}", 1, "stall", 60.0, groups={1: [0, 1]})
        for rank in range(8)
        if rank != 1
    }
    records[0] = replace(records[0], open=[waits], calls={waits.collective: 1})
    assert "Rank 1 has not called it, and did not report" in judge(records, {}, 8).text


def test_only_ranks_of_the_process_set_are_missing():
    records = simulate(3, ["bucket"], {})
    waiting = call("in a set", 1, 5.0, group=1)
    records[0] = replace(records[0], open=[waiting], groups={1: [0, 2]}, stacks=WAITING)
    verdict = judge(records, {}, 3)
    assert (verdict.waiting, verdict.missing) == ([0], [2])


def test_a_name_that_is_not_counted_counts_while_it_is_open():
    records = simulate(2, ["bucket"], {1: 0})
    uncounted = replace(records[0].open[0], number=0)
    records[0] = replace(records[0], open=[uncounted], calls={})
    assert judge(records, {}, 2).missing == [1]
    records[1] = replace(records[1], open=[uncounted])
    assert judge(records, {}, 2).missing == []


def test_a_host_that_did_not_answer_is_named_when_the_job_has_continued():
    silent = ["host1 did not answer the launcher for 4 s, until 1 s ago."]
    verdict = judge(simulate(2, ["bucket"], {}) | {}, {}, 2, silent)
    assert verdict.text.splitlines()[:2] == ["No rank waits for a collective.", *silent]
    assert not verdict.is_final


def test_a_stopped_rank_that_has_called_everything():
    verdict = judge(simulate(2, ["bucket"], {}) | {}, {}, 2)
    assert "No rank waits" in verdict.text
    both = {
        rank: replace(record, open=[call("bucket", 2, 3.0)], calls={(0, "allreduce.bucket"): 2})
        for rank, record in simulate(2, ["bucket"], {}).items()
    }
    assert "Rank 1 is stopped" in judge(both, {1: STOPPED}, 2).text
    assert "All ranks have called it" in judge(both, {}, 2).text


def test_a_bucket_is_described_by_its_gradients():
    verdict = judge(simulate(2, ["bucket", "bucket"], {1: 1}), {}, 2)
    assert verdict.text.startswith(
        "Rank 0 has waited 60 s for bucket 1 of 1 (a to b; 1.0 MB), call 2"
    )


def test_the_timeline_shows_who_came_when():
    records = simulate(2, ["bucket", "loss"], {1: 1})
    title, first, second = timeline(records)
    assert "rank 0" in title
    assert "rank 1" in title
    assert first.count("+0 ms") == 2
    assert "not complete" not in first
    assert "+0 ms …" in second
    assert "-" in second
    assert second.endswith("(not complete)")


def test_the_timeline_of_many_ranks_names_the_first_the_last_and_the_missing_ones():
    title, first, second = timeline(simulate(100, ["bucket", "loss"], {7: 1, 70: 1}))
    assert "rank 1" not in title
    assert "rank 0   rank 99     +0 ms" in first
    assert second.endswith("(not complete: ranks 7, 70)")


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/other/place/hvdkit/core/synchronizer.py", True),
        ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", True),
        ("/home/me/hvdkit/examples/torch_digits.py", False),
        ("/home/me/train.py", False),
    ],
)
def test_a_script_in_a_folder_named_hvdkit_is_the_users(file, library):
    assert Frame(file, 1, "main").is_library == library


def test_a_line_that_ends_in_a_comma_may_be_the_end_of_a_sentence(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("reduce(loss,\n    2)\n")
    assert str(Frame(str(script), 1, "main")).endswith(":1 in main: reduce(loss")


def test_the_last_rank_waits_for_a_thread_at_its_end():
    ends = Record(
        1, 2, "host1", 1, "request", 60.0,
        stacks=OTHER_THREAD + '  File "/venv/lib/python3.11/threading.py", line 9 in _shutdown',
    )  # fmt: skip
    assert judge({1: ends}, {0: ENDED}, 2).text == (
        "Rank 0 has ended. No other rank waits for a collective.\nRank 1 on host1 is at "
        "/venv/lib/python3.11/threading.py:9 in _shutdown. The script has ended: Python waits for "
        "other threads. Another thread is at /home/me/data.py:6 in load."
    )


def test_the_exception_of_a_rank_that_does_not_end_is_named():
    records = simulate(2, ["bucket"], {1: 0})
    text = judge(records, {}, 2, raised={0: "KeyError: 'x'", 1: "ValueError: bad"}).text
    assert text.endswith(" The rank has written a traceback: ValueError: bad")
    assert "KeyError" not in text


def test_a_thread_that_loads_data_is_named():
    records = simulate(2, ["bucket"], {1: 0})
    records[1] = replace(
        records[1],
        stacks=OTHER_THREAD
        + '  File "/venv/site-packages/tensorflow/execute.py", line 53 in quick_execute\n'
        + '  File "/home/me/train.py", line 23 in <module>',
    )
    assert judge(records, {}, 2).text.endswith(
        "the rank is at /home/me/train.py:23 in <module>. Another thread is at "
        "/home/me/data.py:6 in load."
    )


def test_the_call_of_a_package_that_runs_the_training_is_named():
    records = simulate(2, ["bucket"], {1: 0})
    records[1] = replace(
        records[1],
        stacks="""Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/venv/site-packages/torch/utils/data/dataloader.py", line 1290 in _try_get_data
  File "/venv/site-packages/lightning/pytorch/loops/fit_loop.py", line 45 in run
  File "/home/me/train.py", line 23 in <module>
""",
    )
    line = (
        "is at /home/me/train.py:23 in <module>. This line has called "
        "/venv/site-packages/torch/utils/data/dataloader.py:1290 in _try_get_data."
    )
    assert f"Rank 1 on host1 has not called it: the rank {line}" in judge(records, {}, 2).text
    # The last rank that runs.
    assert judge({1: records[1]}, {0: ENDED}, 2).text.endswith(line)
    # The package has called code of the user.
    header, _, frames = records[1].stacks.partition("\n")
    stacks = f'{header}\n  File "/home/me/data.py", line 7 in load\n{frames}'
    records[1] = replace(records[1], stacks=stacks)
    assert judge(records, {}, 2).text.endswith("the rank is at /home/me/data.py:7 in load.")


# `python -m mine.train` and `train`, with an installed package `mine`.
OWN_PACKAGE = """Thread 0x03 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/venv/site-packages/mine/data.py", line 6 in read_ahead

Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 5 in recv
  File "/venv/site-packages/mine/gr\\xf6\\xdfe.py", line 7 in load
  File "/venv/site-packages/mine/train.py", line 23 in <module>
"""


@pytest.mark.parametrize(
    "outermost", ['"<frozen runpy>", line 88 in _run_code', '"/venv/bin/train", line 8 in <module>']
)
def test_an_installed_package_that_is_the_training_program(outermost):
    records = simulate(2, ["bucket"], {1: 0})
    stacks = f"{OWN_PACKAGE}  File {outermost}\n"
    records[1] = replace(records[1], stacks=stacks)
    text = judge(records, {}, 2).text
    assert "the rank is at /venv/site-packages/mine/größe.py:7 in load." in text
    assert "Another thread is at /venv/site-packages/mine/data.py:6 in read_ahead." in text


def test_the_line_of_a_thread_that_waits_for_the_collective():
    records = simulate(2, ["bucket"], {1: 0})
    thread = WAITING.partition("Current")[2].replace("thread 0x02", "Thread 0x09", 1).strip()
    main = SLEEPING.replace("loader.py", "main.py")
    records[0] = replace(records[0], stacks=f"{thread}\n\n{main}")
    assert "Rank 0 is at /home/me/train.py:23 in <module>." in judge(records, {}, 2).text


def test_a_missing_rank_whose_graph_waits_for_another_collective():
    # The threads of a graph of TensorFlow call collectives, so the stack shows no wait.
    records = simulate(2, ["check"], {1: 0}, {1: "bucket"})
    execute = 'File "/venv/site-packages/tensorflow/python/eager/execute.py", line 53'
    graph = f"""Current thread 0x02 (most recent call first):
  {execute} in quick_execute
  File "/home/me/train.py", line 23 in <module>
"""
    records[1] = replace(records[1], stacks=graph)
    verdict = judge(records, {}, 2)
    assert verdict.missing == [1]
    assert verdict.text.endswith(
        "Rank 1 on host1 has not called it: the rank is at /home/me/train.py:23 in <module>, in a "
        "graph of TensorFlow that waits for bucket 1 of 1 (a to b; 1.0 MB)."
    )
    # Without a wait, the graph computes.
    records[1] = replace(records[1], open=[])
    assert "This line has called /venv/site-packages/tensorflow" in judge(records, {}, 2).text


# On a GPU, a thread of PyTorch computes the backward pass. Python has not started this thread.
_BACKWARD = """Thread 0x03 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
  File "/usr/lib/python3.12/threading.py", line 1032 in _bootstrap

Thread 0x01 (most recent call first):
{frames}
Current thread 0x02 (most recent call first):
  File "/venv/site-packages/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "/venv/site-packages/torch/autograd/__init__.py", line 364 in backward
  File "/home/me/train.py", line 35 in <module>
"""


def test_a_deadlock_with_a_backward_pass_on_a_gpu():
    records = simulate(2, ["bucket", "loss"], {0: 0, 1: 0}, {0: "bucket", 1: "loss"})
    waiting = """\
  File "/venv/site-packages/horovod/torch/mpi_ops.py", line 1324 in synchronize
  File "/venv/site-packages/hvdkit/torch/passes.py", line 101 in end_pass
"""
    records[0] = replace(records[0], stacks=_BACKWARD.format(frames=waiting))
    verdict = judge(records, {}, 2)
    assert verdict.deadlock
    assert "Rank 0 is at /home/me/train.py:35 in <module>." in verdict.text


def test_a_thread_of_a_library_is_no_backward_pass():
    records = simulate(2, ["bucket"], {1: 0})
    reads = """\
  File "/venv/site-packages/grpc/_channel.py", line 7 in poll
"""
    records[1] = replace(records[1], stacks=_BACKWARD.format(frames=reads))
    assert "the rank is at /home/me/train.py:35 in <module>." in judge(records, {}, 2).text


def test_a_hook_in_a_backward_pass_on_a_gpu_is_the_line_of_the_user():
    records = simulate(2, ["bucket"], {1: 0})
    hook = """\
  File "/home/me/hooks.py", line 7 in clip
"""
    records[1] = replace(records[1], stacks=_BACKWARD.format(frames=hook))
    assert judge(records, {}, 2).text.endswith("the rank is at /home/me/hooks.py:7 in clip.")


def test_a_generated_file_of_autograph_is_not_the_line_of_the_user():
    records = simulate(2, ["bucket"], {1: 0})
    header, _, frames = WAITING.partition("Current thread 0x02 (most recent call first):\n")
    generated = '  File "/tmp/__autograph_generated_file7kq.py", line 14 in tf__step\n'
    stacks = f"{header}Current thread 0x02 (most recent call first):\n{generated}{frames}"
    records[0] = replace(records[0], stacks=stacks)
    assert "Rank 0 is at /home/me/train.py:23 in <module>." in judge(records, {}, 2).text


def test_a_rank_that_skips_a_collective_of_its_process_set():
    # Rank 1 has skipped `group`. Rank 2, which is not in this process set, calls the bucket first.
    def waits(rank, name, at, group=0):
        calls = {(group, f"allreduce.{name}"): 1}
        waiting = [call(name, 1, at, group=group)]
        return Record(rank, 3, "h", 1, "stall", 60.0, calls=calls, open=waiting, stacks=WAITING,
                      groups={0: [], 5: [0, 1]})  # fmt: skip

    records = {0: waits(0, "group", 2.0, 5), 1: waits(1, "bucket", 3.0), 2: waits(2, "bucket", 1.0)}
    verdict = judge(records, {}, 3)
    assert verdict.deadlock
    assert "Rank 0 on h has not called it: the rank waits for the allreduce 'group'" in verdict.text
    assert (
        "Rank 1 has not called the allreduce 'group' of process set 5 (ranks 0, 1)" in verdict.text
    )
    # The record of an earlier engine may lack the process sets.
    records[0] = replace(records[0], groups={})
    assert judge(records, {}, 3).missing == verdict.missing


def test_the_last_collective_of_the_missing_rank_has_failed():
    records = simulate(2, ["loss", "bucket", "bucket"], {1: 2})
    assert ", ended " in judge(records, {}, 2).text
    records[1] = replace(records[1], error="failed: x", failed=records[1].done[-1].name)
    assert ", failed " in judge(records, {}, 2).text


def in_a_set(rank, ranks, number, ends=None, stacks=WAITING):
    """Return the record of a rank that has called `loss` in process set 1 or 2."""
    group = 1 if rank in ranks[0] else 2
    own = call("loss", number, 1.0, ends, group=group)
    calls = {"done" if ends else "open": [own]}
    size = len(ranks[0]) + len(ranks[1])
    return Record(rank, size, "h", 1, "stall", 61.0, calls={own.collective: number}, stacks=stacks,
                  groups={0: [], 1: ranks[0], 2: ranks[1]}, **calls)  # fmt: skip


def test_process_sets_that_use_the_same_name():
    # Set 2 is ahead. Rank 1 has not made call 3 of set 1.
    ranks = [0, 1], [2, 3]
    records = {0: in_a_set(0, ranks, 3), 1: in_a_set(1, ranks, 2, 1.5, SLEEPING)}
    records |= {rank: in_a_set(rank, ranks, 7, 1.5, SLEEPING) for rank in (2, 3)}
    verdict = judge(records, {}, 4)
    assert (verdict.waiting, verdict.missing) == ([0], [1])
    name = "the allreduce 'loss' of process set 1 (ranks 0, 1), 64 bytes of float32, call 3."
    assert name in verdict.text
    # The other ranks are not in the process set.
    complete = {line for line in timeline(records) if not line.endswith("(not complete)")}
    assert len([line for line in complete if "set 2 (ranks 2, 3)" in line]) == 1
    assert not any("set 1" in line and "call 3" in line for line in complete)


def test_two_process_sets_that_wait():
    ranks = [0, 1], [2, 3]
    waiting = {rank: in_a_set(rank, ranks, 3) for rank in (0, 2)}
    late = {rank: in_a_set(rank, ranks, 2, 1.5, SLEEPING) for rank in (1, 3)}
    verdict = judge(waiting | late, {}, 4)
    assert (verdict.waiting, verdict.missing) == ([0], [1])
    assert "Rank 2 has waited 60 s for the allreduce 'loss' of process set 2" in verdict.text
    assert "Rank 3 on h has not called it: the rank is at" in verdict.text
    # Set 2 has called its collective a moment ago.
    young = replace(waiting[2], open=[replace(waiting[2].open[0], enqueued=60.9)])
    assert "set 2" not in judge(waiting | late | {2: young}, {}, 4).text


def test_many_ranks_of_another_process_set_are_missing():
    ranks = [0, 1], list(range(2, 9))
    records = {rank: in_a_set(rank, ranks, 3) for rank in (0, 2)}
    records |= {r: in_a_set(r, ranks, 2, 1.5, SLEEPING) for r in range(9) if r not in records}
    text = judge(records, {}, 9).text
    assert "Rank 2 has waited 60 s for the allreduce 'loss' of process set 2" in text
    assert [rank for rank in range(9) if f"Rank {rank} on h has not" in text] == [1, 3, 4, 5]
    assert text.endswith("3 more ranks have not called it.")


def run_sets(size, sets, program, order, sleeps=None, instead=None):
    """Return the records of a job whose collectives are those of process sets.

    Args:
        size: the number of ranks.
        sets: the ranks of each process set, from set 1 on.
        program: the process set and the name of each collective.
        order: ranks, in the order in which they run until they wait.
        sleeps: a rank, and the position in the program before which it sleeps.
        instead: a rank, a position in the program, and the process set that the rank uses there.
    """
    groups = {0: [], **dict(enumerate(sets, 1))}
    at, counts, done = [0] * size, [{} for _ in range(size)], [[] for _ in range(size)]
    waiting, clock = {}, 0.0

    def members(group):
        return groups[group] or range(size)

    def go(rank):
        """Run a rank until it waits; return whether it has made progress."""
        nonlocal clock
        began = at[rank]
        while rank not in waiting and at[rank] < len(program) and sleeps != (rank, at[rank]):
            group, name = program[at[rank]]
            at[rank] += 1
            if instead and instead[:2] == (rank, at[rank] - 1):
                group = instead[2]
            if rank not in members(group):
                continue
            clock += 0.01
            key = group, f"allreduce.{name}"
            counts[rank][key] = counts[rank].get(key, 0) + 1
            waiting[rank] = call(name, counts[rank][key], clock, group=group)
            here = [r for r in members(group) if waiting.get(r) and waiting[r].key == (
                waiting[rank].key)]  # fmt: skip
            if len(here) == len(members(group)):
                for other in here:
                    done[other].append(replace(waiting.pop(other), ended=clock))
        return at[rank] > began

    progress = True
    while progress:
        progress = any([go(rank) for rank in order])  # noqa: C419, each rank runs
    return {
        rank: Record(
            rank, size, f"host{rank}", 1, "stall", clock + 60.0, groups=groups, calls=counts[rank],
            open=[waiting[rank]] if rank in waiting else [], done=done[rank],
            stacks=WAITING if rank in waiting else SLEEPING,
        )
        for rank in range(size)
    }  # fmt: skip


@given(
    sets=st.lists(st.sets(st.integers(0, 3), min_size=2).map(sorted), min_size=1, max_size=3),
    program=st.lists(st.tuples(st.integers(0, 1), st.sampled_from("xy")), min_size=2, max_size=8),
    order=st.permutations(range(4)),
    data=st.data(),
)
def test_the_rank_that_sleeps_is_named_whatever_process_sets_wait(sets, program, order, data):
    program = [(data.draw(st.integers(0, len(sets))), name) for _, name in program]
    members = [range(4), *sets]
    position = data.draw(st.integers(0, len(program) - 1))
    late = data.draw(st.sampled_from(members[program[position][0]]))
    verdict = judge(run_sets(4, sets, program, order, (late, position)), {}, 4)
    assert not verdict.deadlock
    lines = [line for line in verdict.text.splitlines() if f"Rank {late} on " in line]
    assert len(lines) == 1
    assert "has not called " in lines[0]
    assert "the rank is at /home/me/loader.py:7" in lines[0]


@given(
    sets=st.lists(st.sets(st.integers(0, 3), min_size=2).map(sorted), min_size=1, max_size=3),
    order=st.permutations(range(4)),
    data=st.data(),
)
def test_a_rank_that_uses_another_process_set_is_named(sets, order, data):
    members = [range(4), *sets]
    numbers = data.draw(st.lists(st.integers(0, len(sets)), min_size=1, max_size=6))
    position = data.draw(st.integers(0, len(numbers) - 1))
    rank = data.draw(st.sampled_from(members[numbers[position]]))
    of_rank = [number for number, ranks in enumerate(members) if rank in ranks]
    other = data.draw(st.sampled_from(of_rank))
    assume(other != numbers[position])
    program = [(number, f"call {index}") for index, number in enumerate(numbers)]
    records = run_sets(4, sets, program, order, instead=(rank, position, other))
    verdict = judge(records, {}, 4)
    own = f"the rank waits for the allreduce 'call {position}'"
    lines = [line for line in verdict.text.splitlines() if f"Rank {rank} on " in line]
    assert rank in verdict.waiting or any(own in line for line in lines)


def waits_in_sets(*waits):
    """Return the records of ranks that wait: process set, name and time of each rank's call."""
    groups = {0: [], 1: [0, 1], 2: [0, 2], 3: [2, 3]}
    found = {}
    for rank, (group, name, at) in enumerate(waits):
        own = call(name, 1, at, group=group)
        found[rank] = Record(rank, len(waits), "h", 1, "stall", 60.0, calls={own.collective: 1},
                             open=[own], stacks=WAITING, groups=groups)  # fmt: skip
    return found


def test_the_ranks_that_a_missing_rank_waits_for_are_described():
    # Rank 1 calls `x` on all ranks instead of in set 1.
    records = waits_in_sets((1, "x", 2.0), (0, "x", 2.1), (2, "y", 1.0))
    text = judge(records, {}, 3).text
    assert text.startswith("Rank 2 has waited 59 s for the allreduce 'y' of process set 2")
    assert (
        "Rank 0 on h has not called it: the rank waits for the allreduce 'x' of process set 1"
        in (text)
    )
    called = "Rank 1 on h has not called the allreduce 'x' of process set 1 (ranks 0, 1): "
    assert f"{called}the rank waits for the allreduce 'x', 64 bytes of float32, at" in text


def test_the_call_for_which_a_missing_rank_waits():
    records = waits_in_sets((1, "x", 1.0), (0, "complete", 0.5), (0, "complete", 0.6))
    own = [call(name, 1, 2.0) for name in ("hvdkit.rounds.header", "bucket")]
    called = {(0, "allreduce.complete"): 1}
    records[0] = replace(records[0], calls={**records[0].calls, **called})
    records[1] = replace(
        records[1],
        open=[*records[1].open, *own],
        calls={**called, **{each.collective: 1 for each in own}},
    )
    text = judge(records, {}, 3).text
    assert "Rank 1 on h has not called it: the rank waits for the allreduce 'bucket'" in text


def test_a_rank_that_only_waits_for_a_deadlock_does_not_begin_the_verdict():
    # Ranks 0 and 1 wait for each other, and rank 2 has called `y` before.
    records = waits_in_sets((1, "x", 2.0), (1, "z", 2.1), (2, "y", 1.0))
    verdict = judge(records, {}, 3)
    assert verdict.deadlock
    assert (list(verdict.waiting), list(verdict.missing)) == ([0], [1])


def test_ranks_that_train_in_another_process_set_are_no_deadlock():
    # Ranks 2 and 3 are in a collective that both have called. Later they call `x`.
    records = waits_in_sets((0, "x", 1.0), (0, "x", 1.1), (3, "z", 58.0), (3, "z", 58.1))
    verdict = judge(records, {}, 4)
    assert not verdict.deadlock
    assert (list(verdict.waiting), list(verdict.missing)) == ([0, 1], [2, 3])
    # Two of three ranks are in such a collective.
    waits = (0, "x", 1.0), (2, "z", 58.0), (2, "z", 58.1)
    records = waits_in_sets(*waits)
    groups = {0: [], 2: [1, 2]}
    records = {rank: replace(each, groups=groups) for rank, each in records.items()}
    verdict = judge(records, {}, 3)
    assert not verdict.deadlock
    assert (list(verdict.waiting), list(verdict.missing)) == ([0], [1, 2])
    # They have also called a collective that lacks rank 0, and do not wait for it yet.
    early = call("early", 1, 57.0)
    for rank in (1, 2):
        record = records[rank]
        calls = {**record.calls, early.collective: 1}
        records[rank] = replace(record, open=[early, *record.open], calls=calls)
    assert not judge(records, {}, 3).deadlock


def test_two_deadlocks_are_described():
    waits = (1, "x", 1.0), (1, "y", 1.1), (3, "x", 1.2), (3, "y", 1.3)
    text = judge(waits_in_sets(*waits), {}, 4).text
    assert "Rank 1 on h has not called it: the rank waits for the allreduce 'y'" in text
    assert "Rank 2 has waited 59 s for the allreduce 'x' of process set 3 (ranks 2, 3)" in text
    assert "Rank 3 on h has not called it: the rank waits for the allreduce 'y'" in text


def test_a_rank_that_sleeps_with_an_open_call_of_another_process_set():
    waits = (1, "x", 1.0), (1, "y", 1.1), (3, "x", 1.2), (3, "y", 1.3)
    records = waits_in_sets(*waits)
    records[1] = replace(records[1], open=[], calls={}, stacks=SLEEPING)
    records[3] = replace(records[3], stacks=SLEEPING)
    assert "Rank 3 on h has not called it: the rank is at /home/me/loader.py:7" in (
        judge(records, {}, 4).text
    )


def test_a_stall_long_after_that_of_another_process_set_is_described():
    ranks = [0, 1], [2, 3]
    records = {rank: in_a_set(rank, ranks, 3) for rank in (0, 2)}
    records |= {rank: in_a_set(rank, ranks, 2, 1.5, SLEEPING) for rank in (1, 3)}
    young = replace(records[2].open[0], enqueued=41.0)
    records[2] = replace(records[2], open=[young])
    assert "Rank 3" not in judge(records, {}, 4).text
    text = judge(records, {}, 4, late={young.key}).text
    assert "Rank 2 has waited 20 s for the allreduce 'loss' of process set 2" in text
    assert "Rank 3 on h has not called it: the rank is at" in text


def test_a_record_that_lacks_a_process_set():
    # Rank 2 has failed after the shutdown had removed set 2.
    ranks = [0, 1], [2, 3]
    records = {rank: in_a_set(rank, ranks, 7, 1.5) for rank in (2, 3)}
    records[2] = replace(records[2], groups={0: []})
    line = next(line for line in timeline(records) if "'loss'" in line)
    assert line.endswith("the allreduce 'loss' of process set 2 (ranks 2, 3), 64 bytes of float32, "
                         "call 7")  # fmt: skip


def test_a_rank_that_has_failed_and_ended_keeps_the_verdict():
    records = simulate(2, ["bucket"], {1: 0})
    text = judge(records, {}, 2).text
    failed = {**records, 0: replace(records[0], error="failed: Horovod has been shut down")}
    assert judge(failed, {0: ENDED}, 2).text == text
    assert judge(records, {0: ENDED}, 2).text.startswith("Rank 0 has ended.")
