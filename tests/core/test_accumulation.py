import pytest

from hvdkit.core.accumulation import PassesDiffer, Window, check_passes, window_of
from hvdkit.errors import UsageError
from tests.core.simulated_ranks import on_ranks, simulated


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
