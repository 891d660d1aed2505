import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.core.consistency import RankMismatchError, are_equal, check_consistency, digest
from tests.core.simulated_ranks import on_every_rank


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


def test_a_shorter_description_differs():
    def check(collectives):
        check_consistency(collectives, ["a", "b"][: 1 + collectives.rank], "letters")

    errors = on_every_rank(2, check)
    assert "rank 0: nothing more; rank 1: b" in str(errors[0])


def test_three_different_descriptions_are_all_listed():
    errors = on_every_rank(3, lambda c: check_consistency(c, [f"line {c.rank}"], "lines"))
    assert "rank 0: line 0; rank 1: line 1; rank 2: line 2" in str(errors[2])


def test_ranks_that_have_joined_do_not_count():
    class WithJoinedRanks:
        """Two ranks agree; two other ranks are in `join` and contribute zeros."""

        ranks = (0, 1, 2, 3)
        generation = 1

        def sum(self, values, name):
            assert name == "hvdkit.agreement"
            return [2 * value for value in values]

    check_consistency(WithJoinedRanks(), ["a"], "letters")


def test_lines_are_not_gathered_if_ranks_have_joined():
    class WithJoinedRanks:
        """Two ranks differ; two other ranks are in `join` and contribute zeros."""

        ranks = (0, 1, 2, 3)
        generation = 1

        def sum(self, values, name):
            other = digest(["b"])
            return [
                own + more
                for own, more in zip(values, [1, *other, *(x * x for x in other)], strict=True)
            ]

        def allgather(self, data, name):
            raise AssertionError("a rank that has joined does not enter this")

    with pytest.raises(RankMismatchError, match=r"letters.*2 of 4 ranks have called hvd.join\(\)"):
        check_consistency(WithJoinedRanks(), ["a"], "letters")
