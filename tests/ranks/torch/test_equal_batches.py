"""`hvd.equal_batches`: all ranks end an epoch after the same number of batches."""

import pytest

from hvdkit.errors import HvdkitError


def test_all_ranks_get_as_many_batches_as_the_one_with_the_fewest(hvd):
    loader = hvd.equal_batches(range(3 + 2 * hvd.rank()))
    for _ in range(2):
        assert list(loader) == [0, 1, 2]


def test_a_rank_without_data(hvd):
    assert list(hvd.equal_batches([] if hvd.rank() else [1, 2])) == []


def test_an_error_in_the_data_is_raised(hvd):
    def broken():
        yield 1
        raise ValueError("broken data")

    iterator = iter(hvd.equal_batches([1, 2] if hvd.rank() else broken()))
    assert next(iterator) == 1
    with pytest.raises((ValueError, HvdkitError), match="broken data|raised on another rank"):
        next(iterator)
    hvd.barrier()
