"""Verdicts on simulated jobs: every rank runs the same collectives, except for one fault."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvdkit.faults.names import ELSEWHERE, ENDED, STOPPED
from hvdkit.faults.records import Call
from hvdkit.faults.stacks import Frame
from hvdkit.faults.timeline import timeline
from hvdkit.faults.verdict import judge
from tests.unit.faults.jobs import SLEEPING, SLEEPS, WAITING, call, run, simulate, waits_in_sets

SIZE = 4
CLOCKS = st.dictionaries(st.integers(0, SIZE - 1), st.floats(-1e6, 1e6))


@st.composite
def jobs(draw):
    """Draw a job: process sets, the common program of its ranks, their order, and their clocks."""
    sets = draw(st.lists(st.sets(st.integers(0, SIZE - 1), min_size=2).map(sorted), max_size=3))
    members = [range(SIZE), *sets]
    names = st.sampled_from(["bucket", "loss", "hvdkit.rounds.header"])
    program = draw(st.lists(st.tuples(st.integers(0, len(sets)), names), min_size=1, max_size=8))
    programs = [[c for c in program if rank in members[c[0]]] for rank in range(SIZE)]
    rank = draw(st.sampled_from([rank for rank in range(SIZE) if programs[rank]]))
    position = draw(st.integers(0, len(programs[rank]) - 1))
    return members, programs, rank, position, draw(st.permutations(range(SIZE))), draw(CLOCKS)


@given(jobs(), st.sampled_from([None, STOPPED, ENDED, "silent"]))
def test_the_rank_that_stops_is_named(job, state):
    """The counts name the rank. Its clock may be anything."""
    members, programs, late, position, order, clocks = job
    programs[late][position:] = [SLEEPS]
    records = run(programs, members[1:], order)
    expected = "the rank is at /home/me/loader.py:7 in load."
    if state is not None:
        del records[late]
        states = {STOPPED: "the process is stopped", ENDED: "the process has ended"}
        expected = states.get(state, "and did not report its state")
    states = {late: state} if state in (STOPPED, ENDED) else {}
    verdict = judge(records, states, SIZE)
    assert late in verdict.missing
    (line,) = (line for line in verdict.text.splitlines() if line.startswith(f"Rank {late} "))
    assert "has not called " in line
    assert expected in line
    assert "deadlock" not in verdict.certain
    assert bool(verdict.certain) <= (state == ENDED)
    shifted = {rank: r.shifted(clocks.get(rank, 0.0)) for rank, r in records.items()}
    assert judge(shifted, states, SIZE).text == verdict.text


@given(jobs(), st.data())
def test_a_rank_that_calls_something_else_is_named(job, data):
    members, programs, rank, position, order, clocks = job
    groups = [number for number, ranks in enumerate(members) if rank in ranks]
    other = data.draw(st.sampled_from(groups)), data.draw(st.sampled_from(["loss", "extra"]))
    assume(programs[rank][position] != other)
    programs[rank][position:] = [other, SLEEPS]
    records = run(programs, members[1:], order, clocks)
    assume(records[rank].open)
    verdict = judge(records, {}, SIZE)
    own = f"the rank waits for the allreduce '{other[1]}'"
    lines = [line for line in verdict.text.splitlines() if line.startswith(f"Rank {rank} ")]
    assert rank in verdict.waiting or any(own in line for line in lines)
    # Another rank is the only one that can be alone.
    if other[1] == "extra":
        assert bool(verdict.certain) == all(record.open for record in records.values())


@given(st.lists(st.lists(st.sampled_from("xyz"), max_size=4), min_size=2, max_size=3), st.data())
def test_a_deadlock_is_only_certain_if_no_rank_can_continue(programs, data):
    """Each rank writes its record at another moment. A later moment only adds calls."""
    seen, whole = {}, run(programs)
    for rank in range(len(programs)):
        # The other ranks, and so this one, have not come further than now.
        limits = [data.draw(st.integers(0, len(program))) for program in programs]
        early = run([[*program[:n], SLEEPS] for program, n in zip(programs, limits, strict=True)])
        seen[rank] = early[rank]
    stuck = all(record.open for record in whole.values())
    assert stuck or not judge(seen, {}, len(programs)).certain


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


def test_what_a_deadlock_needs():
    hint = "give all of them the same name"
    program, other = ["line 5 of train.py"], "line 9 of train.py"
    # Calls in different lines need the same name.
    assert hint in judge(simulate(2, program, {1: 0}, {1: other}), {}, 2).text
    assert hint not in judge(simulate(2, program, {1: 0}, {1: "extra"}), {}, 2).text
    assert hint not in judge(simulate(2, ["bucket"], {1: 0}, {1: other}), {}, 2).text
    assert hint not in judge(simulate(2, program, {1: 0}), {}, 2).text
    # Another thread of the user may call the collective.
    records = simulate(2, ["bucket"], {1: 0}, {1: "extra"})
    thread = 'Thread 0x03 (most recent call first):\n  File "/home/me/train.py", line 9 in run\n'
    records[1] = replace(records[1], stacks=thread + "\n" + WAITING)
    assert not judge(records, {}, 2).certain


def test_ranks_that_wait_for_a_rank_that_has_ended():
    """Over MPI, they get no error. If one of them can still do something, the job waits."""
    records = simulate(4, ["bucket"], {3: 0})
    verdict = judge(records, {3: ENDED}, 4)
    assert verdict.is_final
    assert verdict.whole_text.endswith(
        "Every rank that still runs waits for a rank that has ended: the job cannot continue."
    )
    assert not judge(records, {2: STOPPED, 3: ENDED}, 4).is_final
    working = records | {2: replace(records[2], open=[], stacks=SLEEPING)}
    assert not judge(working, {3: ENDED}, 4).is_final
    # A rank that has failed and ended keeps the verdict.
    records = simulate(2, ["bucket"], {1: 0})
    text = judge(records, {}, 2).text
    failed = {**records, 0: replace(records[0], error="failed: Horovod has been shut down")}
    assert judge(failed, {0: ENDED}, 2).text == text
    assert judge(records, {0: ENDED}, 2).text.startswith("Rank 0 has ended.")


def test_what_is_known_of_a_missing_rank():
    records = simulate(3, ["bucket"], {2: 0})
    del records[2]
    hosts = ["host0", "host0", "host1"]
    assert "Rank 2 on host1 has not called it, and did" in judge(records, {}, 3, hosts=hosts).text
    # The exception of a rank that does not end.
    records = simulate(2, ["bucket"], {1: 0})
    text = judge(records, {}, 2, raised={0: "KeyError: 'x'", 1: "ValueError: bad"}).text
    assert text.endswith(" The rank has written a traceback: ValueError: bad")
    assert "KeyError" not in text
    # A host that did not answer is named when the job has continued.
    silent = ["host1 did not answer the launcher for 4 s, until 1 s ago."]
    verdict = judge(simulate(2, ["bucket"]), {}, 2, silent=silent)
    assert verdict.text.splitlines()[:2] == ["No rank waits for a collective.", *silent]
    assert not verdict.is_final


def test_a_complete_call_is_not_the_cause_if_a_rank_is_missing():
    """All ranks have called it, and the network carries it."""
    records = simulate(3, ["bucket"], {2: 0})
    old = call("old", 1, -5.0)
    for rank, record in records.items():
        calls = record.calls | {(0, "allreduce.old"): 1}
        records[rank] = replace(record, open=[old, *record.open], calls=calls)
    verdict = judge(records, {}, 3)
    assert verdict.missing == [2]
    assert "allreduce.old" not in verdict.text


def test_all_ranks_have_called_it():
    both = {
        rank: replace(record, open=[call("bucket", 2, 3.0)], calls={(0, "allreduce.bucket"): 2})
        for rank, record in simulate(2, ["bucket"]).items()
    }
    assert "Rank 1 is stopped" in judge(both, {1: STOPPED}, 2).text
    assert "All ranks have called it" in judge(both, {}, 2).text
    # The network between two hosts broke before rank 0 got the result of call 1.
    records = simulate(2, ["bucket", "bucket"])
    records = {rank: replace(r, time=60.0, stacks=WAITING) for rank, r in records.items()}
    first, second = call("bucket", 1, 0.0), call("bucket", 2, 1.0)
    records[0] = replace(records[0], open=[first], calls={first.collective: 1})
    records[1] = replace(records[1], open=[second], done=records[1].done[:1])
    verdict = judge(records, {}, 2, 50.0)
    assert (verdict.waiting, verdict.missing) == ([0], [])
    assert (
        "All ranks have called it: the network or a rank does not transfer its data (64 bytes), or "
        "the transfer takes longer than this."
    ) in verdict.text
    # Not if rank 0 has not waited long: it may continue in a moment.
    records[0] = replace(records[0], open=[replace(first, enqueued=59.0)])
    assert judge(records, {}, 2, 50.0).missing == [0]


@pytest.mark.parametrize("joined_at", [0.5, -600.0], ids=["later", "earlier"])
def test_a_rank_in_join_is_not_missing(joined_at):
    records = simulate(3, ["bucket"], {2: 0})
    join = Call("join.noname", 1, "join", 0, "uint8", 0, joined_at, None)
    records[1] = replace(records[1], open=[join], calls={(0, "join.noname"): 1})
    records = {rank: replace(record, limit=1800.0) for rank, record in records.items()}
    verdict = judge(records, {}, 3)
    assert (verdict.waiting, verdict.missing, verdict.limit) == ([0], [2], 1800.0)
    assert "join" not in verdict.text


def test_a_name_that_is_not_counted_counts_while_it_is_open():
    records = simulate(2, ["bucket"], {1: 0})
    uncounted = replace(records[0].open[0], number=0)
    records[0] = replace(records[0], open=[uncounted], calls={})
    assert judge(records, {}, 2).missing == [1]
    records[1] = replace(records[1], open=[uncounted])
    assert judge(records, {}, 2).missing == []


def test_the_timeline():
    title, first, second = timeline(simulate(2, ["bucket", "loss"], {1: 1}))
    assert re.search("rank 0 +rank 1", title)
    assert re.search(r"\+0 ms +\+10 ms", first)
    assert "not complete" not in first
    assert re.search(r"\+0 ms … +- .*\(not complete\)$", second)
    # Of many ranks, the first, the last and the missing ones are named.
    title, first, second = timeline(simulate(100, ["bucket", "loss"], {7: 1, 70: 1}))
    assert "rank 1" not in title
    assert "rank 0   rank 99   +990 ms" in first
    assert second.endswith("(not complete: ranks 7, 70)")
    # Calls that a rank in join counts are complete: call 1 ended while rank 1 was in `join`.
    records = simulate(2, ["bucket"] * 3, {1: 2})
    records[1] = replace(records[1], done=records[1].done[1:])
    _, *lines = timeline(records)
    assert [line.endswith("(not complete)") for line in lines] == [False, False, True]


# Stacks


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/other/place/hvdkit/reduction/synchronizer.py", True),
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


def stack(*frames, thread="Current thread 0x02"):
    """Return the stack of a thread, with frames such as `/home/me/data.py:7 load`."""
    lines = [f"{thread} (most recent call first):"]
    for frame in frames:
        place, _, function = frame.partition(" ")
        file, _, line = place.rpartition(":")
        lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join(lines) + "\n"


SITE, TRAIN = "/venv/site-packages", "/home/me/train.py:23 <module>"
READER = stack(
    "/usr/lib/python3.11/threading.py:331 wait", "/home/me/data.py:6 load", thread="Thread 0x03"
)
OTHER_THREAD = " Another thread is at /home/me/data.py:6 in load."
EXECUTE = f"{SITE}/tensorflow/execute.py:53 quick_execute"
DATALOADER = f"{SITE}/torch/utils/data/dataloader.py:1290 _try_get_data"
FIT = [f"{SITE}/lightning/pytorch/loops/fit_loop.py:45 run", TRAIN]
OWN_PACKAGE = [  # `python -m mine.train` and `train`, with an installed package `mine`
    "/usr/lib/python3.11/socket.py:5 recv",
    f"{SITE}/mine/gr\\xf6\\xdfe.py:7 load",
    f"{SITE}/mine/train.py:23 <module>",
]
# On a GPU, a thread of PyTorch computes the backward pass. Python has not started this thread.
BACKWARD = stack(
    f"{SITE}/torch/autograd/graph.py:865 _engine_run_backward",
    f"{SITE}/torch/autograd/__init__.py:364 backward",
    "/home/me/train.py:35 <module>",
)


def beside(*frames):
    return stack(*frames, thread="Thread 0x01") + "\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (READER + "\n" + stack("/venv/lib/python3.11/threading.py:9 _shutdown"),
         "/venv/lib/python3.11/threading.py:9 in _shutdown. The script has ended: Python waits for "
         "other threads." + OTHER_THREAD),
        # A thread that loads data.
        (READER + "\n" + stack(EXECUTE, TRAIN), "/home/me/train.py:23 in <module>." + OTHER_THREAD),
        # A package that runs the training, and one that has called code of the user.
        (stack("/usr/lib/python3.11/selectors.py:415 select", DATALOADER, *FIT),
         "/home/me/train.py:23 in <module>. This line has called "
         f"{SITE}/torch/utils/data/dataloader.py:1290 in _try_get_data."),
        (stack("/home/me/data.py:7 load", DATALOADER, *FIT), "/home/me/data.py:7 in load."),
        (stack(*OWN_PACKAGE, "<frozen runpy>:88 _run_code"), f"{SITE}/mine/größe.py:7 in load."),
        (stack(*OWN_PACKAGE, "/venv/bin/train:8 <module>"), f"{SITE}/mine/größe.py:7 in load."),
        # A library's thread is no backward pass; a hook of the user in a pass is.
        (beside(f"{SITE}/grpc/_channel.py:7 poll") + BACKWARD,
         "/home/me/train.py:35 in <module>. This line has called "
         f"{SITE}/torch/autograd/graph.py:865 in _engine_run_backward."),
        (beside("/home/me/hooks.py:7 clip") + BACKWARD, "/home/me/hooks.py:7 in clip."),
        # A computing graph of TensorFlow.
        (stack(f"{SITE}/tensorflow/python/eager/execute.py:53 quick_execute", TRAIN),
         "/home/me/train.py:23 in <module>. This line has called "
         f"{SITE}/tensorflow/python/eager/execute.py:53 in quick_execute."),
    ],
)  # fmt: skip
def test_the_line_of_a_missing_rank(text, place):
    records = simulate(2, ["bucket"], {1: 0})
    records[1] = replace(records[1], stacks=text)
    said = judge(records, {}, 2).text
    assert f"\nRank 1 on host1 has not called it: the rank is at {place}" in said
    # The last rank that runs.
    assert judge({1: records[1]}, {0: ENDED}, 2).text == (
        f"Rank 0 has ended. No other rank waits for a collective.\nRank 1 on host1 is at {place}"
    )


@pytest.mark.parametrize(
    "text",
    [
        # Another thread waits for the collective.
        WAITING.partition("\n\n")[2].replace("Current thread", "Thread") + "\n"
        + SLEEPING.replace("loader.py", "main.py"),
        # A generated file of AutoGraph is not the line of the user.
        WAITING.replace(
            "Current thread 0x02 (most recent call first):",
            stack("/tmp/__autograph_generated_file7kq.py:14 tf__step").rstrip(),
        ),
    ],
)  # fmt: skip
def test_the_line_of_a_rank_that_waits(text):
    records = simulate(2, ["bucket"], {1: 0})
    records[0] = replace(records[0], stacks=text)
    assert "Rank 0 is at /home/me/train.py:23 in <module>." in judge(records, {}, 2).text


def test_a_missing_rank_whose_graph_waits_for_another_collective():
    # The threads of a graph of TensorFlow call collectives, so the stack shows no wait.
    records = simulate(2, ["check"], {1: 0}, {1: "bucket"})
    graph = stack(f"{SITE}/tensorflow/python/eager/execute.py:53 quick_execute", TRAIN)
    records[1] = replace(records[1], stacks=graph)
    verdict = judge(records, {}, 2)
    assert verdict.missing == [1]
    assert verdict.text.endswith(
        "Rank 1 on host1 has not called it: the rank is at /home/me/train.py:23 in <module>, in a "
        "graph of TensorFlow that waits for bucket 1 of 1 (a to b; 1.0 MB)."
    )


def test_a_deadlock_with_a_backward_pass_on_a_gpu():
    records = simulate(2, ["bucket"], {1: 0}, {1: "loss"})
    waiting = [
        f"{SITE}/horovod/torch/mpi_ops.py:1324 synchronize",
        f"{SITE}/hvdkit/torch/reduction/passes.py:101 end_pass",
    ]
    records[0] = replace(records[0], stacks=beside(*waiting) + BACKWARD)
    verdict = judge(records, {}, 2)
    assert "deadlock" in verdict.certain
    assert "Rank 0 is at /home/me/train.py:35 in <module>." in verdict.text


# Process sets


def test_a_rank_that_skips_a_collective_of_its_process_set():
    # Rank 1 has skipped `group`. Rank 2 is not in this process set.
    records = run([[(1, "group")], ["bucket"], ["bucket"]], [[0, 1]])
    verdict = judge(records, {}, 3)
    assert verdict.is_final
    lines = verdict.text.splitlines()
    assert lines[0].startswith("Ranks 1, 2 have waited 60 s for bucket 1 of 1")
    assert lines[1] == (
        "Rank 0 on host0 has not called it: the rank waits for the allreduce 'group' of process "
        "set 1 (ranks 0, 1), 64 bytes of float32, at /home/me/train.py:23 in <module>. Rank 1 has "
        "not called the allreduce 'group' of process set 1 (ranks 0, 1), 64 bytes of float32."
    )
    # The record of an earlier engine may lack the process sets.
    records[0] = replace(records[0], groups={})
    assert judge(records, {}, 3).missing == verdict.missing


def test_two_process_sets_that_wait():
    records = run([[(1, "x")], [SLEEPS], [(2, "y")], [SLEEPS]], [[0, 1], [2, 3]])
    verdict = judge(records, {}, 4, 50.0)
    assert (verdict.waiting, verdict.missing) == ([0], [1])
    assert "Rank 2 has waited 60 s for the allreduce 'y' of process set 2" in verdict.text
    assert "Rank 3 on host3 has not called it: the rank is at" in verdict.text
    # Set 2 has called its collective a moment ago.
    young = replace(records[2].open[0], enqueued=60.0)
    records[2] = replace(records[2], open=[young])
    assert "set 2" not in judge(records, {}, 4, 50.0).text


def test_many_ranks_of_another_process_set_are_missing():
    programs = [[(1, "x")], [SLEEPS], [(2, "y")], *[[SLEEPS]] * 6]
    text = judge(run(programs, [[0, 1], range(2, 9)]), {}, 9).text
    assert "Rank 2 has waited 60 s for the allreduce 'y' of process set 2" in text
    assert [rank for rank in range(9) if f"Rank {rank} on host{rank} has" in text] == [1, 3, 4, 5]
    assert text.endswith("3 more ranks have not called it.")


def test_the_call_for_which_a_missing_rank_waits():
    records = simulate(2, ["complete", "x"], {1: 1}, {1: "hvdkit.rounds.header"})
    complete, bucket = call("complete", 1, 0.0), call("bucket", 1, 2.0)
    calls = {**records[1].calls, bucket.collective: 1}
    records[1] = replace(records[1], open=[complete, *records[1].open, bucket], calls=calls)
    assert "Rank 1 on host1 has not called it: the rank waits for bucket 1 of 1" in (
        judge(records, {}, 2).text
    )


def test_ranks_that_train_in_another_process_set_are_no_deadlock():
    # Ranks 2 and 3 are in a collective that both have called. Later they call `x`.
    z = call("z", 1, 58.0, group=3)
    records = waits_in_sets((0, "x"), (0, "x"), (3, "z"), (2, "other"))
    for rank in (2, 3):
        records[rank] = replace(records[rank], open=[z], calls={z.collective: 1})
    verdict = judge(records, {}, 4, 30.0)
    assert not verdict.is_final
    assert (list(verdict.waiting), list(verdict.missing)) == ([0, 1], [2, 3])
    # They have also called a collective that lacks rank 0, and do not wait for it yet.
    early = call("early", 1, 57.0)
    for rank in (2, 3):
        record = records[rank]
        calls = {**record.calls, early.collective: 1}
        records[rank] = replace(record, open=[early, *record.open], calls=calls)
    assert not judge(records, {}, 4, 30.0).is_final


def test_a_record_that_lacks_a_process_set():
    # Rank 2 has failed after the shutdown had removed set 2.
    own, other = [(1, "loss")] * 2, [(2, "loss")] * 7
    records = run([own, own, other, other], [[0, 1], [2, 3]])
    records = {rank: replace(records[rank], groups={0: []} if rank == 2 else records[3].groups)
               for rank in (2, 3)}  # fmt: skip
    line = timeline(records)[-1]
    assert line.endswith("the allreduce 'loss' of process set 2 (ranks 2, 3), 64 bytes of float32, "
                         "call 7")  # fmt: skip
