import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.agreement.consistency import RankMismatchError, are_equal, check_consistency
from tests.simulated.ranks import on_every_rank, on_ranks


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_that_agree_need_one_collective(size):
    def check(collectives):
        check_consistency(collectives, ["a", "b"], "letters")
        return collectives.names

    assert on_every_rank(size, check) == [["hvdkit.agreement"]] * size


@pytest.mark.parametrize("size", [2, 5, 64])
def test_one_rank_that_differs_is_named_on_every_rank(size):
    odd_one = size - 1

    def check(collectives):
        lines = ["same", "weight [3]" if collectives.rank == odd_one else "weight [4]", "more"]
        check_consistency(collectives, lines, "the model")

    errors = on_every_rank(size, check)
    assert all(isinstance(error, RankMismatchError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert f"rank {odd_one}: weight [3]" in str(errors[0])
    assert "weight [4]" in str(errors[0])
    assert "the model" in str(errors[0])


@given(st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=4), st.booleans())
def test_equal_numbers(numbers, repeat):
    """`are_equal` finds every difference with one sum of squares."""
    if repeat:
        numbers = numbers[:1] * len(numbers)

    def check(collectives):
        return are_equal(collectives, numbers[collectives.rank], "numbers")

    assert on_every_rank(len(numbers), check) == [len(set(numbers)) == 1] * len(numbers)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([["a"], ["a", "b"]], "rank 0: nothing more; rank 1: b"),
        ([["line 0"], ["line 1"], ["line 2"]], "rank 0: line 0; rank 1: line 1; rank 2: line 2"),
    ],
)
def test_the_first_lines_that_differ_are_listed(lines, said):
    for error in on_every_rank(
        len(lines), lambda ranks: check_consistency(ranks, lines[ranks.rank], "lines")
    ):
        assert said in str(error)


def test_ranks_that_have_joined_do_not_count():
    """They contribute zeros to sums, and do not enter the gather of the lines."""

    def check(collectives):
        check_consistency(collectives, ["a"], "letters")
        with pytest.raises(
            RankMismatchError, match=r"letters.*2 of 4 ranks have called hvd.join\(\)"
        ):
            check_consistency(collectives, ["ab"[collectives.rank]], "letters")
        return collectives.names

    assert on_ranks(4, check, joined={2, 3}) == [["hvdkit.agreement"] * 2] * 2
