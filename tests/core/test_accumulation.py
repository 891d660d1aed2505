import pytest

from hvdkit.core.accumulation import PassesDiffer, Window, check_passes
from hvdkit.errors import HvdkitError, UsageError
from tests.core.simulated_ranks import on_every_rank


def backward(window, gradients=3):
    """One pass; whether its gradients were to be reduced."""
    reduced = set()
    for _ in range(gradients):
        window.arrival()
        reduced.add(window.in_last_pass)
    window.end_pass()
    (verdict,) = reduced
    return verdict


def test_only_the_last_pass_communicates_and_then_a_step_is_due():
    window = Window(3)
    for _ in range(2):
        assert [(backward(window), window.open) for _ in range(3)] == [
            (False, True),
            (False, True),
            (True, False),
        ]
        assert window.divisor == 3
        window.close()


def test_without_accumulation_every_pass_is_the_last_and_no_window_is_open():
    window = Window(1)
    for _ in range(3):
        assert not window.open
        assert backward(window)
        assert not window.open
        assert window.divisor == 1
        window.close()


def test_a_pass_without_gradients_is_no_pass():
    window = Window(2)
    window.end_pass()
    assert window.passes == 0
    backward(window)
    window.end_pass()
    assert window.passes == 1


def test_a_pass_counts_when_it_has_ended():
    window = Window(2)
    window.arrival()
    assert (window.in_pass, window.passes, window.in_last_pass) == (True, 0, False)
    window.end_pass()
    assert (window.in_pass, window.passes, window.in_last_pass) == (False, 1, True)


@pytest.mark.parametrize("size", [1, 3])
def test_a_pass_too_many_is_an_error_that_says_what_to_call(size):
    window = Window(size)
    for _ in range(size):
        backward(window)
    with pytest.raises(HvdkitError, match=rf"after the {size} of .*optimizer.step\(\)"):
        window.arrival()
    window.close()
    assert backward(window) == (size == 1)


def test_a_window_that_was_left_begins_anew_after_a_close():
    window = Window(2)
    backward(window)
    window.arrival()
    window.close()
    assert (window.passes, window.in_pass, window.open) == (0, False, True)
    assert not backward(window)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", None, True])
@pytest.mark.parametrize(
    ("mean", "setting"), [(True, "accumulation_steps"), (False, "backward_passes_per_step")]
)
def test_a_size_that_is_no_whole_number_from_one_on_is_refused(size, mean, setting):
    with pytest.raises(UsageError, match=f"{setting} is {size!r}"):
        Window(size, mean=mean)


def test_a_window_of_a_sum_has_the_divisor_one():
    def run(collectives):
        window = Window(4, mean=False)
        divisors = []
        for _ in range(3):
            backward(window)
            divisors.append(window.divisor)
        assert window.cut(collectives)
        assert not window.open
        return [*divisors, window.divisor]

    assert on_every_rank(2, run) == [[1] * 4] * 2


def passed(collectives, size, passes):
    window = Window(size)
    for _ in range(passes[collectives.rank] if isinstance(passes, list) else passes):
        backward(window)
    return window


def test_a_cut_window_steps_with_the_mean_of_the_passes_it_has():
    def run(collectives):
        window = passed(collectives, 4, 3)
        before = window.open, window.divisor
        something = window.cut(collectives)
        cut = window.open, window.divisor
        window.close()
        return before, something, cut, (window.open, window.divisor)

    assert on_every_rank(3, run) == [((True, 4), True, (False, 3), (True, 4))] * 3


def test_a_cut_without_passes_has_nothing_to_step_with_and_leaves_the_window_as_it_was():
    def run(collectives):
        window = Window(4)
        return window.cut(collectives), window.open, window.divisor, backward(window)

    assert on_every_rank(2, run) == [(False, True, 4, False)] * 2


@pytest.mark.parametrize("passes", [[1, 2], [0, 1], [2, 2, 1], [3, 0, 0, 3]])
def test_a_cut_on_ranks_with_unequal_passes_fails_on_all_of_them(passes):
    def run(collectives):
        window = passed(collectives, 4, passes)
        with pytest.raises(PassesDiffer) as caught:
            window.cut(collectives)
        # Nothing was cut: the ranks may go on to the same count.
        return str(caught.value), window.open, window.passes, window.divisor

    results = on_every_rank(len(passes), run)
    for rank, (message, *state) in enumerate(results):
        assert all(f"rank {r}: {count}" in message for r, count in enumerate(passes))
        assert state == [True, passes[rank], 4]


def test_comparing_equal_counts_costs_one_collective():
    def run(collectives):
        check_passes(collectives, 7)
        return collectives.names

    assert on_every_rank(3, run) == [["hvdkit.passes"]] * 3


def test_ranks_that_have_joined_are_not_compared():
    class WithJoinedRanks:
        """Two ranks have made 5 passes; Horovod adds the zeros of others that sit in `join`."""

        ranks = (0, 1, 2, 3)

        def sum(self, values, name):
            return [2 * value for value in values]

    check_passes(WithJoinedRanks(), 5)


def test_unequal_counts_beside_ranks_that_have_joined_are_an_error_without_asking_them():
    class WithJoinedRanks:
        """Ranks with 5 and 4 passes, and one that sits in `join`."""

        ranks = (0, 1, 2)

        def sum(self, values, name):
            return [own + more for own, more in zip(values, [1, 4, 16], strict=True)]

        def allgather(self, data, name):
            raise AssertionError("a rank that has joined does not enter this")

    with pytest.raises(PassesDiffer, match=r"1 of them have called join\(\)"):
        check_passes(WithJoinedRanks(), 5)
