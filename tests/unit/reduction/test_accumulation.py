import pytest

from hvdkit.errors import UsageError
from hvdkit.reduction.accumulation import PassesDiffer, Window, check_passes, window_of
from tests.simulated.ranks import on_ranks, simulated


@pytest.mark.parametrize("passes", [0, 1, 2, 5])
def test_a_mean_ends_with_the_last_call(passes):
    window = Window(3)
    for _ in range(2):
        for call in range(3):
            for _ in range(passes):
                assert window.next_pass_reduces == (call == 2)
                window.count_pass()
            assert window.open == (call < 2)
            assert window.keeps_gradients == (call > 0)
            assert window.divisor == 3
            assert window.position == (call, 3)
            if window.open:
                window.count_call()
                assert window.made == call + 1
        window.end()
        assert not window.open
        assert window.position == (2, 3)
        window.close()


def test_a_sum_counts_the_passes_since_the_last_step():
    window = Window(3, mean=False)
    for passes in (0, 1, 3):
        for number in range(passes):
            assert window.next_pass_reduces == (number == 2)
            window.count_pass()
            window.count_pass(counted=False)
        assert (window.made, window.divisor) == (passes, 1)
        assert window.position == (0, 3)
        assert not window.open
        assert not window.keeps_gradients
        window.close()


def test_a_window_that_ends_early_has_the_mean_of_its_batches():
    window = Window(4)
    for _ in range(3):
        window.count_pass()
        window.count_pass()
        window.count_call()
        window.count_pass()
    for _ in range(2):
        assert window.end_early()
        assert (window.open, window.divisor, window.keeps_gradients) == (False, 4, False)
    window.close()
    window.count_pass()
    window.count_call()
    assert window.end_early()
    assert (window.open, window.divisor) == (False, 1)
    window.close()
    assert (window.open, window.divisor, window.made) == (True, 4, 0)


@pytest.mark.parametrize("mean", [True, False])
def test_a_resumed_window(mean):
    window = Window(3, mean)
    window.resume(2)
    window.discard()  # no pass was made
    assert (window.made, window.next_pass_reduces) == (2, True)
    window.count_pass()
    window.make_whole()
    assert window.begun == (3 if mean else 1)
    window.discard()
    assert window.made == 0


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


@pytest.mark.parametrize("joined", [(), (2, 3)])
def test_equal_counts_cost_one_collective(joined):
    """Ranks in `join` contribute zeros, and do not count."""

    def run(collectives):
        check_passes(collectives, 7)
        return collectives.names

    assert on_ranks(4, run, joined) == [["hvdkit.passes"]] * (4 - len(joined))


@simulated(3, joined={2})
def test_unequal_counts_are_an_error_without_details_if_ranks_have_joined(collectives):
    with pytest.raises(PassesDiffer, match=r"1 of them have called join\(\)"):
        check_passes(collectives, 5 - collectives.rank)
    # A rank that has joined does not enter a gather.
    assert collectives.names == ["hvdkit.passes"]
