import pytest

from hvdkit.core.accumulation import PassCount, PassesDiffer, Window, check_passes, window_of
from hvdkit.errors import UsageError
from tests.core.simulated_ranks import on_every_rank


def test_a_window_is_open_until_it_has_all_its_passes():
    window = Window(3)
    for _ in range(2):
        for reduces in (False, False, True):
            assert window.open
            assert window.divisor == 3
            assert window.next_pass_reduces == reduces
            window.count_pass()
        assert not window.open
        window.close()


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_window_is_open_until_the_last_call(reached):
    window, everyone = Window(3), PassCount()
    window.begin(everyone)
    for _ in range(2):
        for call in range(3):
            assert window.next_pass_reduces == (call == 2)
            everyone.add(counted=True)
            for _ in range(reached):
                window.count_pass()
            everyone.begin_step()
            assert window.open == (call < 2)
            if window.open:
                assert not window.count_call()
                assert not window.count_call()  # no pass was made in between
                assert window.made == call + 1
        window.close()


def test_without_accumulation_no_window_is_open():
    window = Window(1)
    assert not window.open
    assert window.divisor == 1


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None, True])
@pytest.mark.parametrize(
    ("mean", "setting"), [(True, "accumulation_steps"), (False, "backward_passes_per_step")]
)
def test_a_size_that_is_no_whole_number_from_one_on_is_refused(size, mean, setting):
    with pytest.raises(UsageError, match=f"{setting} is {size!r}"):
        Window(size, mean=mean)


def test_the_window_of_two_arguments():
    mean, total, neither = window_of(3, 1), window_of(1, 4), window_of(1, 1)
    assert [(w.size, w.mean) for w in (mean, total, neither)] == [(3, True), (4, False), (1, True)]
    for wrong in (
        lambda: window_of(2, 2),
        lambda: window_of(0, 2),
        lambda: window_of(2, 0),
        lambda: window_of(1, True),
    ):
        with pytest.raises(UsageError):
            wrong()


def test_a_window_of_a_sum_has_the_divisor_one():
    window = Window(4, mean=False)
    for passes in range(1, 4):
        window.passes = passes
        assert window.divisor == 1
    assert window.end_early()
    assert (window.open, window.divisor) == (False, 1)


def test_a_window_that_ends_early_has_the_mean_of_its_passes():
    window = Window(4)
    window.passes = 3
    assert window.end_early()
    assert (window.open, window.divisor) == (False, 3)
    window.close()
    assert (window.open, window.divisor, window.made) == (True, 4, 0)


def test_a_window_without_passes_does_not_end_early():
    window = Window(4)
    assert not window.end_early()
    assert (window.open, window.divisor) == (True, 4)


def test_comparing_equal_counts_costs_one_collective():
    def run(collectives):
        check_passes(collectives, 7)
        return collectives.names

    assert on_every_rank(3, run) == [["hvdkit.passes"]] * 3


def test_ranks_that_have_joined_are_not_compared():
    class WithJoinedRanks:
        """Two ranks have made 5 passes; the other ranks are in `join` and contribute zeros."""

        ranks = (0, 1, 2, 3)

        def sum(self, values, name):
            return [2 * value for value in values]

    check_passes(WithJoinedRanks(), 5)


def test_unequal_counts_are_an_error_without_details_if_ranks_have_joined():
    class WithJoinedRanks:
        """One rank has made 5 passes, one has made 4, and one is in `join`."""

        ranks = (0, 1, 2)

        def sum(self, values, name):
            return [own + more for own, more in zip(values, [1, 4, 16], strict=True)]

        def allgather(self, data, name):
            raise AssertionError("a rank that has joined does not enter this")

    with pytest.raises(PassesDiffer, match=r"1 of them have called join\(\)"):
        check_passes(WithJoinedRanks(), 5)
