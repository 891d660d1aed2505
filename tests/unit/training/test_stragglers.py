"""Own times, and which ranks are slow."""

import logging
import threading

import pytest

from hvdkit.training.stragglers import (
    BACKWARD,
    FORWARD,
    UPDATE,
    WAIT,
    StepTimes,
    StragglerReport,
    describe,
    is_slow,
    wait_measured,
)
from tests.simulated.ranks import SimulatedGroup, on_every_rank


def times(forward, wait, backward=1.0, update=0.1):
    return {FORWARD: forward, BACKWARD: backward, WAIT: wait, UPDATE: update}


def test_sections_take_turns():
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 10.5])
    measured = StepTimes(lambda: next(now))
    for section in (FORWARD, BACKWARD, WAIT, UPDATE):
        measured.enter(section)
    assert measured.take() == {FORWARD: 1.0, BACKWARD: 2.0, WAIT: 3.0, UPDATE: 4.0}
    assert measured.take() == {UPDATE: 0.5}


def test_a_collective_of_the_script_is_no_own_time():
    clock = [0.0]
    measured = StepTimes(lambda: clock[0])

    @wait_measured
    def wait(seconds):
        clock[0] += seconds
        return seconds

    wait(10)  # nothing is counted yet
    measured.enter(FORWARD)
    clock[0] += 1
    assert wait(20) == 20
    clock[0] += 2
    measured.enter(BACKWARD)
    wait(3)
    other = threading.Thread(target=wait, args=[5])  # not the thread that trains
    other.start()
    other.join()
    measured.enter(WAIT)
    wait(7)
    measured.enter(UPDATE)
    with pytest.raises(TypeError):
        wait(None)
    clock[0] += 1
    assert measured.take() == {FORWARD: 3.0, BACKWARD: 5.0, WAIT: 30.0, UPDATE: 1.0}


@pytest.mark.parametrize(
    ("own", "slow"),
    [([1.0, 1.0], []), ([1.0, 1.5], [1]), ([1.0, 1.1, 1.2, 1.0], []), ([1, 1, 3, 1], [2])],
)
def test_slow_ranks(own, slow):
    all_times = {rank: times(each, 5 - each) for rank, each in enumerate(own)}
    assert [rank for rank in all_times if is_slow(rank, all_times)] == slow


def test_ranks_that_mostly_wait_are_not_slow():
    """Rank 1 is slow. The other ranks need little time, so ratios between them say nothing."""
    own = {0: 0.01, 1: 0.8, 2: 0.06, 3: 0.02}
    all_times = {rank: {FORWARD: each, WAIT: 1.0 - each} for rank, each in own.items()}
    assert [rank for rank in all_times if is_slow(rank, all_times)] == [1]


def test_the_line_names_the_section_and_the_time_lost():
    line = describe(1, {0: times(1.0, 1.9), 1: times(2.8, 0.1), 2: times(1.0, 1.9)})
    assert "rank 1 on host " in line
    assert "spent 3.9 s outside of reductions, and the median of the other ranks is 2.1 s" in line
    assert "in data and forward" in line
    assert "45 % of the time" in line


@pytest.mark.parametrize("joined", [False, True])
def test_a_rank_is_named_once_while_it_stays_slow(caplog, joined):
    """Ranks in `join` contribute zeros, and are not compared."""

    def rank(collectives):
        if joined and collectives.rank == 3:
            return
        now = [0.0]
        measured = StepTimes(lambda: now[0])
        report = StragglerReport(collectives, measured)
        for _ in range(12):
            measured.enter(FORWARD)
            now[0] += 2.0 if collectives.rank == 1 else 1.0
            measured.enter(WAIT)
            now[0] += 0.1 if collectives.rank == 1 else 1.1
            report.report()

    group = SimulatedGroup(4)
    group.joined = {3} if joined else set()
    with caplog.at_level(logging.WARNING, "hvdkit"):
        assert on_every_rank(4, rank, group) == [None] * 4
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("rank 1 on host ")


def test_a_rank_that_is_slow_for_a_few_seconds_only_is_not_named(caplog):
    def rank(collectives):
        now = [0.0]
        measured = StepTimes(lambda: now[0])
        report = StragglerReport(collectives, measured)
        for number in range(24):
            # Slow for 8 seconds, then not.
            slow = collectives.rank == 1 and number % 6 < 4
            measured.enter(FORWARD)
            now[0] += 2.0 if slow else 1.0
            measured.enter(WAIT)
            now[0] += 0.1 if slow else 1.1
            report.report()

    with caplog.at_level(logging.WARNING, "hvdkit"):
        assert on_every_rank(2, rank) == [None] * 2
    assert not caplog.records
