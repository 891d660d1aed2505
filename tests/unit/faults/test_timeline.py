"""Records of ranks whose clocks differ, or whose clock was set."""

from dataclasses import replace

from hvdkit.faults.records import Call, Record
from hvdkit.faults.timeline import aligned, timeline
from hvdkit.faults.verdict import judge

HOUR = 3600.0


def call(number, at, ended):
    return Call("allreduce.loss", number, "allreduce", 0, "float32", 4, at, ended)


def record(rank, machine, offset, late=0.0):
    """Return the record of a rank that has waited for 60 s at the monotonic time 100."""
    done = [call(n, 10.0 * n + late, 10.0 * n + 0.5) for n in range(1, 5)]
    made = Record(
        rank, 3, f"host{rank}", 1, "stall", 100.0, 600.0, calls={(0, "allreduce.loss"): 5},
        open=[call(5, 40.0 + late, None)], done=done, offset=0.0, machine=machine,
    )  # fmt: skip
    return made.shifted(offset)


def test_the_clock_of_a_machine_was_set_between_two_records():
    """With times of day, rank 1 would have called everything an hour after rank 0."""
    found = {0: record(0, "a", HOUR), 1: record(1, "a", 2 * HOUR, late=0.1)}
    same = aligned(found)
    assert same[0] == found[0]
    assert [round(made.enqueued - HOUR, 6) for made in same[1].done] == [10.1, 20.1, 30.1, 40.1]
    assert same[1].time == found[0].time
    table = timeline(found)
    assert "+100 ms" in table[1]
    assert not any("3600" in line for line in table)


def test_the_clocks_of_two_machines_differ():
    """A collective ends on all ranks at the same time."""
    found = {rank: record(rank, f"m{rank}", HOUR * rank) for rank in range(3)}
    assert {made.time for made in aligned(found).values()} == {100.0}
    # So much that the clocks may be right.
    found[1] = replace(record(1, "m1", 0.005), offset=0.005)
    assert aligned(found)[1] == found[1]


def test_a_rank_has_not_waited_for_the_difference_of_two_clocks():
    found = {0: record(0, "a", 0.0), 1: record(1, "b", HOUR)}
    # Without a common collective, the clocks cannot be compared.
    found[1] = replace(found[1], done=())
    assert judge(found, {}, 2).waited == 60.0


def test_no_records():
    assert aligned({}) == {}
