"""Each sample goes to exactly one rank, wherever an epoch was resumed."""

import itertools

import numpy as np
import pytest

from hvdkit.errors import UsageError
from hvdkit.training.share import Share, epoch_order


def shares(count, begin, ranks, batch_size, drop_last=False):
    return [Share(count, begin, r, ranks, batch_size, drop_last) for r in range(ranks)]


def batches(share, order):
    own = order[share.places()].tolist()
    return [own[k : k + share.batch_size] for k in range(0, len(own), share.batch_size)]


CASES = [
    (count, ranks, batch_size)
    for count, ranks, batch_size in itertools.product(
        (1, 2, 7, 24, 25, 97), (1, 2, 3, 4, 8), (1, 2, 5, 16)
    )
]


@pytest.mark.parametrize(("count", "ranks", "batch_size"), CASES)
def test_every_sample_goes_to_one_rank_in_as_many_batches_on_each(count, ranks, batch_size):
    order = epoch_order(count, 3, 1)
    found = [batches(share, order) for share in shares(count, 0, ranks, batch_size)]
    assert len({len(own) for own in found}) == 1
    assert len(found[0]) == shares(count, 0, ranks, batch_size)[0].batches
    assert all(0 < len(batch) <= batch_size for own in found for batch in own)
    samples = [sample for own in found for batch in own for sample in batch]
    assert set(samples) == set(range(count))
    # The only repeated samples are in the last batches of ranks that would have none.
    repeated = len(samples) - count
    short = sum(
        -(-((count - r + ranks - 1) // ranks) // batch_size) < len(found[0]) for r in range(ranks)
    )
    assert repeated == short


@pytest.mark.parametrize(("count", "ranks", "batch_size"), CASES)
def test_drop_last_leaves_full_batches_and_no_sample_twice(count, ranks, batch_size):
    order = epoch_order(count, 3, 1)
    found = [batches(share, order) for share in shares(count, 0, ranks, batch_size, True)]
    samples = [sample for own in found for batch in own for sample in batch]
    assert {len(batch) for own in found for batch in own} <= {batch_size}
    assert len(samples) == len(set(samples)) == count // (ranks * batch_size) * ranks * batch_size


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "ranks", "batch_size"), CASES)
def test_a_rank_that_resumes_has_the_same_remaining_batches(count, ranks, batch_size, drop_last):
    order = epoch_order(count, 0, 0)
    for share in shares(count, 0, ranks, batch_size, drop_last):
        whole = batches(share, order)
        for done in range(share.batches + 1):
            rest = Share(count, share.after(done), share.rank, ranks, batch_size, drop_last)
            assert batches(rest, order) == whole[done:]


@pytest.mark.parametrize("later", [1, 2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_number_of_ranks_resumes_with_the_remaining_samples(ranks, later):
    order = epoch_order(97, 0, 5)
    before = shares(97, 0, ranks, 4)
    seen = [s for share in before for batch in batches(share, order)[:3] for s in batch]
    after = shares(97, before[0].after(3), later, 4)
    rest = [sample for share in after for batch in batches(share, order) for sample in batch]
    assert set(seen) | set(rest) == set(range(97))
    assert not set(seen) & set(order[before[0].after(3) :])
    assert len({share.batches for share in after}) == 1


def test_an_order_follows_from_seed_and_epoch():
    same = epoch_order(100, 1, 2)
    assert np.array_equal(same, epoch_order(100, 1, 2))
    assert sorted(same) == list(range(100))
    for seed, epoch in ((1, 3), (2, 2), (0, 0)):
        assert not np.array_equal(same, epoch_order(100, seed, epoch))
    # These orders must never change, so that a run can be resumed with a later NumPy.
    assert epoch_order(8, 0, 0).tolist() == FIRST_ORDER
    assert epoch_order(5, 0, 0, shuffle=False).tolist() == [0, 1, 2, 3, 4]


FIRST_ORDER = [3, 2, 1, 6, 0, 7, 4, 5]


def test_tail_describes_the_samples_that_do_not_fill_a_batch():
    assert Share(24, 0, 0, 2, 4).tail == ""
    assert Share(26, 0, 0, 2, 4, True).tail == "the last 2 of 26 samples are left out"
    tail = Share(26, 0, 0, 2, 4).tail
    assert tail == "the last batches are smaller: all ranks together get 2 samples"
    assert "1 of 25 samples are repeated on another rank" in Share(25, 0, 0, 2, 4).tail


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0, 0, 1, 1), "0 samples"),
        ((5, 0, 0, 1, 0), "batch_size is 0"),
        ((5, 0, 2, 2, 1), "rank 2 of 2"),
        ((5, 6, 0, 1, 1), "6 of 5 samples"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        Share(*arguments)
