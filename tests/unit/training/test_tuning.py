"""The choice of a bucket size, on simulated ranks with simulated times."""

import json
import threading
from itertools import pairwise

import pytest

from hvdkit.errors import HvdkitError
from hvdkit.training import tuning
from hvdkit.training.tuning import Candidate, Tuner, choose, table
from tests.simulated.ranks import SimulatedGroup, on_every_rank

MB = 1_000_000
SMALL, CURRENT, LARGE = (Candidate(size, "none") for size in (5, 25, 100))
FP16 = Candidate(25, "fp16")


def test_a_candidate_that_is_faster_in_each_turn():
    times = {SMALL: [0.9, 1.8, 0.9], CURRENT: [1.0, 2.0, 1.0], LARGE: [0.8, 1.6, 0.8]}
    assert choose(times, CURRENT) == LARGE
    assert choose({**times, FP16: [0.7, 1.7, 0.7]}, CURRENT) == FP16


@pytest.mark.parametrize(
    "others",
    [
        [0.5, 0.5, 1.01],  # slower in one turn
        [0.98, 0.98, 0.98],  # faster by less than anyone would notice
        [1.5, 1.5, 1.5],
    ],
)
def test_no_difference_beyond_noise(others):
    assert choose({CURRENT: [1.0, 1.0, 1.0], SMALL: others}, CURRENT) == CURRENT


def test_the_table():
    current = Candidate(25 * MB, "none")
    faster = Candidate(5 * MB, "fp16")
    lines = table({current: [1.0, 1.1, 1.0], faster: [0.5, 0.4, 0.5]}, current)
    assert "  5 MB  fp16     500.0 ms     -50 %   turns: 500.0, 400.0, 500.0" in lines[0]
    assert "25 MB  none    1000.0 ms   current" in lines[1]


class Job:
    """Ranks that make steps; the time of a step depends on the bucket size and the rank."""

    def __init__(self, seconds, size=3, joins_at=None, group=None):
        self.seconds = seconds
        self.joins_at = joins_at
        self.joined = threading.Event()
        self.group = group or SimulatedGroup(size)
        self.used = [[] for _ in range(size)]

    def run(self, steps=200, turns=3):
        return on_every_rank(
            self.group.size, lambda ranks: self._rank(ranks, steps, turns), self.group
        )

    def _rank(self, ranks, steps, turns):
        time = [0.0]
        used = self.used[ranks.rank]
        candidates = [CURRENT, SMALL, LARGE]
        tuner = Tuner(ranks, candidates, CURRENT, turns, 4, used.append, clock=lambda: time[0])
        tuner.begin()
        for step in range(steps):
            if step == self.joins_at:
                if ranks.rank == 1:
                    self.group.joined.add(1)
                    self.joined.set()
                    return tuner
                assert self.joined.wait(10)
            time[0] += self.seconds(tuner.bucket_bytes, ranks.rank, step)
            tuner.after_step()
        return tuner


def test_all_ranks_choose_alike():
    """On rank 2 the bucket size of 100 is slow, and all ranks wait for it."""

    def seconds(size, rank, step):
        outlier = 50.0 if step % 5 == 0 else 0.0  # such as a checkpoint
        return {25: 1.0, 5: 0.8, 100: 2.0 if rank == 2 else 0.5}[size] + outlier

    job = Job(seconds)
    tuners = job.run()
    assert [tuner.bucket_bytes for tuner in tuners] == [5, 5, 5]
    assert all(tuner.done and tuner.tuned for tuner in tuners)
    assert tuners[0].seconds == tuners[2].seconds
    assert tuners[0].seconds[LARGE] == [2.0] * 3
    # All ranks have changed the size alike, and each candidate had each turn.
    assert job.used[0] == job.used[1] == job.used[2]
    assert all(a != b for a, b in pairwise(job.used[0]))


def test_no_candidate_is_better():
    tuners = Job(lambda size, rank, step: 1.0).run()
    assert [tuner.bucket_bytes for tuner in tuners] == [25] * 3
    assert "nothing is clearly faster than the current settings" in tuners[0].summary()


def test_a_rank_that_joins():
    """The others return to the size at the beginning, and so does it when `join` returns."""
    tuners = Job(lambda size, rank, step: float(size), joins_at=9).run()
    tuners[1].cancel()
    assert [tuner.bucket_bytes for tuner in tuners] == [25] * 3
    assert not any(tuner.tuned for tuner in tuners)
    assert all(tuner.done for tuner in tuners)


def test_a_file_of_results(tmp_path):
    path = tmp_path / "new" / "tuning.json"

    def rank(ranks, formats=("none",)):
        file = path if ranks.rank == 0 else tmp_path / "not here"
        return tuning.load(ranks, file, "abc", formats)

    assert on_every_rank(2, rank) == [None, None]
    assert not path.exists()
    tuner = Job(lambda size, rank, step: float(size)).run()[0]
    entry = tuning.entry_of(tuner.candidate, tuner.seconds)
    tuning.save(path, "abc", entry)
    tuning.save(path, "other", entry)
    assert on_every_rank(2, rank) == [SMALL, SMALL]
    assert json.loads(path.read_text())["abc"]["seconds"][str(CURRENT)] == [25.0] * 3
    # The choice was made without fp16.
    assert on_every_rank(2, lambda ranks: rank(ranks, ("none", "fp16"))) == [None, None]
    tuning.save(path, "abc", {**entry, "wire_format": "fp16", "wire_formats": ["fp16", "none"]})
    assert on_every_rank(2, rank) == [None, None]
    assert (
        on_every_rank(2, lambda ranks: rank(ranks, ("none", "fp16"))) == [Candidate(5, "fp16")] * 2
    )
    assert list(path.parent.iterdir()) == [path]
    infinite = {**entry, "bucket_bytes": float("inf")}
    for content in ("[]", "[" * 100_000, json.dumps({"abc": 1}), json.dumps({"abc": infinite})):
        path.write_text(content)
        for error in on_every_rank(2, rank):
            assert isinstance(error, HvdkitError)
            assert "is not a file of hvd.autotune" in str(error)
    for error in on_every_rank(
        2, lambda ranks: tuning.load(ranks, tmp_path / "new/tuning.json/x", "", ["none"])
    ):
        assert "cannot write" in str(error)
