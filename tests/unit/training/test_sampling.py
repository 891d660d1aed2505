"""Loops over the batches of an epoch, errors in them, and jobs that resume."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import UsageError
from hvdkit.training.sampling import Batches, Epochs, Position
from hvdkit.training.share import Share, epoch_order


def epochs(count=18, batch_size=4, *, rank=0, ranks=1, **how):
    how = {"shuffle": True, "seed": 1, "drop_last": False, "how_to_count": ""} | how
    return Epochs(count, batch_size, rank=rank, ranks=ranks, **how)


def looped(sampler):
    """Return the iterator that `batches()` of an adapter returns."""

    def read():
        epoch, mine = sampler.left()
        starts = range(0, len(mine), sampler.batch_size)
        return ((epoch, mine[k : k + sampler.batch_size].tolist()) for k in starts)

    return Batches(sampler, read)


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("again", ["same loop", "new loop"])
def test_after_an_error_the_batch_is_read_again(failing, again):
    sampler = epochs()
    errors = [OSError("stale file handle")]

    def read():
        epoch, mine = sampler.left()
        for k in range(0, len(mine), sampler.batch_size):
            if sampler.position.consumed == failing * sampler.batch_size and errors:
                raise errors.pop()
            yield epoch, mine[k : k + sampler.batch_size].tolist()

    batches, seen = Batches(sampler, read), []
    with pytest.raises(OSError, match="stale"):
        seen.extend(batches)
    seen += batches if again == "same loop" else Batches(sampler, read)
    assert seen == list(looped(epochs()))
    assert sampler.epoch == 1


def test_an_order_with_an_entry_for_each_epoch():
    """The position after the last epoch can be saved and restored."""
    reverse = [False, True]

    def order(numbers, epoch):
        return numbers[::-1] if reverse[epoch] else numbers

    sampler = epochs(order=order)
    trees = [sampler.save()]
    for _ in reverse:
        trees += [sampler.save() for _ in looped(sampler)]
        trees.append(sampler.save())
    # Earlier versions always saved the checksum of the current epoch.
    earlier = {key: value for key, value in trees[5].items() if key != "order_epoch"}
    for tree in (*trees, earlier):
        resumed = epochs(order=order)
        resumed.restore(resumed.plan_restore(tree))
        assert resumed.position == Position(tree["epoch"], tree["consumed"])
        other = epochs(order=lambda numbers, _: np.roll(numbers, 1))
        with pytest.raises(UsageError, match="saved with another order of the samples in epoch"):
            other.plan_restore(tree)


def rest_of(order, consumed, rank, ranks, size):
    """Return the batches of a rank after `consumed` samples, by the rule of the guide."""
    rest, batches = order[consumed:].tolist(), []
    while rest:
        step, rest = rest[: ranks * size], rest[ranks * size :]
        batches.append(step[rank::ranks] or [int(order[rank % len(order)])])
    return batches


actions = st.one_of(
    st.tuples(st.sampled_from(["loop", "loop", "restore in a loop", "second loop"]), st.just(0)),
    st.tuples(st.just("loop"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["end_epoch", "continue"]), st.none()),
    st.tuples(st.just("resume"), st.integers(1, 4)),
    st.tuples(st.just("set_epoch"), st.integers(0, 3)),
)


@given(st.lists(actions, max_size=12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_loops_that_leave_epochs_and_jobs_that_resume(sequence, ranks, size, rank):
    """Each loop has the batches of its epoch, as in the guide, on any number of ranks."""
    count = 18
    job = epochs(batch_size=size, rank=rank % ranks, ranks=ranks)
    epoch = consumed = 0
    was_left = False

    def expected():
        return rest_of(epoch_order(count, 1, epoch), consumed, rank % ranks, ranks, size)

    for action, value in sequence:
        if action == "resume":
            state = job.save()
            ranks = value
            job = epochs(batch_size=size, rank=rank % ranks, ranks=ranks)
            job.restore(job.plan_restore(state))
            was_left = False
        elif action == "continue":
            job.set_epoch(job.epoch)
            was_left = False
        elif action in ("end_epoch", "set_epoch"):
            job.end_epoch() if action == "end_epoch" else job.set_epoch(value)
            before, epoch = epoch, epoch + 1 if action == "end_epoch" else value
            consumed = consumed if epoch == before else 0
            was_left = False
        elif action == "loop" and value == 0:
            # A loop that takes no batch has not begun.
            assert list(itertools.islice(looped(job), 0)) == []
        else:
            if was_left:
                epoch, consumed = epoch + 1, 0
            left = expected()
            batches = looped(job)
            assert len(batches) == len(left)
            if action == "loop":
                found = list(itertools.islice(batches, value))
                assert found == [(epoch, batch) for batch in left[:value]]
                was_left = 0 < len(left) >= value
            else:
                was_left = bool(left)
                assert next(batches, None) == ((epoch, left[0]) if left else None)
            assert len(batches) == len(left)
            if was_left:
                done = min(value, len(left)) if action == "loop" else 1
                consumed = min(consumed + done * ranks * size, count)
            else:
                epoch, consumed = epoch + 1, 0
            if was_left and action != "loop":
                if action == "restore in a loop":
                    job.restore(job.plan_restore(job.save()))
                    was_left = False
                else:
                    epoch, consumed = epoch + 1, 0
                    second = looped(job)
                    assert next(second) == (epoch, expected()[0])
                    consumed = min(ranks * size, count)
                with pytest.raises(UsageError, match="in this loop|another loop"):
                    next(batches)
        assert (job.epoch, job.position.consumed) == (epoch, consumed)


class MovingEpochs(Epochs):
    """A sampler in a process whose rank and number of ranks change."""

    place = (0, 1)

    def _current_place(self):
        return self.place


@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_the_ranks_change_within_a_process(before, after, restores):
    """An elastic job of Horovod's launcher does this if rank 0 is lost, or if ranks are added."""
    options = {"shuffle": True, "seed": 1, "drop_last": False, "how_to_count": ""}
    samplers = [MovingEpochs(25, 2, rank=0, ranks=1, **options) for _ in range(max(before, after))]
    for rank, sampler in enumerate(samplers):
        sampler.place = rank % before, before
        sampler.set_epoch(1)
        sampler.begin_iteration()
        trained = sampler.left()[1][:4].tolist()
        sampler.advance(2)
        if rank < before:
            samplers[0].trained = getattr(samplers[0], "trained", []) + trained
    saved = samplers[0].save()
    for rank, sampler in enumerate(samplers[:after]):
        sampler.place = after - 1 - rank, after
        if restores:
            sampler.restore(saved)
        samplers[0].trained += sampler.left()[1].tolist()
        assert sampler.position == samplers[0].position
        assert sampler.batches_per_epoch == Share(25, 0, 0, after, 2).batches
    assert set(samplers[0].trained) == set(range(25))
    assert len(samplers[0].trained) - 25 < after


def test_ranks_that_become_too_many_for_the_data_raise():
    """Otherwise each epoch would end without a batch."""
    options = {"shuffle": True, "seed": 1, "drop_last": True, "how_to_count": ""}
    sampler = MovingEpochs(10, 4, rank=0, ranks=1, **options)
    saved = sampler.save()
    sampler.place = (0, 3)
    problem = "10 samples do not make a batch of 4 on each of 3 ranks"
    for call in (sampler.begin_iteration, sampler.left, lambda: sampler.restore(saved)):
        with pytest.raises(UsageError, match=problem):
            call()
    sampler.place = (0, 2)
    assert sampler.begin_iteration()
