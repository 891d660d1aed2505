"""The synchronizer on simulated ranks, with a backend whose gradients are lists of numbers."""

import pytest

from hvdkit.core.agreement import RanksDisagree
from hvdkit.core.bucketing import ParameterSpec, plan
from hvdkit.core.synchronizer import Synchronizer
from hvdkit.errors import HvdkitError, UsageError
from tests.core.simulated_ranks import on_every_rank


class ListBackend:
    """Sums lists of numbers over simulated ranks; keeps a diary of what was reduced and when."""

    def __init__(self, collectives, specs):
        self.collectives = collectives
        self.specs = specs
        self.gradients = [None] * len(specs)
        self.allocated = 0
        self.diary = []
        self.fail_on_wait = False

    def allocate(self, bucket):
        self.allocated += 1
        return [0.0] * bucket.elements

    def pack(self, bucket, buffer):
        for i, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            count = self.specs[i].elements
            buffer[offset : offset + count] = self.gradients[i] or [0.0] * count

    def reduce(self, buffer, name):
        self.diary.append(name)
        return buffer, name, list(buffer)

    def wait(self, handle):
        if self.fail_on_wait:
            raise RuntimeError("the network is down")
        buffer, name, packed = handle
        everyone = self.collectives.exchange(packed, name)
        buffer[:] = [sum(column) for column in zip(*everyone, strict=True)]

    def unpack(self, bucket, buffer):
        for i, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            self.gradients[i] = buffer[offset : offset + self.specs[i].elements]


SPECS = [ParameterSpec(f"p{i}", (2,), "float64", 8, "cpu") for i in range(4)]


def make(collectives, specs=SPECS, **options):
    backend = ListBackend(collectives, specs)
    two_per_bucket = plan(specs, bucket_bytes=32, first_bucket_bytes=32)
    return Synchronizer(two_per_bucket, backend, collectives, **options), backend


def step(synchronizer, backend, gradients):
    backend.gradients = list(gradients)
    for i in reversed(range(len(gradients))):
        if gradients[i] is not None:
            synchronizer.mark_ready(i)
    synchronizer.synchronize()
    return backend.gradients


def test_every_rank_gets_the_sum():
    def run(collectives):
        synchronizer, backend = make(collectives)
        own = float(collectives.rank + 1)
        return [step(synchronizer, backend, [[own * i, own]] * 4)[3] for i in range(3)]

    assert on_every_rank(3, run) == [[[6.0 * i, 6.0] for i in range(3)]] * 3


def test_a_gradient_that_a_rank_does_not_have_counts_as_zeros():
    def run(collectives):
        synchronizer, backend = make(collectives)
        last = [5.0, 5.0] if collectives.rank == 0 else None
        return step(synchronizer, backend, [[1.0, 1.0]] * 3 + [last])

    assert on_every_rank(2, run) == [[[2.0, 2.0]] * 3 + [[5.0, 5.0]]] * 2


def test_a_full_bucket_is_reduced_during_the_backward_pass():
    def run(collectives):
        synchronizer, backend = make(collectives)
        step(synchronizer, backend, [[1.0, 1.0]] * 4)
        backend.diary.clear()
        backend.gradients = [[1.0, 1.0]] * 4
        seen = []
        for i in (3, 2, 1, 0):
            synchronizer.mark_ready(i)
            seen.append(len(backend.diary))
        synchronizer.synchronize()
        return seen, backend.allocated

    # The buffers of the first step are used again.
    assert on_every_rank(2, run) == [([0, 1, 1, 2], 2)] * 2


def test_nothing_is_reduced_before_the_ranks_have_agreed():
    def run(collectives):
        synchronizer, backend = make(collectives)
        backend.gradients = [[1.0, 1.0]] * 4
        for i in (3, 2, 1, 0):
            synchronizer.mark_ready(i)
        before = list(backend.diary)
        synchronizer.synchronize()
        return before, collectives.names[0]

    assert on_every_rank(2, run) == [([], "hvdkit.agreement")] * 2


def test_ranks_agree_anew_when_horovod_has_been_initialised_anew():
    def run(collectives):
        synchronizer, backend = make(collectives)
        step(synchronizer, backend, [[1.0, 1.0]] * 4)
        collectives.generation += 1
        step(synchronizer, backend, [[1.0, 1.0]] * 4)
        return collectives.names.count("hvdkit.agreement")

    assert on_every_rank(2, run) == [2, 2]


def test_different_plans_fail_on_every_rank_before_anything_is_reduced():
    def run(collectives):
        specs = SPECS if collectives.rank else [*SPECS[:3], ParameterSpec("p3", (3,), "x", 8, "")]
        synchronizer, backend = make(collectives, specs)
        with pytest.raises(RanksDisagree, match="'p3'"):
            step(synchronizer, backend, [[1.0] * spec.elements for spec in specs])
        return backend.diary

    assert on_every_rank(3, run) == [[]] * 3


def test_names_are_the_same_on_all_ranks_and_different_between_synchronizers():
    def run(collectives):
        if collectives.rank == 0:
            make(collectives)  # one more on this rank, never used
        names = []
        for _ in range(2):
            synchronizer, backend = make(collectives)
            step(synchronizer, backend, [[1.0, 1.0]] * 4)
            names += backend.diary
        return names

    results = on_every_rank(3, run)
    assert results[0] == results[1] == results[2]
    assert len(set(results[0])) == 4
    assert all(name.startswith("hvdkit.") for name in results[0])


def test_a_gradient_is_ready_after_the_last_pass():
    def run(collectives):
        synchronizer, backend = make(collectives, passes=2)
        for _ in range(2):
            backend.gradients = [[1.0, 1.0]] * 4
            seen = []
            for _ in range(2):
                for i in range(4):
                    synchronizer.mark_ready(i)
                seen.append(len(backend.diary))
            assert synchronizer.pending
            synchronizer.synchronize()
            assert not synchronizer.pending
        return seen

    # Of the second step: the first one's two buckets, then two more with the last pass.
    assert on_every_rank(2, run) == [[2, 4]] * 2


def test_a_gradient_that_arrives_too_often_is_an_error():
    def run(collectives):
        synchronizer, _ = make(collectives)
        synchronizer.mark_ready(1)
        synchronizer.mark_ready(1)

    (error,) = on_every_rank(1, run)
    assert isinstance(error, HvdkitError)
    assert "'p1' arrived 2 times" in str(error)


def test_reset_begins_a_new_step():
    def run(collectives):
        synchronizer, backend = make(collectives)
        step(synchronizer, backend, [[1.0, 1.0]] * 4)
        for i in (3, 2, 1):
            synchronizer.mark_ready(i)
        synchronizer.reset()
        assert not synchronizer.pending
        for i in range(4):
            synchronizer.mark_ready(i)
        return True

    assert on_every_rank(1, run) == [True]


def test_after_a_failed_collective_a_new_step_works_with_new_buffers():
    def run(collectives):
        synchronizer, backend = make(collectives)
        step(synchronizer, backend, [[1.0, 1.0]] * 4)
        backend.fail_on_wait = True
        with pytest.raises(RuntimeError, match="network"):
            step(synchronizer, backend, [[2.0, 2.0]] * 4)
        backend.fail_on_wait = False
        return step(synchronizer, backend, [[3.0, 3.0]] * 4), backend.allocated

    assert on_every_rank(2, run) == [([[6.0, 6.0]] * 4, 4)] * 2


@pytest.mark.parametrize("passes", [0, -1])
def test_passes_below_one_are_refused(passes):
    (error,) = on_every_rank(1, lambda c: make(c, passes=passes))
    assert isinstance(error, UsageError)
