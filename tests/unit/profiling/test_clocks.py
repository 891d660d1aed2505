"""Offsets of clocks, from simulated collectives of which the true times are known."""

import random

import pytest

from hvdkit.profiling import clocks
from hvdkit.profiling.clocks import Offset, clock_change, offset_of
from hvdkit.profiling.overlap import contradictions
from hvdkit.runtime import time_of_day
from tests.simulated.ranks import on_every_rank

SECOND = 10**9
MICROSECOND = 1000


def simulate(offset, seed, latencies=(200, 300), rounds=40, turns=True):
    """Return the rounds of rank 0, and those of rank 1, whose clock is ahead by `offset`.

    Args:
        offset: nanoseconds.
        seed: of the random times.
        latencies: microseconds from the last entry until rank 0 leaves, and until rank 1 does.
        rounds: the number of rounds.
        turns: the ranks are late by 1 ms in turns; otherwise always rank 1.
    """
    chance = random.Random(seed)
    time, first, second = 1700 * 10**15, [], []
    for number in range(rounds):
        entered = [time + chance.randrange(50) * MICROSECOND for _ in range(2)]
        entered[number % 2 if turns else 1] += 1000 * MICROSECOND
        left = [
            max(entered) + int(latency * MICROSECOND * chance.uniform(1, 3))
            for latency in latencies
        ]
        first.append((entered[0], left[0]))
        second.append((entered[1] + offset, left[1] + offset))
        time = max(left)
    return second, first


@pytest.mark.parametrize("offset", [0, 3600 * SECOND, -7 * SECOND, 40 * MICROSECOND])
@pytest.mark.parametrize("latencies", [(200, 200), (50, 900)])
def test_the_error_bound_holds(offset, latencies):
    for seed in range(20):
        found = offset_of(*simulate(offset, seed, latencies))
        assert abs(found.nanoseconds - offset) <= found.error
        # The best round trip decides.
        assert found.error < 1.5 * sum(latencies) / 2 * MICROSECOND


def test_the_ranks_are_late_in_turns():
    """If the same rank is always late, the error is larger by half of that."""
    same = offset_of(*simulate(0, 1, turns=False))
    in_turns = offset_of(*simulate(0, 1))
    assert same.error > in_turns.error + 300 * MICROSECOND


def test_rounds_of_real_threads(monkeypatch):
    """Each simulated rank is a thread; all read the same clock, so the true offset is 0."""
    assert clocks.now() + time_of_day.offset() > 1.6e18  # nanoseconds since 1970
    rounds = on_every_rank(3, lambda ranks: clocks.measure(ranks, "clock"))
    for own in rounds:
        found = offset_of(own, rounds[0])
        assert abs(found.nanoseconds) <= found.error < SECOND


def test_a_clock_that_is_fast():
    """Between the measurements, the offset changes evenly."""
    change = clock_change(Offset(1000.0, 10.0, 0.0), Offset(3000.0, 20.0, 2e9), same_clock=False)
    assert change.offset(1e9) == 2000.0
    assert change.to_first(10**9) == 10**9 - 2000
    assert change.error == 20.0


def test_ranks_with_one_clock():
    begin, end = Offset(-30.0, 40.0, 0.0), Offset(35.0, 40.0, 1e9)
    same = clock_change(begin, end, same_clock=True)
    assert same.error == 0
    assert same.to_first(1_790_000_000_000_000_001) == 1_790_000_000_000_000_001
    # The measurement excludes 0: the process has a clock of its own.
    other = clock_change(replaced := Offset(-3e9, 40.0, 0.0), Offset(-3e9, 40.0, 1e9), True)
    assert other.begin == replaced
    assert clock_change(begin, end, same_clock=False).error == 40.0


def test_a_clock_that_was_set_is_found():
    spans = {
        "bucket -1": {0: (0.0, 5e6), 1: (1e6, 5e6)},
        "bucket -2": {0: (0.0, 5e6), 1: (7e6, 9e6)},  # called after it had ended on rank 0
        "on one rank": {0: (0.0, 1.0)},
    }
    assert contradictions(spans, {0: 0.0, 1: 0.0}) == (2, 1)
    assert contradictions(spans, {0: 0.0, 1: 3e6}) == (2, 0)
