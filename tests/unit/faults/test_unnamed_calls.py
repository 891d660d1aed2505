"""Calls without a name that ranks made in different lines are found, and no others."""

from hypothesis import given
from hypothesis import strategies as st

from hvdkit.faults.mismatch import different_lines
from hvdkit.faults.records import Call, Record


def record(rank, lines, operation="allreduce", joined=None):
    """Return the record of a rank that made calls without a name in these lines."""
    done, number = [], 0
    for at, line in enumerate(lines, start=1):
        number += 1
        name = f"{operation}.noname.{number}"
        done.append(Call(name, 1, operation, 0, "float32", 4, float(at), at + 0.5, f"t.py:{line}"))
        if at == joined:
            done.append(Call("join", 1, "join", 0, "float32", 0, at + 0.6, at + 0.7))
            number = 0
    return Record(rank, 3, f"host{rank}", 1, "stall", 99.0, done=done)


@given(program=st.lists(st.integers(1, 3), min_size=2), data=st.data())
def test_the_first_call_in_another_line_is_named(program, data):
    at = data.draw(st.integers(0, len(program) - 1))
    records = {rank: record(rank, program) for rank in range(3)}
    assert different_lines(records) is None
    records[1] = record(1, [*program[:at], 7, *program[at:]])
    text = different_lines(records)
    place = f"ranks 0, 2 called it at t.py:{program[at]}, and rank 1 called it at t.py:7."
    assert f"In the allreduce 'noname.{at + 1}', {place}" in text


def test_calls_before_join_have_other_numbers():
    # Rank 0 made fewer calls before join(). Then all numbers begin at 1.
    records = {0: record(0, [1, 5, 6], joined=1), 1: record(1, [1, 2, 5, 6], joined=2)}
    assert different_lines(records) is None


def test_broadcasts_of_different_lines_are_usual():
    records = {0: record(0, [1], "broadcast"), 1: record(1, [2], "broadcast")}
    assert different_lines(records) is None
