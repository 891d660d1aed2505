"""Records of a stall that has ended by itself."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from hvdkit.faults.records import Call
from hvdkit.faults.waits import without_outdated
from tests.unit.faults.jobs import simulate


@given(
    size=st.integers(2, 5),
    program=st.lists(st.sampled_from(["bucket", "loss"]), min_size=2, max_size=8),
    data=st.data(),
)
def test_records_of_ranks_that_have_continued_are_left_out(size, program, data):
    late = data.draw(st.integers(0, size - 1))
    position = data.draw(st.integers(0, len(program) - 1))
    stall = simulate(size, program, {late: position})
    assert without_outdated(stall) == stall
    # The ranks continue, until one of them is killed before another call.
    longer = program + [program[position]] * data.draw(st.integers(1, 3))
    end = {
        rank: replace(
            record.shifted(1000.0),
            error="failed: bad",
            failed=record.open[0].name,
            open=[replace(record.open[0], ended=record.time + 1000.0)],
        )
        for rank, record in simulate(size, [*longer, "other"], {late: len(longer)}).items()
        if rank != late
    }
    failed = data.draw(st.sets(st.sampled_from(sorted(end)), min_size=1))
    mixed = stall | {rank: end[rank] for rank in failed}
    assert without_outdated(mixed).keys() == failed


def test_a_call_that_failed_does_not_show_that_other_ranks_have_made_it():
    records = simulate(2, ["bucket", "loss"], {1: 1})
    (waiting,) = records[0].open
    failed = replace(waiting, ended=90.0)
    # The engine has written the record again after the failure.
    records[0] = replace(
        records[0], time=95.0, open=[], done=[*records[0].done, failed], error="failed: Horovod"
    )
    records[0] = replace(records[0], failed=failed.name)
    assert without_outdated(records) == records


def test_records_of_an_earlier_start_leave_no_record_out():
    earlier = simulate(2, ["bucket"] * 5, {1: 4})
    later = {rank: each.shifted(500.0) for rank, each in simulate(2, ["bucket"], {1: 0}).items()}
    mixed = {0: earlier[0], 1: later[1]}
    assert without_outdated(mixed) == mixed


def test_a_rank_that_waits_in_join_has_not_continued():
    records = simulate(3, ["bucket"] * 6, {2: 5})
    join = Call("join.noname", 1, "join", 0, "uint8", 0, 0.02, None)
    calls = {(0, "allreduce.bucket"): 2, join.collective: 1}
    records[1] = replace(records[1], time=0.03, open=[join], done=[], calls=calls)
    assert without_outdated(records) == records
    # The `join` has ended, and the rank has trained the next epoch.
    ended = replace(records[0], calls=records[0].calls | {join.collective: 1})
    assert without_outdated(records | {0: ended}).keys() == {0, 2}
